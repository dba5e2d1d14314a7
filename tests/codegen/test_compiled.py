"""`torch.compile(parallel)` gives the losses and gradients of the eager module, from the first call on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import autopar
from autopar.errors import InputError
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from tests.support import models, table

Asked = tuple[str, Mapping[str, Any], str]  # a model, how it is planned ("seed" is a random plan), and a backend

RECOMPUTED = {"strategy": "ddp", "recompute": "blocks"}
GATHERED_ONCE = {"constraints": {"*.weight": "S(0)"}, "recompute": "blocks"}
# Plans with micro-batches, each with its number of graphs: that of calls, and in a step of the last micro-batch and the others.
PARTED: list[tuple[Asked, int]] = [
    (("blocks", RECOMPUTED | {"microbatches": 4}, "aot_eager"), 3),
]
PARTED_REST: list[tuple[Asked, int]] = [
    (("blocks", GATHERED_ONCE | {"microbatches": 2}, "aot_eager"), 2),
    (("blocks", {"strategy": "ddp", "budget": 370_000, "microbatches": 2}, "aot_eager"), 3),
    (("small", {"strategy": "ddp", "microbatches": 2}, "aot_eager"), 3),
    (("blocks", RECOMPUTED | {"strategy": "fsdp", "microbatches": 4}, "aot_eager"), 1),
    (("blocks", RECOMPUTED | {"microbatches": 2}, "inductor"), 3),
    (("gpt2", {"strategy": "ddp", "microbatches": 2}, "inductor"), 3),
]
SAMPLED: list[Asked] = [
    ("llama", {"strategy": "megatron", "recompute": "blocks"}, "aot_eager"),  # its attention could draw, and does not
    ("frozen", {"strategy": "fsdp"}, "aot_eager"),  # a bucket of whose weights none has a gradient
]
REST: list[Asked] = [
    *((name, {"strategy": how}, "aot_eager") for name in models.MODELS for how in ("ddp", "fsdp", "megatron", "auto")),
    *((name, {"strategy": "fsdp"}, "inductor") for name in models.MODELS),
    ("gpt2", {"strategy": "megatron"}, "inductor"),
    *(("gpt2", RECOMPUTED, backend) for backend in ("aot_eager", "inductor")),
]


class Small(nn.Module):
    """A block that every backend compiles in a few seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.25), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


class Blocks(nn.Module):
    """Blocks with dropout, which a plan can recompute."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Small().layers for _ in range(depth))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return {"loss": x.square().mean()}


class Frozen(Small):
    """A block of which the first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


