"""Accelerate's loop over a parallel module: prepared modules, loaders and optimizers, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.errors import InputError
from autopar.integrations.accelerate import Accelerator
from autopar.runtime.workers import WorkerPool
from tests.integrations.launched import launched

BATCH, STEPS = 8, 4
X = torch.randn(36, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sin())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6)) for _ in range(2)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(x), y)


STAGES = {"pipeline": "axis0", "stages": 2, "microbatches": 2}  # of two ranks, which load the same samples


def made(model: nn.Module, strategy: str) -> fx.GraphModule:
    how = STAGES if strategy == "stages" else {"strategy": strategy}
    return autopar.parallelize(model, DATA[:BATCH], (dist.get_world_size(),), device="h100", inputs="sharded", **how)


def expected() -> list[float]:
    """The losses of a plain loop over whole batches, with two of them in every step."""
    model, losses = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        for number in range(STEPS):
            loss = model(*DATA[number * BATCH : (number + 1) * BATCH])
            (loss / 2).backward()
            losses.append(loss.item())
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    return losses


def looped(case: tuple[Path, str]) -> tuple[list[float], list[str]]:
    """The losses of two epochs, the second after a restart, and the names of the weights that this rank has in the end."""
    folder, strategy = case
    launched()
    losses: list[float] = []
    for epoch in range(2):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        parallel = made(Net(), strategy)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.05)
        loader = DataLoader(DATA, batch_size=BATCH // parallel.data_world)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        loader, optimizer, parallel, schedule = accelerator.prepare(loader, optimizer, parallel, schedule)
        if epoch:
            accelerator.load_state(str(folder))
        for own in loader:
            assert len(own[0]) == BATCH // (1 if strategy == "stages" else 2)
            with accelerator.accumulate(parallel):
                loss = parallel(*own)
                accelerator.backward(loss)
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(parallel.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.save_state(str(folder))
    return losses, [*accelerator.get_state_dict(parallel)]


@pytest.mark.parametrize("strategy", ["fsdp", "stages"])
def test_a_loop_with_a_restart_has_the_losses_of_one_process(pool: WorkerPool, tmp_path: Path, strategy: str) -> None:
    found = pool.run(f"{__name__}:looped", (tmp_path, strategy), ranks=2)
    for losses, _ in found:  # type: ignore[misc]
        assert losses == pytest.approx(expected(), rel=1e-4)
    names = [*Net().state_dict()]
    assert [kept for _, kept in found] == [names, []]  # type: ignore[misc]


FIRST = "body.0."  # the weights of the first of two stages


def whole(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def clipped(strategy: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The norm of the gradients of the first block, which is clipped alone, and what all gradients of this rank are then."""
    launched()
    accelerator = Accelerator(cpu=True)
    parallel = accelerator.prepare(made(Net(), strategy))
    accelerator.backward(parallel(*parallel.shard(DATA[:BATCH])))
    some = [weight for name, weight in parallel.named_parameters() if name.startswith(FIRST)]
    norm = accelerator.clip_grad_norm_(some, 0.01)
    return float(norm), {name: whole(weight.grad) for name, weight in parallel.named_parameters()}


@pytest.mark.parametrize("strategy", ["fsdp", "stages"])
def test_some_gradients_are_clipped_by_their_own_norm_on_every_rank(pool: WorkerPool, strategy: str) -> None:
    """As those of weights that are not frozen; of the second stage there are none."""
    model = Net()
    model(*DATA[:BATCH]).backward()
    expected = nn.utils.clip_grad_norm_([weight for name, weight in model.named_parameters() if name.startswith(FIRST)], 0.01)
    seen = set[str]()
    for norm, gradients in pool.run(f"{__name__}:clipped", strategy, ranks=2):  # type: ignore[misc]
        assert norm == pytest.approx(float(expected), rel=1e-4)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad)
        seen |= gradients.keys()
    assert seen == dict(model.named_parameters()).keys()


