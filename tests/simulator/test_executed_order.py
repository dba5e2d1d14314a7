"""The simulator issues and awaits messages in the order of gloo processes in a real step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

import autopar
from autopar.cost_models import catalog
from autopar.cost_models.optimizers import OPTIMIZERS
from autopar.formulation.prices import Prices
from autopar.formulation.step_time import StepPrices
from autopar.ir.device import Link
from autopar.memory.liveness import Liveness
from autopar.parallelize import assemble, tensors_of
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.resolved import read_plan
from autopar.planning.planner import connected_mesh
from autopar.runtime.recorder import timed
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import connect
from autopar.simulator.instructions import HOST, instructions
from autopar.simulator.timeline import Await, Issue
from autopar.verify.testing import random_plan
from tests.support import models
from tests.support.planning import Run

HOST_LINK = Link(name="host", latency=0.0, bandwidth=1e12, source="made up, so that what memory lacks goes there")
Seen = tuple[object, ...]  # ("issue", number, kind, axis, bytes, pass) or ("wait", number)


@dataclass(frozen=True)
class Case:
    """A model, a mesh, how it is planned (a seed: at random), and the number of micro-batches."""

    model: str
    sizes: tuple[int, ...]
    plan: str | int
    microbatches: int = 1

    def __str__(self) -> str:
        return f"{self.model}-{'x'.join(map(str, self.sizes))}-{self.plan}-{self.microbatches}"

    def planned(self) -> Plan:
        model, sample = models.make(self.model)
        device = replace(catalog.device("cpu", processes=4), host=HOST_LINK)
        mesh = autopar.Mesh.of(self.sizes)
        if isinstance(self.plan, int):
            return random_plan(model, sample, connected_mesh(mesh, Options(device=device)), seed=self.plan)
        return autopar.plan(model, sample, mesh, strategy=self.plan, device=device, microbatches=self.microbatches)


CASES = [
    Case("gpt2", (2, 2), "fsdp"),
    Case("llama", (2, 2), "zero2"),
    Case("gpt2", (4,), "ddp"),
    Case("llama", (2, 2), "megatron"),
    Case("gpt2", (2,), "fsdp", 2),
    Case("gpt2", (2,), "zero1", 2),
    Case("llama", (2, 2), 3),
]
RANDOM = [Case("gpt2", (2, 2), 0), Case("vit", (2, 2), 1)]


def executed(run: Run) -> list[Seen]:
    """What a rank issues and awaits in its second step: in the first, ranks check that they agree."""
    context = connect(run.plan.mesh, device="cpu")
    parallel = assemble(run.captured, run.tensors, run.plan, context)
    for _ in range(2):
        with timed(context.known_axes) as (log, times):
            parallel.accumulate(run.batches[0], lambda outputs: outputs[0])
        parallel.zero_grad()
    seen: list[Seen] = []
    for one in times:
        if one.what == "issue":
            sent = log[one.number]
            seen.append(("issue", one.number, sent.kind, sent.axis, sent.bytes, sent.where))
        elif one.what == "wait":
            seen.append(("wait", one.number))
    return seen


def simulated(plan: Plan, run: Run) -> Iterator[Seen]:
    """What the simulator says of the same plan."""
    mesh = connected_mesh(plan.mesh, Options(device=replace(catalog.device("cpu", processes=4), host=HOST_LINK)))
    resolved = read_plan(plan, run.captured.program, mesh)
    liveness = Liveness(resolved.analysis, OPTIMIZERS["adamw"])
    prices = StepPrices(resolved.analysis, Prices(mesh=mesh))
    numbers: dict[Issue, int] = {}
    for one in instructions(liveness, prices, resolved.assignment):
        if isinstance(one, Issue) and one.transfer.channel != HOST:
            numbers[one] = len(numbers)
            sent = one.transfer
            assert sent.message is not None
            yield "issue", numbers[one], sent.kind, sent.channel, sent.bytes, sent.message.where
        elif isinstance(one, Await) and one.issue in numbers:
            yield "wait", numbers[one.issue]


def both(pool: WorkerPool, case: Case) -> tuple[list[Seen], list[Seen]]:
    """What all ranks did, and what was simulated."""
    plan = case.planned()
    model, sample = models.make(case.model)
    captured = models.captured(case.model)
    run = Run(captured, plan, dict(tensors_of(model)), [captured.signature.bind((), sample)])
    found = pool.run(f"{__name__}:executed", run, ranks=plan.mesh.size, keep=True)
    assert all(result == found[0] for result in found)
    return found[0], list(simulated(plan, run))  # type: ignore[return-value]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_messages_are_issued_and_awaited_as_simulated(pool: WorkerPool, case: Case) -> None:
    found, expected = both(pool, case)
    assert found == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", RANDOM, ids=str)
def test_where_anything_is_recomputed_the_forward_is_as_simulated_and_the_backward_sends_the_same(
    pool: WorkerPool, case: Case
) -> None:
    """Random recomputations of views of recomputed views: the simulated backward asks for some of them in another order."""
    found, expected = both(pool, case)
    first = next(place for place, one in enumerate(found) if one[-1] == "backward")
    assert found[:first] == expected[:first]
    sent = [Counter(one[2:] for one in seen if one[0] == "issue") for seen in (found, expected)]
    assert sent[0] == sent[1]
