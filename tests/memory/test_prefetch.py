"""Gathers of weights are issued a block ahead, over whatever axes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autopar.formulation.read_solution import assignment
from autopar.ir.conversion import Conversion
from autopar.ir.layout import R, split
from autopar.ir.program import Op
from autopar.memory.schedule import ConversionEvent, Schedule
from autopar.passes.microbatches import microbatches
from autopar.plan.options import Options
from autopar.planning.optimize import analysed, solved
from autopar.planning.planner import connected_mesh
from tests.support.planning import llama

AXES = [(0,), (0, 1), (0, 1, 1)]  # of the linear layers of a block, in turn


def scheduled(axes: tuple[int, ...]) -> Schedule:
    """The step of a model whose blocks gather their weights over these axes, one after the other."""
    options = Options(device="h100", strategy="fsdp")
    mesh = connected_mesh((2, 2), options)
    found = solved(analysed(microbatches(llama(8, 32, 64, depth=5).program, 1), mesh, options), mesh, options)
    program, chosen = found.formulated.analysis.program, assignment(found.formulated, found.solution)
    weights = [name for name in chosen.routes if ".layers." in name and name.endswith("proj.weight")]
    conversions: dict[str, Conversion] = {}
    layers = list(dict.fromkeys(name.split(".")[-2] for name in weights))
    for name in weights:
        axis = axes[layers.index(name.split(".")[-2]) % len(axes)]
        part = split(0, program.values[name].shape[0] // 2)
        conversions[name] = Conversion(axis=axis, source=(part, R) if axis == 0 else (R, part), target=(R, R))
    given = {**chosen.given, **{name: one.source for name, one in conversions.items()}}
    routes = {**chosen.routes, **{name: (one,) for name, one in conversions.items()}}
    return Schedule(program, replace(chosen, given=given, routes=routes))


@pytest.mark.parametrize("axes", AXES)
def test_a_bucket_is_gathered_while_the_block_before_computes(axes: tuple[int, ...]) -> None:
    schedule = scheduled(axes)
    runs = [time for time, event in schedule.events if isinstance(event, Op)]
    gathers = [event for _, event in schedule.events if isinstance(event, ConversionEvent) and event.gathers]
    for axis in set(axes):
        alike = [one for one in gathers if one.steps[0][1].axis == axis and ".layers." in one.steps[0][0]]
        assert len(alike) > 2
        for before, one in itertools.pairwise(alike):
            assert not [time for time in runs if before.time < time < one.begun], "issued as the one before it arrives"