def two(case: tuple[Path, str]) -> list[dict[str, torch.Tensor]]:
    """The weights of two modules of one Accelerator after a step, after another, and, twice, after a load of those between."""
    folder, strategy = case
    launched()
    accelerator = Accelerator(cpu=True)
    modules = [made(Net(), strategy), made(Net(), "fsdp")]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=lr) for module, lr in zip(modules, (0.05, 0.01), strict=True)]
    prepared = accelerator.prepare(*modules, *optimizers)[2:]

    def step() -> None:
        for module, optimizer in zip(modules, prepared, strict=True):
            accelerator.backward(module(*module.shard(DATA[:BATCH])))
            accelerator.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    def weights() -> dict[str, torch.Tensor]:
        named = ((f"{n}.{name}", weight) for n, module in enumerate(modules) for name, weight in module.named_parameters())
        return {name: whole(weight.detach()).clone() for name, weight in named}

    step()
    accelerator.save_state(str(folder))
    found = [weights()]
    for _ in range(2):
        step()
        found.append(weights())
        accelerator.load_state(str(folder))
    return [*found, weights()]


@pytest.mark.parametrize("strategy", ["megatron", "stages"])
def test_the_state_of_two_parallel_modules_is_saved_and_loaded(pool: WorkerPool, tmp_path: Path, strategy: str) -> None:
    """As of a generator and a discriminator: each with its optimizer's, so that the second steps are alike."""
    for first, second, again, loaded in pool.run(f"{__name__}:two", (tmp_path, strategy), ranks=2):  # type: ignore[misc]
        torch.testing.assert_close(loaded, first, rtol=0, atol=0)
        torch.testing.assert_close(again, second, rtol=0, atol=0)
        assert any(not torch.equal(first[name], second[name]) for name in first)


def alone(folder: Path) -> None:
    """A state without an optimizer is saved and loaded."""
    launched()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(made(Net(), "fsdp"))
    accelerator.save_state(str(folder))
    accelerator.load_state(str(folder))


