"""The table of equal numbers: every model on every mesh, under every named strategy and under random plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

import autopar
from autopar.cost_models import catalog
from autopar.ir.device import Link
from autopar.ir.mesh import Mesh
from autopar.plan.options import Options
from autopar.runtime.workers import WorkerPool
from autopar.verify.report import Report
from autopar.verify.verification import verify
from tests.support.models import MODELS, make
from tests.support.threads import Threads

MESHES = ((4,), (8,), (2, 4), (2, 2, 2))
SMALL = ((4,), (2, 2))  # of the sample: a rank costs as much as the next
LARGE: dict[str, tuple[tuple[int, ...], ...]] = {"vit": ((2, 4),), "cnn": ((8,), (2, 2, 2))}
STRATEGIES = ("auto", "ddp", "fsdp", "megatron")
SEEDS = range(10)  # of the random plans
MADE_UP = "made up, so that small models are worth splitting"


@dataclass(frozen=True, slots=True)
class Case:
    """One plan to verify: `plan` is a strategy or the seed of a random plan."""

    model: str
    sizes: tuple[int, ...]
    plan: str | int

    def __str__(self) -> str:
        plan = f"random{self.plan}" if isinstance(self.plan, int) else self.plan
        return f"{self.model}-{'x'.join(map(str, self.sizes))}-{plan}"


def rows() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Models and meshes."""
    return ((model, sizes) for model in MODELS for sizes in MESHES)


def cases(model: str, sizes: tuple[int, ...]) -> Iterator[Case]:
    """The plans of a row."""
    return (Case(model, sizes, plan) for plan in (*STRATEGIES, *SEEDS))


def sample() -> Iterator[Case]:
    """Every model, by turns under a named strategy and a random plan, two on one axis and two on several."""
    rows = [(model, sizes) for at, model in enumerate(MODELS) for sizes in LARGE.get(model, (SMALL[at // 2 % 2],))]
    for at, (model, sizes) in enumerate(rows):
        yield Case(model, sizes, SEEDS[at] if at % 2 else STRATEGIES[at // 2])


def mesh(sizes: tuple[int, ...]) -> Mesh:
    """A mesh of slow devices and fast links, the fastest innermost, on which the best plan splits even these models."""
    h100 = catalog.device("h100", processes=1).at_peak()
    host = Link(name="host", latency=0.0, bandwidth=1e8, source=MADE_UP)
    flops = dict.fromkeys(h100.flops, 1e8)
    device = replace(h100, name="slow", flops=flops, bandwidth=1e9, launch=0.0, source=MADE_UP, host=host)
    links = [Link(name="fast", latency=1e-7, bandwidth=1e9 * 2**axis, source=MADE_UP) for axis in range(len(sizes))]
    return replace(Mesh.of(sizes), links=tuple(links), device=device)


def verified(case: Case, pool: WorkerPool | Threads) -> Report:
    """The report of a case."""
    return report(*make(case.model), mesh(case.sizes), case.plan, pool)


def report(model: nn.Module, batch: object, on: Mesh, plan: str | int, pool: WorkerPool | Threads) -> Report:
    """The report of a model under a strategy, or the random plan of a seed."""
    if isinstance(plan, int):
        return verify(model, batch, on, autopar.testing.random_plan(model, batch, on, seed=plan), Options(), pool)
    return verify(model, batch, on, None, Options(strategy=plan), pool)
