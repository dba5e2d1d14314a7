"""Dynamic sizes: a plan made for one batch runs on others, with the numbers of the sequential model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.codegen import variants
from autopar.errors import CaptureError, ConstraintError, InputError, PlanError
from autopar.explain import report
from autopar.ir.dynamic_dims import DimSizes, Dynamic, dim_sizes
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.resolved import read_plan
from autopar.plan.text import plain
from autopar.planning.planner import read_program
from autopar.planning.respecialize import Respecializer
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from autopar.verify.verification import verify
from tests.support import models, planning, table
from tests.support.planning import form
from tests.support.threads import Threads
from tests.verify.test_parallel_attention import Looking
from tests.verify.test_parallel_recurrence_and_experts import mixture

WORDS: dict[str, DimSizes | Dynamic] = {"batch": 0, "sequence": Dynamic(1, least=8, most=24)}
IMAGES: dict[str, DimSizes | Dynamic] = {"batch": {"pixel_values": 0, "labels": 0}}
DYNAMIC = {"gpt2": WORDS, "llama": WORDS, "t5": WORDS, "bert": WORDS, "opt": WORDS, "cnn": IMAGES, "vit": IMAGES}


def at(sample: models.Sample, batch: int, length: int = models.LENGTH) -> models.Sample:
    """A sample of another size: rows and columns are repeated or left out."""
    rows, columns = torch.arange(batch) % models.BATCH, torch.arange(length) % models.LENGTH
    return {name: tensor[rows][:, columns] if tensor.ndim == 2 else tensor[rows] for name, tensor in sample.items()}


def made(name: str, sizes: tuple[int, ...], strategy: str | int) -> Plan:
    """A plan at the sample's size; a number stands for a random one."""
    model, sample = models.make(name)
    on, dynamic = table.mesh(sizes), DYNAMIC[name]
    if isinstance(strategy, int):
        return autopar.testing.random_plan(model, sample, on, seed=strategy, dynamic=dynamic)
    return autopar.plan(model, sample, on, strategy=strategy, dynamic=dynamic)


PLANNED = [((4,), "auto"), ((4,), 1), ((2, 4), 0)]  # by turns


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name, sizes, strategy", [(name, *PLANNED[i % 3]) for i, name in enumerate(DYNAMIC)])
def test_a_plan_carried_to_other_sizes_and_back_is_itself(name: str, sizes: tuple[int, ...], strategy: str | int) -> None:
    model, sample = models.make(name)
    plan = made(name, sizes, strategy)
    here = read_program(model, sample).program
    there = read_program(model, sample, places=dim_sizes(plan.dynamic, [16, 24][: len(plan.dynamic)])).program
    carried = Respecializer(read_plan(plan, here, plan.mesh)).plan_for(there, "batch=16")
    assert carried.plan.hash == there.hash != plan.hash
    assert read_plan(carried.plan, there, plan.mesh).assignment == carried.assignment
    assert Respecializer(carried).plan_for(here, "batch=8").plan == plan


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "name, batch, length, strategy",
    [
        ("gpt2", 4, 16, "auto"),
        ("gpt2", 16, 8, "fsdp"),
        ("llama", 4, 16, 5),
        ("t5", 16, 8, "auto"),
        ("llama", 16, 24, "auto"),
        ("cnn", 16, 16, 5),
        ("cnn", 4, 16, "fsdp"),
        ("cnn", 16, 16, "auto"),
        ("t5", 16, 8, 5),
    ],
)
def test_loss_and_gradients_at_another_size_are_those_of_the_sequential_model(
    threads: Threads, name: str, batch: int, length: int, strategy: str | int
) -> None:
    model, sample = models.make(name)
    plan = made(name, (2,), strategy)
    found = verify(model, at(sample, batch, length), table.mesh((2,)), plan, Options(), threads)
    assert found.ok, str(found)
    assert found.max_error <= 1e-9
    assert any(note.startswith("may vary: batch (dim 0 of") for note in found.notes)


