"""Steps of several micro-batches: the numbers of the whole batch, one price for messages sent once, and how many are best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.errors import BudgetError, ConstraintError, InputError
from autopar.explain import report
from autopar.formulation.budget_loop import smallest_of
from autopar.formulation.memory_model import MemoryModel
from autopar.passes.microbatches import microbatches
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.text import plain
from autopar.planning import no_plan
from autopar.planning.optimize import analysed, solved
from autopar.planning.planner import to_plan
from autopar.runtime.memory_tracker import MemoryTracker
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from autopar.solver.settings import SearchSettings
from autopar.verify.verification import verify
from tests.support import models, planning, table
from tests.support.planning import counted, link, mesh
from tests.support.prices import bill
from tests.support.threads import Threads

BATCH = 8


class Regressed(nn.Module):
    """Two layers and a loss; `rows` are weighed by a buffer, a penalty depends on the weights alone."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.up, self.down, self.loss = nn.Linear(16, 32), nn.Linear(32, 8), loss
        self.register_buffer("weight", torch.linspace(0.5, 2.0, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = self.down(torch.tanh(self.up(x)))
        if self.loss == "sum":
            return (found - y[:, None]).square().sum()
        if self.loss == "mse":
            return F.mse_loss(found, x[:, :8]) + 0.01 * self.up.weight.square().sum()
        return F.cross_entropy(found, y, weight=self.weight)


def regressed(loss: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model with a batch in which the first half of the targets is ignored."""
    torch.manual_seed(0)
    return Regressed(loss), (torch.randn(BATCH, 16), torch.tensor([-100, -100, 1, -100, 4, 5, 6, 7]))


CASES: list[tuple[str, tuple[int, ...], str | int, int]] = [
    ("gpt2", (4,), "ddp", 2),
    ("gpt2", (2, 2), "fsdp", 2),
    ("gpt2", (2, 2), "zero2", 2),
    ("gpt2", (2, 2), "megatron", 4),
    ("gpt2", (2, 2), "zero1", 2),
    ("llama", (4,), "zero1", 2),
    ("llama", (2, 2), "auto", 4),
    ("vit", (4,), "auto", 2),
    ("cnn", (2, 2), "ddp", 2),
    ("cnn", (2, 2), 0, 4),
    ("gpt2", (2,), 1, 8),
    ("t5", (2, 2), 2, 2),
    ("bert", (4,), 3, 4),
]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name, sizes, strategy, runs", CASES)
def test_loss_and_gradients_are_those_of_the_whole_batch_and_the_messages_those_of_the_plan(
    threads: Threads, name: str, sizes: tuple[int, ...], strategy: str | int, runs: int
) -> None:
    """A number stands for a random plan, in which random parts are made again for the backward."""
    model, sample = models.make(name)
    on = table.mesh(sizes)
    if isinstance(strategy, int):
        plan = autopar.testing.random_plan(model, sample, on, seed=strategy, microbatches=runs)
    else:
        plan = autopar.plan(model, sample, on, strategy=strategy, microbatches=runs)
    judge(verify(model, sample, on, plan, Options(), threads), runs)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("loss", ["sum", "mse", "weighted"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", 3])
def test_micro_batches_of_sum_mean_and_weighted_losses_have_the_numbers_of_the_whole_batch(
    threads: Threads, loss: str, strategy: str | int
) -> None:
    model, sample = regressed(loss)
    on = table.mesh((2, 2))
    if isinstance(strategy, int):
        plan = autopar.testing.random_plan(model, sample, on, seed=strategy, microbatches=2)
    else:
        plan = autopar.plan(model, sample, on, strategy=strategy, microbatches=2)
    judge(verify(model, sample, on, plan, Options(), threads), 2)


def judge(report: autopar.Report, runs: int) -> None:
    assert report.plan.microbatches == runs
    assert report.ok, str(report)
    assert report.max_error <= 1e-9
    assert report.plan.collectives
    assert {row.what for row in report.rows} >= {"output", "gradient", "capture"}


def steps(_: None) -> None:
    torch.manual_seed(0)
    model, sample = regressed("weighted")
    model, sample = model.double(), (sample[0].double(), sample[1])
    for strategy in ("ddp", "zero1", "fsdp"):
        parallel = autopar.parallelize(model, sample, (2,), device="h100", strategy=strategy, microbatches=2)
        assert parallel.autopar.plan.microbatches == 2
        model.zero_grad()
        expected = model(*sample)
        expected.backward()
        for count in (1, 2):  # without zero_grad a second step adds to the first
            loss = parallel.step(*sample)
            torch.testing.assert_close(loss, expected.detach(), atol=1e-12, rtol=1e-12)
            assert not loss.requires_grad
            alike(parallel, model, count)
        parallel.zero_grad()
        called = parallel(*sample)
        called.backward()
        torch.testing.assert_close(called, expected, atol=1e-12, rtol=1e-12)
        alike(parallel, model, 1)
        with torch.no_grad():
            torch.testing.assert_close(parallel(*sample), expected.detach(), atol=1e-12, rtol=1e-12)
        with pytest.raises(InputError, match="dim 0 is 4, planned 8"):
            parallel.step(*(tensor[:4] for tensor in sample))


def alike(parallel: nn.Module, model: nn.Module, count: int) -> None:
    """Gradients equal those of so many steps."""
    own = dict(parallel.named_parameters())
    for name, parameter in model.named_parameters():
        assert own[name].grad is not None
        assert parameter.grad is not None
        torch.testing.assert_close(full_tensor(own[name].grad), count * parameter.grad, atol=1e-12, rtol=1e-12)


def test_step_trains_and_a_call_is_still_a_forward_of_the_whole_batch(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:steps", ranks=2, keep=True)


class Scaled(nn.Module):
    """A weight times the sum of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x.sum()).sum()


class Dropped(nn.Module):
    """What dropout leaves of ones, and its sum as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.drop = nn.Parameter(torch.ones(64)), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        kept = self.drop(x) * self.weight
        return {"kept": kept, "loss": kept.sum()}


def test_micro_batches_draw_on_their_own_and_follow_the_mode() -> None:
    parallel = autopar.parallelize(Dropped(), torch.ones(8, 64), (1,), device="h100", microbatches=4)
    found = parallel(torch.ones(8, 64))["kept"]
    parts = found.chunk(4)
    assert found.shape == (8, 64)
    assert all(0.3 < (part > 0).double().mean() < 0.7 for part in parts)
    assert not any(torch.equal(parts[0], other) for other in parts[1:])
    parallel.eval()
    assert torch.equal(parallel(torch.ones(8, 64))["kept"], torch.ones(8, 64))
    assert float(parallel.step(torch.ones(8, 64))) == 512


def test_a_step_needs_one_loss_and_one_micro_batch_is_a_step_too() -> None:
    model, sample = regressed("sum")
    parallel = autopar.parallelize(model, sample, (1,), device="h100")
    torch.testing.assert_close(parallel.step(*sample), model(*sample).detach())
    wordy = autopar.parallelize(nn.Linear(4, 4), torch.ones(8, 4), (1,), device="h100")
    with pytest.raises(InputError, match="no output is clearly the loss"):
        wordy.step(torch.ones(8, 4))


# --- prices ----------------------------------------------------------------------------------------------------------------

CAPTURED = planning.gpt2(32, 64, 256)
ON = mesh((4,), link(25))


def planned(runs: int | str, **options: object) -> Plan:
    return planning.plan(CAPTURED, ON, microbatches=runs, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("runs", [2, 8])
def test_gradients_of_whole_weights_are_sent_once_and_all_else_every_time(runs: int) -> None:
    weights = {p.value.name for p in CAPTURED.program.parameters}
    for strategy in ("ddp", "zero1", "fsdp"):
        one, several = planned(1, strategy=strategy), planned(runs, strategy=strategy)
        once, often = (counted(plan, values=weights.__contains__) for plan in (one, several))
        factor = runs if strategy == "fsdp" else 1
        assert once
        assert often == Counter({key: factor * count for key, count in once.items()})
        assert counted(several) - often == Counter({("all_reduce", "forward"): runs}), "the loss; targets are counted once"


def test_auto_is_never_slower_than_a_strategy_by_name_and_shares_gathered_weights_where_that_is_faster() -> None:
    auto = planned(8)
    for strategy in ("ddp", "zero1", "zero2", "fsdp", "megatron"):
        assert auto.step_time <= planned(8, strategy=strategy).step_time * (1 + 1e-9)
    tall = planning.plan(CAPTURED, table.mesh((4,)), microbatches=2, constraints={"*.weight": "S(0)"})
    assert tall.once
    assert tall.step_time < planning.plan(CAPTURED, table.mesh((4,)), microbatches=2, strategy="zero2").step_time


@pytest.mark.one_in(3)
@pytest.mark.parametrize("strategy", ["auto", "ddp", "zero1", "fsdp", "megatron"])
def test_a_step_costs_its_runs_and_one_step_of_the_optimizer(strategy: str) -> None:
    runs, on = 4, table.mesh((2, 2))
    step = microbatches(CAPTURED.program, runs)
    options = Options(strategy=strategy)
    found = solved(analysed(step, on, options), on, options)
    made = to_plan(found, options)
    breakdown, own = made.breakdown, bill(made, step, on)
    few = 5 * runs * max(link.latency for link in on.links)  # of the messages in which weights go different ways
    assert found.solution.seconds == pytest.approx(made.step_time, rel=0, abs=few), "the integer program prices it so"
    assert breakdown.forward + breakdown.backward == pytest.approx(runs * own.ops, rel=1e-9)
    assert breakdown.optimizer == pytest.approx(own.optimizer, rel=1e-9)
    hoisted = breakdown.conversions - runs * (own.local + own.inputs) - (1 if made.once else runs) * own.copied - own.joined
    assert 0 < hoisted < 1e-4
    assert len(own.issued) < len(made.collectives) <= runs * len(own.issued)


def test_activations_are_those_of_one_micro_batch_and_gradients_stay() -> None:
    captured = planning.layers(4096, 64, *(128 for _ in range(10)), 64)
    plans = [planning.plan(captured, ON, microbatches=runs, strategy="ddp", optimizer="sgd") for runs in (1, 4)]
    one, four = (made.breakdown.memory for made in plans)
    assert four["saved activations"] < 0.3 * one["saved activations"]
    assert four["gradients"] == four["parameters"]
    assert plans[1].peak_memory < plans[0].peak_memory


@pytest.mark.parametrize("runs", [2, 4])
def test_what_is_alive_in_a_step_is_what_the_plan_says(runs: int) -> None:
    torch.manual_seed(0)
    model = planning.Layers((64, *(128 for _ in range(10)), 64))
    batch = torch.randn(1024, 64)
    parallel = autopar.parallelize(model, batch, (1,), device="cpu", optimizer="sgd", microbatches=runs)
    with MemoryTracker([*parallel.parameters(), batch]) as live:
        parallel.step(batch)
    plan = parallel.autopar.plan
    assert plan is not None
    assert live.peak().bytes == pytest.approx(plan.peak_memory, rel=0.05)


PLAIN = planning.layers(256, 64, 512, 512, 64)


def test_auto_takes_one_micro_batch_where_memory_is_plenty_and_more_where_it_is_not() -> None:
    plenty = planning.plan(PLAIN, ON, microbatches="auto")
    assert plenty.microbatches == 1
    assert plenty.step_time == planning.plan(PLAIN, ON).step_time
    tight = planning.smallest(PLAIN, ON) * 9 // 10
    with pytest.raises(BudgetError) as caught:
        planning.plan(PLAIN, ON, budget=tight)
    assert "microbatches='auto'" in caught.value.details["fix"]
    found = planning.plan(PLAIN, ON, budget=tight, microbatches="auto")
    assert found.microbatches > 1
    assert found.peak_memory <= tight
    assert found.options["microbatches"] == "auto"
    assert all(found.step_time <= plan.step_time for plan in fitting(tight))


@pytest.mark.parametrize("shape", [(), (0,)])
def test_auto_micro_batches_are_one_where_there_is_no_batch(shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        found = autopar.plan(Scaled(), torch.zeros(shape), (1,), device="h100", microbatches="auto")
    assert found.microbatches == 1


def fitting(budget: int) -> list[Plan]:
    plans = []
    for runs in (2, 4, 8, 16):
        with suppress(BudgetError):
            plans.append(planning.plan(PLAIN, ON, microbatches=runs, budget=budget))
    assert plans
    return plans


def test_auto_micro_batches_report_the_smallest_budget_over_all_numbers() -> None:
    with pytest.raises(BudgetError) as caught:
        planning.plan(PLAIN, ON, microbatches="auto", budget=1)
    smallest = int(caught.value.details["smallest"].removeprefix("budget="))
    assert smallest < planning.smallest(PLAIN, ON)
    assert int(caught.value.details["microbatches"]) > 1
    assert planning.plan(PLAIN, ON, microbatches="auto", budget=smallest).peak_memory <= smallest


def test_the_least_memory_is_searched_once_for_all_numbers_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[int]()

    def noted(models: Iterable[MemoryModel], settings: SearchSettings) -> object:
        known = list(models)
        searched.append(len(known))
        return smallest_of(known, settings)

    monkeypatch.setattr(no_plan, "smallest_of", noted)
    with pytest.raises(BudgetError, match="the smallest budget that works is"):
        planning.plan(PLAIN, ON, microbatches="auto", budget=1)
    assert len(searched) == 1
    assert searched[0] >= 5  # numbers of micro-batches: 1, 2, 4, 8, 16


def test_auto_micro_batches_are_one_where_the_batch_cannot_be_parted() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU())
    assert autopar.plan(model, torch.zeros(32, 64), (4,), device="h100", microbatches="auto").microbatches == 1


def test_auto_micro_batches_pass_over_parts_that_the_strategy_cannot_split() -> None:
    captured = planning.layers(12 * 997, 64, 512, 512, 64)  # over four devices in three parts, but not in two
    with pytest.raises(ConstraintError, match="cannot split a micro-batch of 5982 over 4 devices") as refused:
        planning.plan(captured, ON, strategy="ddp", microbatches=2)
    assert "a global batch that is a multiple of 8" in refused.value.details["fix"]
    with pytest.raises(BudgetError) as caught:
        planning.plan(captured, ON, strategy="ddp", budget=1)
    tight = int(caught.value.details["smallest"].removeprefix("budget=")) * 9 // 10
    assert planning.plan(captured, ON, strategy="ddp", budget=tight, microbatches="auto").microbatches == 3


# --- plans and refusals ----------------------------------------------------------------------------------------------------


def test_a_plan_keeps_its_micro_batches_and_says_so() -> None:
    made = planned(4, strategy="fsdp")
    assert Plan.from_json(made.to_json()) == made
    assert made.options["microbatches"] == "4"
    assert planned(1).options["microbatches"] == ""
    assert "micro-batches  4 per step" in str(made)
    text = plain(report(made))
    assert "micro-batches  4 per step" in text
    assert "ahead:" not in text
    assert "micro-batches" not in plain(report(planned(1)))


@pytest.mark.parametrize(
    "asked, said",
    [
        (3, "the batch is 8"),
        (0, "is not a number of micro-batches"),
        ("many", "microbatches='many' is not a number"),
        (True, "is not a number"),
    ],
)
def test_numbers_that_do_not_part_the_batch_are_refused(asked: object, said: str) -> None:
    model, sample = regressed("sum")
    with pytest.raises(ConstraintError, match=said):
        autopar.plan(model, sample, (2, 2), device="h100", microbatches=asked)  # type: ignore[arg-type]


def test_a_buffer_that_is_read_ahead_is_stored_whole() -> None:
    model, sample = regressed("weighted")
    plan = autopar.plan(model, sample, (2, 2), device="h100", microbatches=2)
    assert plan.layouts["weight"] == "I, I"
    with pytest.raises(ConstraintError, match="weight cannot be split"):
        autopar.plan(model, sample, (2, 2), device="h100", microbatches=2, constraints={"weight": "S(0), I"})


def test_the_command_line_takes_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    from autopar.explain.command import main

    target = ["tests.planning.test_microbatches:summed", "--mesh", "2,2", "--device", "h100", "--microbatches"]
    assert main([*target, "4"]) == 0
    assert "4 per step, one after another" in capsys.readouterr().out
    assert main([*target, "3"]) == 1
    assert "the batch is 8" in capsys.readouterr().err


def summed() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model for the command line."""
    return regressed("sum")
