"""Pages that the tests of the report look at: one of a model whose names are HTML, with all that can be asked of it."""

from __future__ import annotations

import functools

import torch
from torch import nn

import autopar
from autopar.explain.budget_sweep import SweepStep
from autopar.explain.comparison import Compared
from autopar.explain.explanation import Explanation
from autopar.explain.html_report import html_report
from autopar.explain.scaling import scaling
from autopar.explain.staged import StagedExplanation
from autopar.plan.options import Options

HOSTILE = "</script><img src=x onerror=alert(1)>&'\"{{1}}"
AXIS = "<i>dp"
LAYERS = 96


class Residual(nn.Module):
    """A layer whose module has a name that a page must escape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({HOSTILE: nn.Linear(width, width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside[HOSTILE](x).relu()


class Loss(nn.Module):
    """A mean, for pipeline stages to differentiate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def explained(layers: int, strategy: str = "auto") -> Explanation:
    """A plan of so many layers on H100s."""
    with torch.device("meta"):
        model, sample = nn.Sequential(*(Residual(2048) for _ in range(layers))), torch.empty(4096, 2048)
    found = autopar.explain.explain(model, sample, {AXIS: 2, "tp": 2}, device="h100", strategy=strategy)
    assert isinstance(found, Explanation)
    return found


@functools.cache
def asked() -> tuple[Explanation, str]:
    """A small model with its page, on which everything is answered."""
    found = explained(2)
    steps = [
        SweepStep(budget=plan.peak_memory, step_time=plan.step_time, recomputed=0.0, peak_memory=plan.peak_memory, gap=0.0)
        for plan in (entry.plan for entry in found.compared)
        if plan
    ]
    more = [*scaling(found.planned.captured.program, (2, 4), Options(device="h100"))]
    name = f"1.inside.{HOSTILE}.weight"
    other = found.why_not({name: "S(0), S(0)"})
    return found, html_report(found, sweep=steps, scaling=more, price=2.5, why_not=other)


@functools.cache
def staged() -> StagedExplanation:
    """Two layers and a loss in two pipeline stages."""
    with torch.device("meta"):
        model, sample = nn.Sequential(Residual(2048), Residual(2048), Loss()), torch.empty(4096, 2048)
    options = {"device": "h100", "pipeline": "pp", "strategy": "fsdp", "microbatches": 4}
    found = autopar.explain.explain(model, sample, {"pp": 2, AXIS: 2}, **options)
    assert isinstance(found, StagedExplanation)
    return found


@functools.cache
def deep() -> str:
    """The page of a model of many layers, without other strategies: to plan all of them would take minutes."""
    found = explained(LAYERS, "fsdp")
    vars(found)["compared"] = [Compared(strategy="fsdp", plan=found.plan)]
    return html_report(found)