@pytest.mark.parametrize(
    "name, strategy, options",
    [
        ("gpt2", "fsdp", {"microbatches": 2}),
        pytest.param("llama", "megatron", {"microbatches": 4}, marks=pytest.mark.thorough),
        ("gpt2", "auto", {"precision": "bf16-mixed"}),
        ("gpt2", "megatron", {"constraints": {"transformer.wte.weight": "S(0)"}}),
    ],
    ids=["accumulated", "many parts", "bf16", "vocabulary"],
)
def test_other_sizes_in_micro_batches_mixed_precision_and_a_split_vocabulary_have_the_sequential_numbers(
    threads: Threads, name: str, strategy: str, options: dict[str, object]
) -> None:
    model, sample = models.make(name)
    on = table.mesh((2,))
    plan = autopar.plan(model, sample, on, strategy=strategy, dynamic=DYNAMIC[name], **options)  # type: ignore[arg-type]
    assert "constraints" not in options or form(plan, "wte:embedding") == "vocab_parallel_embedding"
    found = verify(model, at(sample, 16, 24), on, plan, Options(), threads)
    assert found.ok, str(found)


def test_other_sizes_under_ring_attention_have_the_sequential_numbers(threads: Threads) -> None:
    torch.manual_seed(0)
    model, x, on = Looking(8, causal=True), torch.randn(1, 256, 8), table.mesh((4,))
    budget = planning.smallest(read_program(model, x), on)
    plan = autopar.plan(model, x, on, budget=budget, dynamic={"sequence": {"x": 1}})
    assert form(plan, "attention") == "ring_attention"
    assert plan.dynamic[0].multiple == 4
    found = verify(model, torch.randn(1, 100, 8), on, plan, Options(), threads)
    assert found.ok, str(found)


@pytest.mark.thorough
def test_other_sizes_of_a_mixture_of_experts_have_the_sequential_numbers(threads: Threads) -> None:
    (model, sample), on = mixture(), table.mesh((4,))
    asked = {"model.layers.0.mlp.experts:grouped_mm_fallback#*": "S(0)"}
    plan = autopar.plan(model, sample, on, dynamic={"batch": 0}, constraints=asked)
    assert form(plan, "grouped_mm_fallback#0") == "expert_parallel_grouped_mm"
    found = verify(model, at(sample, 16), on, plan, Options(), threads)
    assert found.ok, str(found)


class Sentences(nn.Module):
    """Causal attention over words at learned positions, a mean loss over the targets that count, twice that in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.mixed, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 32)
        self.drop = nn.Dropout(0.0)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        query, key, value = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.mixed(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(found.transpose(1, 2).flatten(2)))
        scores = self.head(x)
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        return {"loss": loss if self.training else 2 * loss, "scores": scores}


BOTH: dict[str, DimSizes | Dynamic] = {"batch": 0, "sequence": Dynamic(1, most=32)}


def sentences(batch: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch, of which the first row has no targets."""
    drawn = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(32, (batch, length), generator=drawn) for _ in range(2))
    return tokens, targets.index_fill(0, torch.tensor([0]), -100)


def double() -> nn.Module:
    """The model in float64, the same every time."""
    torch.manual_seed(0)
    return Sentences().double()


@dataclass(frozen=True)
class Run:
    """How the model is planned, and the sizes of the batches that follow each other."""

    plan: str
    steps: tuple[tuple[int, int], ...]


