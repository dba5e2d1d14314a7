"""A plan's peak memory equals the peak of its ranks in a real step: counted on gloo processes, in float32, with dropout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

import autopar
from autopar.cost_models import catalog
from autopar.explain.report import memory
from autopar.ir.device import Link
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.text import plain
from autopar.planning.planner import connected_mesh
from autopar.runtime.workers import WorkerPool
from autopar.verify.testing import peak, random_plan
from tests.support import models

TIGHT = 0.85  # of the memory that the best plan takes
HOST = Link(name="host", latency=0.0, bandwidth=1e12, source="made up, so that what memory lacks goes there")
# Strategies, the best plan in less memory, which makes things again or has the host hold them, seeds of random plans with
# random treatments, and fsdp with recomputation by name.
PLANS: dict[str, tuple[str | int, ...]] = {
    "gpt2": ("ddp", "fsdp", "tight", 1),
    "llama": ("zero2", "megatron", "selective"),
    "vit": ("fsdp", "host"),
    "bert": ("auto", "zero1", "tight", 2, "blocks"),
}


@dataclass(frozen=True)
class Case:
    """A model, a mesh and how it is planned."""

    model: str
    sizes: tuple[int, ...]
    plan: str | int

    def __str__(self) -> str:
        return f"{self.model}-{'x'.join(map(str, self.sizes))}-{self.plan}"

    def planned(self) -> Plan:
        model, sample = models.make(self.model)
        mesh = autopar.Mesh.of(self.sizes)
        device = catalog.device("cpu", processes=mesh.size)
        if isinstance(self.plan, int) or self.plan == "host":
            device = replace(device, host=HOST)
        if isinstance(self.plan, int):
            return random_plan(model, sample, connected_mesh(mesh, Options(device=device)), seed=self.plan)
        if self.plan in ("blocks", "selective"):
            return autopar.plan(model, sample, mesh, strategy="fsdp", recompute=self.plan, device=device)
        if self.plan not in ("tight", "host"):
            return autopar.plan(model, sample, mesh, strategy=self.plan, device=device)
        best = autopar.plan(model, sample, mesh, device=device)
        return autopar.plan(model, sample, mesh, device=device, budget=int(TIGHT * best.peak_memory))


def test_the_host_holds_nothing_where_that_is_not_wanted() -> None:
    model, sample = models.make("gpt2")
    device = replace(catalog.device("cpu", processes=2), host=HOST)
    budget = int(TIGHT * autopar.plan(model, sample, (2,), device=device).peak_memory)
    free, bound = (autopar.plan(model, sample, (2,), device=device, budget=budget, offload=may) for may in (True, False))
    assert free.breakdown.offload
    assert not bound.breakdown.offload
    assert free.step_time < bound.step_time
    assert "offloaded to the host" in plain(memory(free))
    assert "offloaded to the host" not in plain(memory(bound))


def cases() -> Iterator[Case]:
    for model, plans in PLANS.items():
        for place, plan in enumerate(plans):
            yield Case(model, (2, 2) if place == 1 else (2,), plan)


@dataclass(frozen=True)
class Run:
    model: str
    plan: Plan


def measured(run: Run) -> int:
    """The peak of this rank."""
    model, sample = models.make(run.model)
    parallel = autopar.parallelize(model, sample, run.plan.mesh, plan=run.plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)

    def step() -> None:
        parallel(**sample).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return peak(parallel, optimizer, sample.values(), step).bytes


@pytest.mark.one_in(12)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_peak_is_what_the_plan_says(pool: WorkerPool, case: Case) -> None:
    plan = case.planned()
    assert bool(plan.breakdown.offload) == (case.plan == "host" or isinstance(case.plan, int))
    found = pool.run(f"{__name__}:measured", Run(case.model, plan), ranks=plan.mesh.size, keep=True)
    assert plan.peak_memory == pytest.approx(max(found), rel=0.05)  # type: ignore[type-var]
