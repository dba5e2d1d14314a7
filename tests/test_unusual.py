"""Models that are written in unusual ways have equal numbers on a mesh, and send what their plans list."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from autopar.planner import Options, read_program
from autopar.runtime.workers import WorkerPool
from autopar.verification import Report, verify
from tests import planning, table

Made = tuple[nn.Module, object]
PLANS = ("auto", "fsdp", "megatron", 0, 1, 2)


def verified(made: Made, plan: str | int, pool: WorkerPool, sizes: tuple[int, ...] = (4,)) -> Report:
    """The report of a model under a strategy, or under the random plan of a seed."""
    (model, batch), on = made, table.mesh(sizes)
    if isinstance(plan, int):
        chosen = autopar.testing.random_plan(model, batch, on, seed=plan)
    else:
        chosen = autopar.plan(model, batch, on, strategy=plan)
    return verify(model, batch, on, chosen, Options(), pool)


# --- weights that are used through views ----------------------------------------------------------------------------------

USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {  # products of (16, 8) and (8, 16)
    "transposed twice": lambda x, w: x @ w.t().t(),
    "reshaped": lambda x, w: x @ w.view(2, 4, 16).reshape(8, 16),
    "with a dim more": lambda x, w: (x.unsqueeze(0) @ w.unsqueeze(0)).squeeze(0),
    "in slices": lambda x, w: torch.cat([x @ w[:, :8], x @ w[:, 8:]], 1),
    "in chunks": lambda x, w: torch.cat([x @ part for part in w.chunk(2, 1)], 1),
    "itself and as a view": lambda x, w: x @ w + x.relu() @ w.t().t(),
    "one view twice": lambda x, w: x @ (v := w.t()).t() + (2 * x) @ v.t(),
}
COPIED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "copied by a reshape": lambda x, w: x @ w.t().reshape(8, 16),
}


class Through(nn.Module):
    """A weight between two layers, used in one of the ways."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.first, self.last = nn.Linear(8, 8), nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((USES | COPIED)[self.use](self.first(x).relu(), self.weight)).square().sum()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("use", USES)
def test_a_weight_is_gathered_again_if_the_backward_needs_a_view_of_it(pool: WorkerPool, use: str, plan: str | int) -> None:
    report = verified((Through(use), torch.randn(16, 8)), plan, pool)
    assert report.ok, str(report)


@pytest.mark.parametrize("plan", ["auto", "fsdp", "megatron"])
@pytest.mark.parametrize("use", COPIED)
def test_a_copy_of_a_weight_is_kept(pool: WorkerPool, use: str, plan: str) -> None:
    report = verified((Through(use), torch.randn(16, 8)), plan, pool)
    assert report.ok, str(report)


class Stack(nn.Module):
    """Square layers whose weights stand transposed, or not."""

    def __init__(self, depth: int, width: int, *, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(width, width)) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = (x @ weight.t() if self.transposed else x @ weight).relu()
        return x.sum()


def test_a_weight_takes_time_and_memory_once_whether_it_is_used_itself_or_as_a_view() -> None:
    on = planning.mesh((8,), planning.link(100))
    plans = []
    for transposed in (True, False):
        with torch.device("meta"):
            made = read_program(Stack(6, 1024, transposed=transposed), torch.empty(64, 1024))
        plans.append(planning.plan(made, on, strategy="fsdp"))
    (first, second) = ((plan.step_time, plan.peak_memory, len(plan.collectives)) for plan in plans)
    assert first == pytest.approx(second)