def three_steps(run: Run) -> tuple[float, list[tuple[int, ...]]]:
    """Train side by side on batches of several sizes, evaluate between; the largest difference, and the sizes emitted."""
    plan = Plan.from_json(run.plan)
    model = double()
    parallel = autopar.parallelize(model, sentences(8, 24), plan.mesh, plan=plan)
    pair = [(module, torch.optim.AdamW(module.parameters(), lr=1e-2)) for module in (parallel, model)]
    errors = []
    for number, (batch, length) in enumerate(run.steps):
        given = sentences(batch, length, number)
        losses = []
        for module, optimizer in pair:
            module.train()
            if plan.microbatches > 1 and module is parallel:
                losses.append(parallel.step(*given))
            else:
                losses.append(module(*given)["loss"])
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        errors.append(float(abs(losses[0] - losses[1]).detach()))
        with torch.no_grad():
            ours, theirs = (module.eval()(*given) for module, _ in pair)
        errors += [float((full_tensor(ours[name]) - theirs[name]).abs().max()) for name in theirs]
    expected = dict(model.named_parameters())
    errors += [float((full_tensor(held) - expected[name]).abs().max().detach()) for name, held in parallel.named_parameters()]
    return max(errors), list(parallel.autopar.variants)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy, microbatches", [("fsdp", 2), ("auto", 1), (3, 1)])
def test_three_steps_of_adamw_with_a_smaller_last_batch_equal_the_sequential_ones(
    pool: WorkerPool, strategy: str | int, microbatches: int
) -> None:
    on, sample = table.mesh((2,)), sentences(16, 16)
    if isinstance(strategy, int):
        plan = autopar.testing.random_plan(double(), sample, on, seed=strategy, dynamic=BOTH)
    else:
        plan = autopar.plan(double(), sample, on, strategy=strategy, dynamic=BOTH, microbatches=microbatches)
    steps = ((16, 16), (24, 32), (8, 24), (24, 32))
    for error, sizes in pool.run(f"{__name__}:three_steps", Run(plan.to_json(), steps), ranks=2):  # type: ignore[misc]
        assert error < 1e-9
        assert sizes == [(8, 24), (24, 32)]  # those used last at the end


def test_a_saved_plan_keeps_what_may_vary_and_reports_say_so(tmp_path: Path) -> None:
    plan = autopar.plan(double(), sentences(16, 16), (4,), device="h100", strategy="ddp", dynamic=BOTH)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    line = "batch (dim 0 of tokens, targets): multiples of 4, planned at 16"
    assert line in str(plan)
    assert line in plain(report(plan))
    assert "sequence (dim 1 of tokens, targets): 2 to 32, planned at 16" in str(plan)


def alone(dynamic: Mapping[str, DimSizes | Dynamic] = BOTH) -> nn.Module:
    """The model on one device."""
    return autopar.parallelize(double(), sentences(16, 16), (1,), device="h100", dynamic=dynamic)


@pytest.mark.parametrize(
    "call, first, details",
    [
        (lambda: sentences(16, 40), "sequence is 40 (dim 1 of tokens, targets), but the plan takes 2 to 32", "planned  16"),
        (lambda: sentences(1, 16), "batch is 1 (dim 0 of tokens, targets), but the plan takes 2 or more", "drop_last=True"),
        (
            lambda: (sentences(8, 16)[0], sentences(4, 16)[1]),
            "the arguments disagree on batch: dim 0 of tokens is 8, dim 0 of targets is 4",
            "one size for all of them",
        ),
    ],
)
def test_a_size_that_was_not_declared_so_is_refused(
    call: Callable[[], tuple[torch.Tensor, ...]], first: str, details: str
) -> None:
    module = alone()
    with pytest.raises(InputError) as refusal:
        module(*call())
    assert str(refusal.value).startswith(first)
    assert details in str(refusal.value)


def test_an_undeclared_size_is_refused_and_the_error_says_how_to_declare_it() -> None:
    with pytest.raises(InputError, match="argument tokens has another shape than planned: dim 1 is 8, planned 16") as refusal:
        alone({"batch": 0})(*sentences(4, 8))
    assert 'dynamic={"batch": 0}' in refusal.value.details["fix"]


def test_parts_of_a_batch_are_divided_by_the_mesh_too() -> None:
    model, sample = models.make("gpt2")
    for runs in (1, 2):
        plan = autopar.plan(model, sample, (2, 2), device="h100", strategy="fsdp", microbatches=runs, dynamic={"batch": 0})
        assert plan.dynamic[0].multiple == 4 * runs


