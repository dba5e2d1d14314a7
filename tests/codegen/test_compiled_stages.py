"""`parallel.compile()` of pipeline stages: the numbers of eager stages, and one graph for each stage's program."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import autopar
from autopar.errors import ConstraintError, InputError
from autopar.ir.mesh import Mesh
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from tests.support import models, pipelines

EXACT, SINGLE = 1e-12, 1e-6  # the library's loss is in float32, which Inductor fuses
further = functools.partial(pytest.param, marks=pytest.mark.thorough)
RECOMPUTED = {"recompute": "blocks", "microbatches": 4}
CASES = [
    {"model": "gpt2", "mesh": {"pp": 2}, **RECOMPUTED},
    further({"model": "gpt2", "mesh": {"pp": 2}, "microbatches": 2}),
    further({"model": "gpt2", "mesh": {"pp": 2, "tp": 2}, "strategy": "megatron", "schedule": "gpipe", **RECOMPUTED}),
    further({"model": "gpt2", "mesh": {"pp": 2, "dp": 2}, "strategy": "ddp", "schedule": "1f1b+1", **RECOMPUTED}),
    further({"model": "llama", "mesh": {"pp": 2, "dp": 2}, "strategy": "fsdp", "microbatches": 2}),
    further({"model": "t5", "mesh": {"pp": 2}, "stages": 4, "microbatches": 2}),
    further({"model": "gpt2", "mesh": {"pp": 2}, "microbatches": 2, "backend": "inductor"}),
]
Run = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


def numbers(case: Mapping[str, Any]) -> tuple[list[float], int, int]:
    """Steps with dropout and evaluations of two sizes, compiled, beside eager ones; graphs, and stages of this rank.

    The first are the largest differences of losses and gradients, relative to the largest entry.
    """
    case = {"device": "h100", "pipeline": "pp", "compiled": True, "dynamic": {"batch": 0}} | dict(case)
    model, sample = models.make(case.pop("model"))
    model.double()
    mesh, backend = case.pop("mesh"), case.pop("backend", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    found: list[Run] = []
    for compiled in (True, False):
        torch.manual_seed(0)  # of dropout
        parallel = autopar.parallelize(model, sample, mesh, **case)
        if compiled:
            parallel.compile(backend=backend, fullgraph=True)
        found.append(_run(parallel, sample))
    assert found[0][1].keys() == found[1][1].keys()
    pairs = [*zip(found[0][0], found[1][0], strict=True), *((found[0][1][name], one) for name, one in found[1][1].items())]
    differences = [pipelines.largest(one, eager) for one, eager in pairs]
    return differences, int(counters["stats"]["unique_graphs"]), len(parallel.autopar.stages.stages)


def _run(parallel: torch.nn.Module, sample: Mapping[str, torch.Tensor]) -> Run:
    """Losses and the sum of gradients."""
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in sample.items()}
    losses = [parallel.step(**sample), parallel.step(**twice)]
    parallel.eval()
    with torch.no_grad():
        losses += [parallel(**sample)["loss"], parallel(**twice)["loss"]]
    parallel.train()
    losses.append(parallel.step(**sample))
    return losses, {n: full_tensor(p.grad) for n, p in parallel.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_stages_are_a_graph_each_with_the_numbers_of_eager_ones(case: dict[str, Any], pool: WorkerPool) -> None:
    """For each of training and evaluation and of two sizes."""
    ranks = Mesh.of(case["mesh"]).size
    for differences, graphs, stages in pool.run(f"{__name__}:numbers", case, ranks=ranks, timeout=900.0, keep=True):  # type: ignore[misc]
        assert max(differences) <= (SINGLE if "backend" in case else EXACT)
        assert graphs == 4 * stages


def test_a_plan_to_be_compiled_defers_no_gradients() -> None:
    model, sample = models.make("gpt2")
    options = {"mesh": {"pp": 2, "dp": 2}, "device": "h100", "pipeline": "pp", "strategy": "ddp", "microbatches": 4}
    plans = [autopar.plan(model, sample, compiled=one, **options) for one in (False, True)]
    assert [plan.pipeline.order.deferred for plan in plans if plan.pipeline] == [True, False]
    with pytest.raises(ConstraintError, match="zb-h1 defers gradients of weights, which a compiled backward makes at once"):
        autopar.plan(model, sample, compiled=True, schedule="zb-h1", **options)


def test_stages_that_defer_gradients_are_not_compiled() -> None:
    model, sample = models.make("gpt2")
    parallel = autopar.parallelize(model, sample, {"pp": 1}, device="h100", pipeline="pp", schedule="zb-h1", microbatches=2)
    with pytest.raises(InputError, match="zb-h1 defers gradients of weights"):
        parallel.compile(backend="aot_eager")


def test_torch_compile_of_a_step_in_stages_runs_it_eagerly() -> None:
    model, sample = pipelines.made("gpt2")
    parallel = autopar.parallelize(model, sample, {"pp": 1}, device="h100", pipeline="pp", schedule="1f1b", microbatches=2)
    torch._dynamo.reset()
    counters.clear()
    loss = torch.compile(parallel.step, backend="aot_eager")(**sample)
    assert not counters["stats"]["unique_graphs"]
    torch.testing.assert_close(loss, model(**sample)["loss"].detach())
