"""Memory over the step: at every moment the purposes add up to the curve that is checked against the budget."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import autopar
from autopar.explain.explanation import Explanation
from autopar.explain.memory_curve import memory_curve


def test_the_purposes_add_up_to_the_memory_of_the_plan() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 64))
    found = autopar.explain.explain(model, torch.empty(32, 64), (2, 2), device="h100")
    assert isinstance(found, Explanation)
    of, chosen, plan = found.planned.solved.memory_model, found.planned.resolved.assignment, found.plan
    whole = of.liveness.walk(chosen)
    curve = memory_curve(of, chosen)
    assert curve.count == len(whole) == len(curve.moments)
    np.testing.assert_allclose(curve.total, whole)
    assert curve.total.max() == plan.peak_memory
    place = int(curve.total.argmax())
    assert curve.said[place] == plan.breakdown.moment
    assert {name: held[place] for name, held in curve.purposes.items() if held[place]} == plan.breakdown.memory
    few = memory_curve(of, chosen, points=4)
    assert len(few.moments) == 4
    assert few.total.max() == plan.peak_memory


class Recurrent(nn.Module):
    """Two layers, whose backward never holds all gradients of weights at once: its workspace beside them is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(6, 10, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]  # type: ignore[no-any-return]


def test_no_purpose_takes_less_than_nothing_where_gradients_never_exist_all_at_once() -> None:
    found = autopar.explain.explain(Recurrent(), torch.empty(4, 5, 6), (1,), device="cpu")
    assert isinstance(found, Explanation)
    of, chosen, plan = found.planned.solved.memory_model, found.planned.resolved.assignment, found.plan
    moment = int(of.liveness.walk(chosen).argmax())
    assert min(held.bytes for held in of.held(chosen, moment)) < 0
    curve = memory_curve(of, chosen)
    np.testing.assert_allclose(curve.total, of.liveness.walk(chosen))
    assert min(held.min() for held in curve.purposes.values()) >= 0
    assert min(plan.breakdown.memory.values()) > 0
    assert sum(plan.breakdown.memory.values()) == plan.peak_memory
    assert autopar.Plan.from_json(plan.to_json()) == plan