def test_a_model_of_a_library_runs_at_other_sizes_in_both_modes() -> None:
    """Dropout is drawn anew in every call, also in one at another size."""
    model, sample = models.make("gpt2")
    parallel = autopar.parallelize(model, sample, (1,), device="h100", dynamic=WORDS)
    for batch, length in ((8, 16), (3, 24)):
        given = at(sample, batch, length)
        found, expected = (module.eval()(**given) for module in (parallel, model))
        assert type(found) is type(expected)
        assert found.logits.shape == (batch, length, models.VOCABULARY)
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(found.logits, expected.logits)
        first, second = (parallel.train()(**given).loss for _ in range(2))
        assert first != second


def test_a_size_that_the_mesh_does_not_divide_is_refused() -> None:
    plan = autopar.plan(double(), sentences(16, 16), (4,), device="h100", strategy="ddp", dynamic=BOTH)
    with pytest.raises(InputError, match=r"batch is 10 \(dim 0 of tokens, targets\), but the plan takes multiples of 4"):
        autopar.verify(double(), sentences(10, 16), (4,), plan=plan)


@pytest.mark.parametrize(
    "dynamic, first",
    [
        ({"batch": 5}, "dynamic['batch'] is not a dim of any input"),
        (["batch"], "dynamic=['batch'] names no sizes"),
        ({"batch": "x"}, "dynamic['batch'] is 'x'"),
        ({"batch": {"words": 0}}, "dynamic['batch'] names 'words', which is not a tensor of the sample"),
        ({"batch": {"tokens": 2}}, "dynamic['batch'] names dim 2 of tokens, which it does not have"),
        ({"batch": 0, "rows": {"tokens": 0}}, "dim 0 of tokens is declared twice: as 'batch' and as 'rows'"),
        ({"both": {"tokens": 0, "targets": 1}}, "'both' has several sizes in the sample: dim 0 of tokens is 16, dim 1 of "),
        ({"batch": Dynamic(0, least=1)}, "'batch' is 16 in the sample, and may be 1 or more"),
        ({"batch": Dynamic(0, most=8)}, "'batch' is 16 in the sample, and may be 2 to 8"),
    ],
)
def test_a_declaration_that_does_not_fit_the_sample_is_refused(dynamic: dict[str, DimSizes | Dynamic], first: str) -> None:
    with pytest.raises(ConstraintError) as refusal:
        autopar.plan(double(), sentences(16, 20), (4,), device="h100", dynamic=dynamic)
    assert str(refusal.value).startswith(first)


