"""Diving: fix picks that the relaxation makes nearly wholly, relax the rest again, until every choice is made."""

from __future__ import annotations

import highspy
import numpy as np

from autopar.solver import highs
from autopar.solver.deadline import Deadline
from autopar.solver.highs import Meaning, SolverResult
from autopar.solver.integer_program import IntegerProgram
from autopar.solver.matrix import MICROSECONDS
from autopar.solver.problem import Floats, Ints
from autopar.solver.relaxation import picks_of
from autopar.solver.settings import SearchSettings


def dive(program: IntegerProgram, relaxed: SolverResult, settings: SearchSettings) -> SolverResult | None:
    """An integral solution near the relaxation; its bound is the relaxation's.

    An infeasible step is undone, and only its surest pick fixed. None if that is infeasible too, or beyond `dive_backtracks`,
    `dive_iterations` or the deadline.
    """
    solver, values = highs.load(program.block()), relaxed.values
    if relaxed.basis is not None:
        solver.setBasis(relaxed.basis)
    made: set[int] = set()
    backtracks, iterations = 0, settings.dive_iterations
    while undecided := [(first, picks) for first, picks in picks_of(program, values) if first not in made]:
        surest = max(float(picks.max()) for _, picks in undecided)
        step = [(first, picks) for first, picks in undecided if picks.max() >= min(surest, settings.dive_threshold)]
        while not _fix_to_zero(solver, [first + _others(picks) for first, picks in step], iterations, settings.deadline):
            backtracks, iterations = backtracks + 1, iterations - solver.getInfo().simplex_iteration_count
            if iterations <= 0 or backtracks > settings.dive_backtracks or len(step) == 1:
                return None
            step = [max(step, key=lambda entry: float(entry[1].max()))]
        made |= {first for first, _ in step}
        values, iterations = highs.values(solver), iterations - solver.getInfo().simplex_iteration_count
    objective = solver.getInfo().objective_function_value / MICROSECONDS if made else relaxed.objective
    return SolverResult(values=values, objective=objective, bound=relaxed.bound)


def _fix_to_zero(solver: highspy.Highs, columns: list[Ints], iterations: int, deadline: Deadline) -> bool:
    """Solve with columns fixed to 0; False, after undoing it, if that is infeasible or takes too many iterations or too
    long.
    """
    fixed = np.concatenate(columns).astype(np.int32)
    zeros = np.zeros(len(fixed))
    *_, upper, _ = solver.getCols(len(fixed), fixed)
    solver.changeColsBounds(len(fixed), fixed, zeros, zeros)
    solver.setOptionValue("simplex_iteration_limit", max(0, iterations))
    if not highs.plainly_infeasible(solver) and highs.run(solver, deadline) is Meaning.SOLVED:
        return True
    solver.changeColsBounds(len(fixed), fixed, zeros, np.array(upper))
    return False


def _others(picks: Floats) -> Ints:
    """The candidates of a choice, except the one with the largest pick."""
    return np.flatnonzero(np.arange(len(picks)) != picks.argmax())
