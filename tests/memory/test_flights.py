"""The memory of a pipeline stage with several micro-batches in flight: of all that each holds of its own."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest

from autopar.analysis.analysis import analyse
from autopar.cost_models import optimizers
from autopar.formulation.budget_loop import within
from autopar.formulation.formulate import formulate
from autopar.formulation.memory_model import MemoryModel
from autopar.formulation.read_solution import assignment
from autopar.ir.layout import I
from autopar.passes.microbatches import microbatches
from autopar.plan.stages import StageSteps
from autopar.solver.problem import row_bytes
from autopar.verify.testing import random_solution
from tests.support import planning
from tests.support.planning import NVLINK, mesh

ADAMW = optimizers.optimizer("adamw")
PAIR = mesh((2,), NVLINK)


@functools.cache
def memory(place: int, flights: int) -> MemoryModel:
    """The memory of the first or second stage of a GPT-2."""
    steps = StageSteps(microbatches(planning.gpt2(16, 128, 256).program, 2), (0, 1))
    layouts = dict.fromkeys(steps.stages[1].received, (I,))
    analysis = analyse(steps.made(place, layouts if place else {}, flights), PAIR)
    return MemoryModel(formulate(analysis, PAIR, ADAMW), ADAMW)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_every_other_micro_batch_in_flight_adds_what_one_holds_at_the_turn(place: int, seed: int) -> None:
    alone, three = memory(place, 1), memory(place, 3)
    solution = random_solution(alone.formulated.problem, random.Random(seed))
    chosen = assignment(alone.formulated, solution)
    more = three.walk(solution) - alone.walk(solution)
    assert set(more[:-1].tolist()) == {2.0 * alone.liveness.waiting(chosen)}
    assert more[-1] == 0
    assert alone.liveness.waiting(chosen) > 0


@pytest.mark.parametrize("place", [0, 1])
def test_a_row_of_several_in_flight_is_nearly_the_walk_and_never_more(place: int) -> None:
    model = memory(place, 4)
    best = within(model.formulated, model, 1 << 50)
    assert best is not None
    walk, problem = model.walk(best), model.formulated.problem
    rows = np.array([row_bytes(problem, model.row(m, 0), best.picks, best.arcs, best.recompute) for m in range(len(walk))])
    assert (rows <= walk * (1 + 1e-9)).all()
    assert rows[walk.argmax()] >= 0.97 * walk.max()


def test_a_budget_that_only_recomputation_meets_is_met() -> None:
    model = memory(1, 8)
    best = within(model.formulated, model, 1 << 50)
    assert best is not None
    limit = round(0.7 * model.walk(best).max())
    less = within(model.formulated, model, limit)
    assert less is not None
    assert model.walk(less).max() <= limit
    assert less.seconds > best.seconds