class Branching(nn.Module):
    """Another activation for long batches."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.up(x)
        return (found.relu() if len(x) < 20 else found.tanh()).sum()


class Uneven(nn.Module):
    """A layer, and parts of the sequence that are equally long in the sample, and not in an odd one."""

    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 4), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer(x)).square().mean()


def halves(y: torch.Tensor) -> torch.Tensor:
    return torch.cat([y[:, : y.shape[1] // 2].sin(), y[:, y.shape[1] // 2 :].cos()], 1)


def chunks(y: torch.Tensor) -> torch.Tensor:
    return torch.cat([part * (number + 1) for number, part in enumerate(y.chunk(2, 1))], 1)


def padded(y: torch.Tensor) -> torch.Tensor:
    return F.pad(y, (0, 0, 0, -y.shape[1] % 4)).unflatten(1, (-1, 4)).mean(2)


def some(y: torch.Tensor) -> torch.Tensor:
    return y.topk(max(1, y.shape[1] // 3), 1).values + y[:, : int(y.shape[1] * 0.75)].mean(1, keepdim=True)


@pytest.mark.parametrize("body", [halves, chunks, padded, some])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_plan_that_splits_the_batch_runs_at_lengths_that_other_operators_split_otherwise(
    threads: Threads, body: Callable[[torch.Tensor], torch.Tensor], strategy: str
) -> None:
    torch.manual_seed(0)
    model, on, dynamic = Uneven(body), table.mesh((2,)), {"batch": 0, "length": 1}
    plan = autopar.plan(model, torch.randn(8, 6, 4), on, strategy=strategy, dynamic=dynamic)
    for sizes in ((4, 7), (6, 12), (10, 3)):
        found = verify(model, torch.randn(*sizes, 4), on, plan, Options(), threads)
        assert found.ok, str(found)


def test_a_plan_that_splits_what_is_split_otherwise_at_another_size_is_refused() -> None:
    """Two equal halves may be split alike, those of nine places not."""
    model, on = Uneven(halves), table.mesh((2,))
    plan = autopar.plan(model, torch.randn(2, 8, 4), on, constraints={":cat#0": "S(1/2)"}, dynamic={"length": 1})
    here = read_program(model, torch.randn(2, 8, 4)).program
    carry = Respecializer(read_plan(plan, here, plan.mesh))
    assert carry.plan_for(read_program(model, torch.randn(2, 16, 4)).program, "length=16")
    with pytest.raises(CaptureError, match=r"(?s)at length=9 than at.*aten.cat.default may be split in other ways"):
        carry.plan_for(read_program(model, torch.randn(2, 9, 4)).program, "length=9")


def test_a_model_that_branches_on_its_size_is_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match="the model computes something else at batch=32 than at the sample's") as refusal:
        autopar.plan(Branching(), torch.randn(16, 8), (4,), device="h100", dynamic={"batch": 0})
    details = refusal.value.details
    assert details["differs"] == "aten.tanh.default where it was aten.relu.default"
    assert "test_dynamic.py" in details["at"]
    plan = autopar.plan(Branching(), torch.randn(16, 8), (4,), device="h100", dynamic={"batch": Dynamic(0, most=18)})
    assert plan.dynamic[0].allowed == "2 to 18"


def test_a_dim_at_whose_other_sizes_the_model_does_not_run_is_named() -> None:
    with pytest.raises(CaptureError, match=r"^width \(dim 1 of input\) cannot vary: .* where it is 32, not 16") as refusal:
        autopar.plan(nn.Linear(16, 4), torch.randn(8, 16), (2,), device="h100", dynamic={"width": 1})
    assert "leave width out of dynamic=" in refusal.value.details["fix"]


def test_a_plan_for_other_sizes_than_are_asked_for_is_refused() -> None:
    sample = sentences(16, 16)
    plan = autopar.plan(double(), sample, (1,), device="h100", dynamic={"batch": 0})
    with pytest.raises(PlanError, match="the plan was made for other sizes than dynamic=") as refusal:
        autopar.parallelize(double(), sample, (1,), plan=plan, dynamic=BOTH)
    assert refusal.value.details["plan"].startswith("batch (dim 0 of tokens, targets)")


def test_a_copy_of_a_module_has_variants_over_its_own_parameters() -> None:
    module = alone()
    given = sentences(4, 8)
    expected = double()(*given)["loss"]
    assert torch.allclose(module(*given)["loss"], expected)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.allclose(other(*given)["loss"], torch.tensor(32.0, dtype=torch.float64).log())
    assert torch.allclose(module(*given)["loss"], expected)


def test_sizes_are_built_before_they_are_met_and_those_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    module = alone()
    module.prewarm(sequence=(4, 8), batch=4)
    assert [*module.autopar.variants] == [(4, 4), (4, 8)]
    built = dict(module.autopar.variants)
    given = sentences(4, 8)
    assert torch.allclose(module(*given)["loss"], double()(*given)["loss"])
    assert dict(module.autopar.variants) == built
    monkeypatch.setattr(variants, "MOST", 2)
    module(*sentences(4, 4))
    module.prewarm(sequence=12)
    assert [numbers[1] for numbers in module.autopar.variants] == [4, 12]
    with pytest.raises(InputError, match="tokens is not a dynamic size of the plan"):
        module.prewarm(tokens=4)
    with pytest.raises(InputError, match="is not a size, nor sizes"):
        module.prewarm(sequence=("8",))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sequence is 64"):
        module.prewarm(sequence=(8, 64))