def test_a_module_without_an_optimizer_is_saved(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(f"{__name__}:alone", tmp_path, ranks=2)


def skipped(strategy: str) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """The batches of this rank in the second epoch, and those without the first one."""
    launched()
    accelerator = Accelerator(cpu=True)
    parallel = made(Net(), strategy)
    loader = accelerator.prepare(DataLoader(DATA, batch_size=BATCH // parallel.data_world, shuffle=True), parallel)[0]
    loader.set_epoch(1)
    rest = accelerator.skip_first_batches(loader, 1)
    return [*loader], [*rest]


@pytest.mark.parametrize("strategy", ["fsdp", "stages"])
def test_a_loader_without_its_first_batches_has_the_others_of_its_epoch(pool: WorkerPool, strategy: str) -> None:
    for whole, rest in pool.run(f"{__name__}:skipped", strategy, ranks=2):  # type: ignore[misc]
        assert len(whole) == STEPS
        for one, other in zip(whole[1:], rest, strict=True):
            torch.testing.assert_close(one, other)


class Predicts(Net):
    """With its prediction beside the loss."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        found = self.body(x)
        return {"loss": functional.mse_loss(found, y), "found": found}


class Flattens(Net):
    """Its prediction is a row of numbers, as the scores of tokens are."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        found = self.body(x)
        return {"loss": functional.mse_loss(found, y), "found": found.flatten()}


def evaluated(strategy: str) -> list[tuple[torch.Tensor, ...]]:
    """What the library's evaluation gathers of each batch: predictions, targets, and the loss of each rank."""
    launched()
    accelerator = Accelerator(cpu=True)
    parallel = made(Predicts(), strategy)
    loader = DataLoader(DATA, batch_size=BATCH // parallel.data_world)
    parallel, loader = accelerator.prepare(parallel.eval(), loader)
    with torch.no_grad():
        found = [(parallel(*own), own[1]) for own in loader]
        rank = torch.tensor(dist.get_rank())
        return [accelerator.gather_for_metrics((one["found"], y, one["loss"], rank)) for one, y in found]


@pytest.mark.parametrize("strategy", ["fsdp", "megatron", "stages"])
def test_what_an_evaluation_gathers_is_whole_and_in_order(pool: WorkerPool, strategy: str) -> None:
    model = Predicts().eval()
    for batches in pool.run(f"{__name__}:evaluated", strategy, ranks=2):
        assert len(batches) == STEPS  # type: ignore[arg-type]
        for number, (found, y, losses, ranks) in enumerate(batches):  # type: ignore[arg-type, misc]
            x, target = DATA[number * BATCH : (number + 1) * BATCH]
            expected = model(x, target)
            torch.testing.assert_close(found, expected["found"].detach())
            assert torch.equal(y, target)
            torch.testing.assert_close(losses, expected["loss"].detach().expand(2))
            assert ranks.tolist() == [0, 1]


def gathered(strategy: str) -> list[torch.Tensor]:
    """Targets of which a rank has as many numbers as the batch has samples; as many that are whole; a result of other rows."""
    launched()
    accelerator = Accelerator(cpu=True)
    parallel = made(Flattens(), strategy)
    loader = DataLoader(DATA, batch_size=BATCH // parallel.data_world)
    parallel, loader = accelerator.prepare(parallel.eval(), loader)
    x, y = next(iter(loader))
    with torch.no_grad():
        found = parallel(x, y)["found"]
    whole = torch.arange(BATCH).masked_fill(torch.arange(BATCH) > 5, -1) / torch.tensor(0.0)  # with NaN and infinities
    return accelerator.gather_for_metrics((y[:, : parallel.data_world].flatten(), whole, found))


def test_what_is_gathered_is_told_by_more_than_its_length(pool: WorkerPool) -> None:
    for flat, whole, found in pool.run(f"{__name__}:gathered", "fsdp", ranks=2):  # type: ignore[misc]
        x, y = DATA[:BATCH]
        assert torch.equal(flat, y[:, :2].flatten())
        assert len(whole) == BATCH
        torch.testing.assert_close(found, Flattens()(x, y)["found"].detach())


def asked(turns: int) -> int:
    """How often a rank asks others which share of the samples they have, in so many gathers."""
    launched()
    parallel, accelerator = made(Net(), "fsdp"), Accelerator(cpu=True)
    parallel = accelerator.prepare(parallel)
    with patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as asking:
        for _ in range(turns):
            accelerator.gather(torch.full((BATCH // parallel.data_world,), parallel.data_rank))
    return asking.call_count


def test_ranks_tell_their_shares_once(pool: WorkerPool) -> None:
    assert pool.run(f"{__name__}:asked", 3, ranks=2) == [1, 1]


def rates(strategy: str | None) -> list[float]:
    """The learning rate after each batch, by a schedule over an epoch of the loader as it is before it is prepared."""
    launched()
    options = {"cpu": True, "gradient_accumulation_steps": 2}
    if strategy is None:
        accelerator, model, shares = accelerate.Accelerator(**options), Net(), 1
    else:
        model = autopar.parallelize(Net(), DATA[:BATCH], (2,), device="h100", strategy=strategy, inputs="sharded")
        accelerator, shares = Accelerator(**options), model.data_world
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(*DATA[:32]), batch_size=BATCH // shares)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=2 * len(loader) // 2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    found = []
    for _ in range(2):
        for own in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(*own))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found += schedule.get_last_lr()
    return found


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_a_schedule_over_a_loader_goes_as_on_one_process(pool: WorkerPool, strategy: str) -> None:
    (expected,) = pool.run(f"{__name__}:rates", None, ranks=1)
    for found in pool.run(f"{__name__}:rates", strategy, ranks=2):
        assert found == pytest.approx(expected)


def test_other_batches_and_autocast_are_refused() -> None:
    accelerator, parallel = Accelerator(cpu=True), autopar.parallelize(Net(), DATA[:BATCH], (1,))
    with pytest.raises(InputError, match=r"batches of 3, but the planned batch is 8, in 1 share\(s\)"):
        accelerator.prepare(parallel, DataLoader(DATA, batch_size=3))
    accelerator.native_amp = True
    with pytest.raises(InputError, match="a parallel module runs outside of autocast"):
        accelerator.prepare(autopar.parallelize(Net(), DATA[:BATCH], (1,)))
