"""Random plans of models in stages: each stage any plan that can run, sending in any layout and state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

from torch import nn

import autopar
from autopar.ir.layout import Layout
from autopar.plan.assignment_text import as_planned
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.stages import StageSteps, crossing_values
from autopar.planning.pipeline_stages import without_axis
from autopar.planning.planner import connected_mesh, read_program
from autopar.verify.testing import RandomPlans


def random_stages(model: nn.Module, sample: object, mesh: Mapping[str, int], axis: str, seed: int, **asked: object) -> Plan:
    """A plan as `autopar.plan` makes it by these options, but for what its stages choose: that is random.

    The model has no parameters that stages share, which must be stored alike.
    """
    made = autopar.plan(model, sample, dict(mesh), device="h100", pipeline=axis, **asked)  # type: ignore[arg-type]
    assert made.pipeline is not None
    assert not made.pipeline.tied
    whole = connected_mesh(dict(mesh), Options(device="h100"))
    step = as_planned(made, read_program(model, sample).program)
    steps, on = StageSteps(step, made.pipeline.starts), without_axis(whole, axis)
    found, layouts = [], dict[str, Layout]()
    for place in range(len(made.stages)):
        of_stage = steps.made(place, layouts, made.pipeline.in_flight(place))
        drawn = RandomPlans(of_stage, on, Options(device="h100", strategy="random", outputs="sharded")).draw(seed * 101 + place)
        layouts = dict(drawn.assignment.outputs)
        found.append(SimpleNamespace(step=of_stage, outputs=layouts, plan=drawn.plan))
    sent = [(one.step.program, one.outputs) for one in found]
    crossings = tuple(crossing_values(step.program, sent, on))
    return replace(made, pipeline=replace(made.pipeline, crossings=crossings), stages=tuple(one.plan for one in found))
