"""A plan's peak memory is what its ranks have at most in a real step: counted on gloo processes, in float32, with dropout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

import autopar
from autopar.plan import Plan
from autopar.planner import Options, located
from autopar.runtime.workers import WorkerPool
from autopar.testing import peak, random_plan
from tests import models

TIGHT = 0.85  # of the memory that the best plan takes
# Strategies, the best plan in less memory, which makes things again, and seeds of random plans with random treatments.
PLANS: dict[str, tuple[str | int, ...]] = {
    "gpt2": ("ddp", "fsdp", "tight", "zero1", 0),
    "llama": ("zero2", "megatron", "tight", 1),
    "vit": ("ddp", "fsdp", "zero2", 0),
    "bert": ("auto", "zero1", "fsdp", "tight", 1),
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
        if isinstance(self.plan, int):
            return random_plan(model, sample, located(mesh, Options(device="cpu")), seed=self.plan)
        if self.plan != "tight":
            return autopar.plan(model, sample, mesh, strategy=self.plan, device="cpu")
        best = autopar.plan(model, sample, mesh, device="cpu")
        return autopar.plan(model, sample, mesh, device="cpu", budget=int(TIGHT * best.peak_memory))


def cases() -> Iterator[Case]:
    for number, (model, plans) in enumerate(PLANS.items()):
        for place, plan in enumerate(plans):
            yield Case(model, ((2,), (2, 2))[(number + place) % 2], plan)


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


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_peak_is_what_the_plan_says(pool: WorkerPool, case: Case) -> None:
    plan = case.planned()
    found = pool.run(f"{__name__}:measured", Run(case.model, plan), ranks=plan.mesh.size)
    assert plan.peak_memory == pytest.approx(max(found), rel=0.05)  # type: ignore[type-var]
