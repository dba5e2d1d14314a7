"""fp16 with a loss scale: the numbers of torch's autocast, and steps that either all ranks skip or none."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.errors import ConstraintError
from autopar.runtime.storage import full_tensor, to_local
from autopar.runtime.workers import WorkerPool

STEPS, ROUNDING = 3, 2**-10  # of one float16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(x), x.sin())


def batches() -> torch.Tensor:
    return torch.randn(STEPS, 8, 8, generator=torch.Generator().manual_seed(0))


# The first gradient is whole on every rank, and no other is split as the next one.
LAYOUTS = {"body.0.weight": "I, I", "body.0.bias": "I, S(0)", "body.2.weight": "S(1), I", "body.2.bias": "I, I"}


def expected(model: nn.Module) -> list[float]:
    """Losses and norms of the sequential loop under torch's autocast, with its scaler."""
    seen = []
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu")
    for x in batches():
        with torch.autocast("cpu", torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen


def looped(parts: int) -> tuple[list[float], list[object]]:
    """Losses and norms of the parallel loop; and after one rank's part of a gradient was infinite: steps taken, and scales."""
    parallel = autopar.parallelize(
        Net(), batches()[0], (2, 2), device="h100", precision="fp16-mixed", constraints=LAYOUTS, microbatches=parts
    )
    optimizer, scaler = torch.optim.AdamW(parallel.parameters(), lr=0.05), autopar.GradScaler(parallel)
    seen = []
    for x in batches():
        if parts > 1:
            loss = parallel.step(x)
        else:
            loss = parallel(x)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen += [loss.item(), float(parallel.clip_grad_norm_(0.1))]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    before = {name: full_tensor(p.detach()).clone() for name, p in parallel.named_parameters()}
    scaler.scale(parallel(batches()[0])).backward()
    if torch.distributed.get_rank() == 3:
        to_local(parallel.get_parameter("body.2.weight").grad)[0, 0] = float("inf")
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(full_tensor(p.detach()), before[name]) for name, p in parallel.named_parameters())
    return seen, [same, scaler.get_scale() / scale]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_loop_in_fp16_has_the_losses_of_autocast_and_one_infinite_part_stops_every_rank(pool: WorkerPool, parts: int) -> None:
    for seen, skipped in pool.run(f"{__name__}:looped", parts, ranks=4, keep=True):  # type: ignore[misc]
        assert seen == pytest.approx(expected(Net()), rel=8 * ROUNDING)
        assert skipped == [True, 0.5]


class Deep(nn.Module):
    """Two blocks, of which each can be a stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for block in self.blocks:
            y = block(y)
        return functional.mse_loss(y, x.sin())


def staged(_: None) -> list[object]:
    """In a pipeline, of which rank 1 alone has an infinite gradient: steps taken, and scales."""
    options = {"pipeline": "pp", "stages": 2, "microbatches": 2, "precision": "fp16-mixed"}
    parallel = autopar.parallelize(Deep(), batches()[0], {"pp": 2}, device="h100", **options)
    optimizer, scaler = torch.optim.SGD(parallel.parameters(), lr=0.05), autopar.GradScaler(parallel)
    before = [p.detach().clone() for p in parallel.parameters()]
    found: list[object] = []
    for infinite in (True, False):
        parallel.step(batches()[0])
        if infinite and torch.distributed.get_rank() == 1:
            next(parallel.parameters()).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(any(not torch.equal(p, old) for p, old in zip(parallel.parameters(), before, strict=True)))
        found.append(scaler.get_scale())
    return found


def test_one_stage_with_infinite_gradients_stops_the_others(pool: WorkerPool) -> None:
    assert pool.run(f"{__name__}:staged", ranks=2, keep=True) == [[False, 2.0**15, True, 2.0**15]] * 2


def test_halves_are_planned_and_their_reduction_is_of_their_own_kind() -> None:
    made = {
        precision: autopar.plan(Net(), batches()[0], (2,), device="v100-32gb", strategy="fsdp", precision=precision)
        for precision in ("fp16", "fp16-mixed")
    }
    assert made["fp16"].options["precision"] == "fp16"
    assert "float16" in str(made["fp16-mixed"])
    with pytest.raises(ConstraintError, match=r"reduce='bf16' is no dtype of precision='fp16-mixed'"):
        autopar.plan(Net(), batches()[0], (2,), precision="fp16-mixed", reduce="bf16")
    assert "reduce" in autopar.plan(Net(), batches()[0], (2,), precision="fp16-mixed", reduce="fp16").options


def test_numbers_that_half_precision_cannot_hold_are_filled_in_float32() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).masked_fill(x > 0, -1e9).softmax(-1)

    model, x = Masked(), torch.randn(4, 4)
    parallel = autopar.parallelize(model, x, (1,), precision="fp16-mixed")
    torch.testing.assert_close(parallel(x), model(x), rtol=1e-2, atol=1e-3)
