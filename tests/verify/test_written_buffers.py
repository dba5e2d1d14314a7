"""Buffers that forward writes, in micro-batches and pipeline stages: a step writes them once, as the whole batch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import autopar
from autopar.errors import ConstraintError
from autopar.plan.options import Options
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from autopar.verify import verification
from tests.support.threads import Threads

STAGED = {"pipeline": "pp", "device": "h100"}
SECOND = ["layers.1.2"]  # a cut within a power iteration has no counterpart in eval
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Spectral(nn.Module):
    """Layers with a spectral norm, whose power iteration goes on in every call, and a count of calls."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(spectral_norm(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4))
        self.layers = nn.ModuleList(layers)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {"device": "h100", "strategy": "fsdp", "microbatches": 4}),
    ({"pp": 2, "dp": 2}, {"strategy": "fsdp", "microbatches": 4, "schedule": "1f1b"}),
    ({"pp": 2}, {"microbatches": 1}),
    ({"pp": 2, "tp": 2}, {"strategy": "megatron", "microbatches": 4, "schedule": "zb-h1"}),
    ({"pp": 2, "dp": 2}, {"strategy": "ddp", "microbatches": 2, "recompute": "blocks"}),
    ({"pp": 2}, {"stages": 4, "microbatches": 2}),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mesh, options", CASES)
def test_buffers_are_written_as_by_a_call_with_the_whole_batch(
    mesh: dict[str, int], options: dict[str, Any], threads: Threads
) -> None:
    """Before, they were refused in micro-batches, and in stages."""
    model = Spectral()
    plan = autopar.plan(model, X, mesh, **((STAGED if "pp" in mesh else {}) | options))
    report = verification.verify(model, X, mesh, plan, Options(), threads)
    assert report.ok, report
    written = {row.name for row in report.rows if row.what == "buffer"}
    assert written == dict(model.named_buffers()).keys()
    if plan.pipeline and options["microbatches"] > 1:
        held = [{name for name in written if name in stage.layouts} for stage in plan.stages]
        assert sum(map(len, held)) == len(written)  # one stage stores each


def stepped(microbatches: int) -> float:
    """The largest error of losses, gradients and buffers in steps, an evaluation and a step again, of two stages."""
    model, batches = Spectral().double(), torch.randn(4, 8, 16, dtype=torch.float64)
    parallel = autopar.parallelize(model, batches[0], {"pp": 2}, microbatches=microbatches, stages=SECOND, **STAGED)
    errors: list[torch.Tensor] = []
    for turn, batch in enumerate(batches):
        for module in (model, parallel):
            module.train(turn != 2)
        if turn == 2:
            with torch.no_grad():
                errors.append(parallel(batch) - model(batch))
            continue
        loss = model(batch)
        loss.backward()
        errors.append(parallel.step(batch) - loss.detach())
    known = dict(model.named_parameters()) | dict(model.named_buffers())
    errors += [full_tensor(own.grad) - known[name].grad for name, own in parallel.named_parameters()]  # type: ignore[arg-type, operator]
    errors += [own - known[name] for name, own in parallel.named_buffers()]
    return max(float(error.abs().max()) for error in errors)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_steps_and_evaluation_go_on_from_what_steps_wrote(microbatches: int, pool: WorkerPool) -> None:
    found: list[float] = pool.run(f"{__name__}:stepped", microbatches, ranks=2, keep=True)  # type: ignore[assignment]
    assert max(found) < 1e-12


class Remembering(nn.Module):
    """A layer, and a buffer that `kind` says how to write."""

    kept: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(16, 16)
        self.register_buffer("kept", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        with torch.no_grad():
            if self.kind == "mean":
                self.kept.mul_(0.9).add_(0.1 * y.mean(0))
            elif self.kind == "drawn":
                self.kept.copy_(torch.rand(16))
            elif self.kind == "inputs":
                self.kept.mul_(0.9).add_(0.1 * x.mean(0))
        return (y * self.kept).square().mean()


@pytest.mark.parametrize("kind", ["mean", "drawn"])
def test_what_differs_between_micro_batches_is_not_written(kind: str) -> None:
    with pytest.raises(ConstraintError, match="each of them would write kept") as refusal:
        autopar.plan(Remembering(kind), X, (2,), device="h100", microbatches=2)
    assert refusal.value.details["module"] == "the model itself"
    assert "microbatches=1" in refusal.value.details["fix"]


class Counting(nn.Module):
    """A layer, and a count of calls that forward returns as it is, or a view of it."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.calls += 1
        return self.layer(x).square().mean(), self.calls, self.calls[:2]


def test_a_written_buffer_that_is_returned_is_compared_as_it_was_returned(threads: Threads) -> None:
    model = Counting()
    report = verification.verify(model, X, (2,), None, Options(device="h100"), threads)
    assert report.ok, report
    assert not model.calls.any()


def test_what_depends_on_the_whole_batch_but_on_no_weights_is_written_once(threads: Threads) -> None:
    model = Remembering("inputs")
    plan = autopar.plan(model, X, (2,), device="h100", microbatches=2)
    report = verification.verify(model, X, (2,), plan, Options(), threads)
    assert report.ok, report
    assert "kept" in {row.name for row in report.rows if row.what == "buffer"}


class Tied(nn.Module):
    """One layer with a spectral norm, before and behind others."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = spectral_norm(nn.Linear(16, 16))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ends(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.ends(x).square().mean()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_no_stage_begins_between_what_reads_a_buffer_and_what_writes_it(microbatches: int) -> None:
    options = STAGED | {"microbatches": microbatches}
    plan = autopar.plan(Tied(), X, {"pp": 2}, **options)
    assert plan.pipeline is not None
    assert plan.pipeline.modules[1].startswith("ends")
    with pytest.raises(ConstraintError, match=r"no stage of the pipeline can begin at 'layers\.2'"):
        autopar.plan(Tied(), X, {"pp": 2}, stages=["layers.2"], **options)


class Counted(Tied):
    """The calls are counted in front, and read behind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean() * self.calls


def test_a_count_that_two_stages_need_is_refused() -> None:
    with pytest.raises(ConstraintError, match="calls is written by one stage of the pipeline and read by another") as refusal:
        autopar.plan(Counted(), X, {"pp": 2}, microbatches=2, **STAGED)
    assert refusal.value.details["stages"] == "0, 1"
    assert "a cut elsewhere" in refusal.value.details["fix"]