def make(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    own = {"small": Small, "blocks": Blocks, "frozen": Frozen}
    if name not in own:
        return models.make(name)
    torch.manual_seed(0)
    return own[name]().double(), {"x": torch.randn(512, 16, dtype=torch.float64)}


def numbers(asked: Asked) -> int:
    """Compare two calls and two steps with eager ones; returns into how many graphs the calls were cut."""
    name, how, backend = asked
    model, sample = make(name)
    on = table.mesh((2,))
    plan = autopar.testing.random_plan(model, sample, on, **how) if "seed" in how else autopar.plan(model, sample, on, **how)
    torch._dynamo.reset()
    counters.clear()
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)  # of dropout
        parallel = autopar.parallelize(model, sample, on, plan=plan)
        call, step = parallel, parallel.step
        if compiled:
            call, step = (torch.compile(one, backend=backend, fullgraph=True) for one in (parallel, parallel.step))
        found.append(_run(parallel, call, step, sample))
    for key, value in found[1].items():
        exact = 1e-12 if value.dtype == torch.float64 else 1e-4
        torch.testing.assert_close(
            found[0][key], value, rtol=exact, atol=exact / 10, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert found[0].keys() == found[1].keys()
    return int(counters["stats"]["unique_graphs"])


def _run(
    parallel: nn.Module, call: Callable[..., Any], step: Callable[..., torch.Tensor], sample: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Losses and the sum of gradients."""
    found: dict[str, torch.Tensor] = {}
    for at in range(2):
        loss = call(**sample)["loss"]
        loss.backward()
        found[f"loss of call {at}"] = full_tensor(loss.detach())
    for at in range(2):
        found[f"loss of step {at}"] = step(**sample)
    return found | {n: full_tensor(p.grad) for n, p in parallel.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("asked", [*SAMPLED, *(pytest.param(one, marks=pytest.mark.thorough) for one in REST)], ids=str)
def test_a_compiled_module_is_one_graph_with_the_numbers_of_the_eager_one(pool: WorkerPool, asked: Asked) -> None:
    assert pool.run(f"{__name__}:numbers", asked, ranks=2, keep=True) == [1, 1]


@pytest.mark.parametrize(
    "asked, graphs", [*PARTED, *(pytest.param(*one, marks=pytest.mark.thorough) for one in PARTED_REST)], ids=str
)
def test_a_compiled_micro_batch_is_one_graph_with_the_numbers_of_the_eager_one(
    pool: WorkerPool, asked: Asked, graphs: int
) -> None:
    assert pool.run(f"{__name__}:numbers", asked, ranks=2, keep=True) == [graphs, graphs]


def test_inductor_has_the_numbers_of_the_eager_module(pool: WorkerPool) -> None:
    assert pool.run(f"{__name__}:in_place", {"strategy": "fsdp"}, ranks=2, keep=True) == [1, 1]


def in_place(how: Mapping[str, Any]) -> int:
    """`parallel.compile()` beside the eager module."""
    model, sample = make("small")
    plan = autopar.plan(model, sample, table.mesh((2,)), **how)
    torch._dynamo.reset()
    counters.clear()
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        parallel = autopar.parallelize(model, sample, plan.mesh, plan=plan)
        if compiled:
            parallel.compile(fullgraph=True)
        found.append(_run(parallel, parallel, parallel.step, sample))
    for key, value in found[1].items():
        torch.testing.assert_close(found[0][key], value)
    return int(counters["stats"]["unique_graphs"])


def saved(parallel: nn.Module, sample: Mapping[str, torch.Tensor]) -> int:
    """Bytes that a compiled forward keeps for its backward."""
    node = torch.compile(parallel, backend="aot_eager", fullgraph=True)(**sample)["loss"].grad_fn
    return sum(tensor.nbytes for tensor in node.saved_tensors)


def test_torchs_partitioner_recomputes_what_the_plan_recomputes() -> None:
    model, sample = Blocks(4), {"x": torch.randn(64, 16)}
    plans = {how: autopar.plan(model, sample, (1,), recompute=how) for how in ("none", "blocks")}
    kept = {how: saved(autopar.parallelize(model, sample, (1,), plan=plan), sample) for how, plan in plans.items()}
    assert kept["blocks"] < 0.6 * kept["none"]


def peaks(backend: str) -> dict[str, int]:
    """The most bytes that a compiled step of several micro-batches allocates, by what it recomputes."""
    model, sample = Blocks(4), {"x": torch.randn(1024, 16)}
    found = {}
    for how in ("none", "blocks"):
        torch._dynamo.reset()
        parallel = autopar.parallelize(model, sample, (1,), device="h100", microbatches=2, recompute=how)
        parallel.compile(backend=backend, fullgraph=True)
        parallel.step(**sample)
        found[how] = _allocated(lambda parallel=parallel: parallel.step(**sample))
    return found


def _allocated(run: Callable[[], object]) -> int:
    """By the records of torch's allocator for CPUs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as records:
        run()
    changes = [event for event in records.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))


UNDER_INDUCTOR = pytest.mark.xfail(
    reason="its CPU backend fuses what all blocks recompute, side by side: 533 kB, and 466 where nothing is recomputed"
)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.thorough, UNDER_INDUCTOR])])
def test_micro_batches_that_recompute_need_less_memory_when_they_are_compiled(backend: str) -> None:
    found = peaks(backend)
    assert found["blocks"] < 0.6 * found["none"]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_every_size_is_compiled_however_many_there_are(microbatches: int) -> None:
    """Dynamo compiles a code object eight times at most, unless told otherwise, and fails at the ninth with `fullgraph`."""
    model, sizes = Small(), range(2, 2 * torch._dynamo.config.recompile_limit + 8, 2)
    dynamic = {"rows": {"x": 1}}
    parallel = autopar.parallelize(model, torch.randn(4, 16, 16), (1,), dynamic=dynamic, microbatches=microbatches)
    parallel.compile(backend="eager", fullgraph=True)
    torch.compiler.reset()
    counters.clear()
    for size in sizes:
        parallel.step(torch.randn(4, size, 16))
    assert counters["stats"]["unique_graphs"] >= len(sizes)


def test_what_cannot_be_traced_runs_eagerly() -> None:
    model, sample = models.make("cnn")
    plan = autopar.testing.random_plan(model, sample, (1,), seed=0)
    losses = []
    for compiled in (True, False):
        torch.manual_seed(0)
        parallel = autopar.parallelize(model, sample, (1,), plan=plan)
        assert not parallel.autopar.traceable, "the plan offloads"
        call = torch.compile(parallel, backend="aot_eager") if compiled else parallel
        losses.append(call(**sample)["loss"])
        losses[-1].backward()
    assert torch.equal(*losses)


def test_inductor_has_the_options_by_name() -> None:
    """Fails where a release of torch renames them: `codegen/compiled.py` is the only place that names them."""
    found = autopar.inductor_options(async_tensor_parallel=True)
    assert "aten_distributed_optimizations.enable_overlap_scheduling" in found
    assert not autopar.inductor_options(overlap=False)


def test_an_option_that_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.list_options", list)
    with pytest.raises(InputError, match=r"has no option aten_distributed_optimizations.enable_overlap_scheduling"):
        autopar.inductor_options()
