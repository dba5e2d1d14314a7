"""The memory of a pipeline stage with several micro-batches in flight, each with tensors of its own."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.analysis.analysis import analyse
from autopar.analysis.deferrable import deferrable
from autopar.cost_models import optimizers
from autopar.formulation.budget_loop import within
from autopar.formulation.formulate import formulate
from autopar.formulation.memory_model import MemoryModel
from autopar.formulation.read_solution import assignment
from autopar.ir.layout import I
from autopar.ir.training_step import StageMoment
from autopar.passes.microbatches import microbatches
from autopar.passes.stage_regions import stage_starts
from autopar.plan.stages import StageSteps
from autopar.solver.problem import row_bytes
from autopar.verify.testing import random_solution
from tests.support import planning
from tests.support.planning import NVLINK, mesh

ADAMW = optimizers.optimizer("adamw")
PAIR = mesh((2,), NVLINK)
COUNTS = ((4, 0), (2, 1), (1, 3))
HALVED = tuple(StageMoment(flights=f, waiting=w, halves=halves) for f, w in COUNTS for halves in (False, True))


@functools.cache
def memory(place: int, flights: int, moments: tuple[StageMoment, ...] = ()) -> MemoryModel:
    """The memory of the first or second stage of a GPT-2."""
    step = microbatches(planning.gpt2(16, 128, 256).program, 2)
    steps = StageSteps(step, (0, stage_starts(step.program)[2]))
    layouts = dict.fromkeys(steps.stages[1].received, (I,))
    step = steps.made(place, layouts if place else {}, flights)
    assert step.stage is not None
    analysis = analyse(replace(step, stage=replace(step.stage, moments=moments)), PAIR)
    return MemoryModel(formulate(analysis, PAIR, ADAMW), ADAMW)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_every_other_micro_batch_in_flight_adds_what_one_holds_at_the_turn(place: int, seed: int) -> None:
    alone, three = memory(place, 1), memory(place, 3)
    solution = random_solution(alone.formulated.problem, random.Random(seed))
    chosen = assignment(alone.formulated, solution)
    more = three.walk(solution) - alone.walk(solution)
    held = alone.liveness.stage_memory(chosen).held
    assert set(more[:-1].tolist()) == {2.0 * held}
    assert more[-1] == 0
    assert held > 0


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_a_schedule_in_halves_holds_the_factors_of_deferred_products(place: int, seed: int) -> None:
    """Factors as torch would keep them: the activation and the gradient of the result of each product, an activation once."""
    alone, halved = memory(place, 1), memory(place, 1, (HALVED[-1],))
    solution = random_solution(alone.formulated.problem, random.Random(seed))
    chosen, program = assignment(alone.formulated, solution), alone.formulated.program
    kept: dict[object, int] = {}
    for name, (x, _) in deferrable(program).items():
        op, candidate = program.op[name], chosen.ops[name]
        for value, layout in ((x, candidate.operands[op.operands.index(x)]), (op.results[0].name, candidate.results[0])):
            kept[value, layout] = program.values[value].local_bytes(layout, PAIR.sizes)
    more = halved.walk(solution) - alone.walk(solution)
    assert more[0] == 3 * sum(kept.values())
    assert more[-2] == more[:-1].max() > more[0] > 0
    assert more[-2] <= 4 * sum(kept.values())
    assert more[-1] == 0
    assert halved.walk(solution).max() == alone.liveness.stage_memory(chosen).peak(HALVED[-1:])


@pytest.mark.parametrize("place", [0, 1])
def test_a_row_of_a_schedule_in_halves_counts_no_more_than_its_fullest_moment(place: int) -> None:
    model = memory(place, 4, HALVED)
    best, problem = within(model.formulated, model, 1 << 50), model.formulated.problem
    assert best is not None
    for one in (best, random_solution(problem, random.Random(place))):
        peak = model.walk(one).max()
        rows = (model.row(moment, 0) for moment in range(len(model.walk(one))))
        most = max(row_bytes(problem, row, one.picks, one.arcs, one.recompute) for row in rows)
        assert most <= peak * (1 + 1e-9)
        assert one is not best or most >= 0.9 * peak


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
