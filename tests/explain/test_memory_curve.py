"""Memory over the step: its purposes add up to the curve that plans are held to, at every moment."""

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
