"""Fixed charges: a message that weights share is paid once, others once per weight."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from autopar.formulation.read_solution import assignment
from autopar.formulation.step_time import step_time
from autopar.ir.layout import I, Layout, R, State
from autopar.ir.training_step import TrainingStep
from autopar.memory.schedule import Schedule
from autopar.plan.options import Options
from autopar.planning.optimize import analysed, solved
from autopar.planning.planner import connected_mesh, read_program
from autopar.solver.problem import Solution, price


def test_a_gradient_that_is_reduced_after_it_has_moved_shares_no_message() -> None:
    """Hybrid FSDP, but that one weight is gathered over the last axis before it is shared over the first: then its gradient is
    reduced whole, and alone."""
    options = Options(device="h100", outputs="sharded", constraints={"[01].*": "I, S(0)", "input": "S(0), S(0)"})
    mesh = connected_mesh((2, 4), options)
    step = TrainingStep(
        program=read_program(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(2**16, 64)).program
    )
    found = solved(analysed(step, mesh, options), mesh, options)
    formulated, solution = found.formulated, found.solution

    def seconds(one: Solution) -> tuple[float, float]:
        schedule = Schedule(formulated.program, assignment(formulated, one))
        return price(formulated.problem, one.picks, one.arcs), step_time(schedule, formulated.step_prices)

    w = next(w for w, values in enumerate(formulated.edges) if values.example == "0.weight")
    space, split = formulated.spaces[w], State("S", 0, 16)
    reduced_first, gathered_first = ([(I, split), middle, (R, R)] for middle in ((R, split), (I, R)))

    def by(route: list[Layout]) -> Solution:
        ends = [(space.index[source], space.index[target]) for source, target in pairwise(route)]
        taken = [int(np.flatnonzero((space.source == a) & (space.target == b))[0]) for a, b in ends]
        return replace(solution, arcs=(*solution.arcs[:w], tuple(taken), *solution.arcs[w + 1 :]))

    (less, shared), (more, alone) = (seconds(by(route)) for route in (reduced_first, gathered_first))
    assert (less, more) == (pytest.approx(shared), pytest.approx(alone))
    assert more > less
