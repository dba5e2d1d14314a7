"""Solving within a memory budget: solve, walk the step, bound the moment of the peak, solve again."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from autopar.formulation.formulate import PlanningProblem
from autopar.formulation.memory_model import MemoryModel
from autopar.ir.mesh import Bytes
from autopar.solver.highs import SolverError
from autopar.solver.least_memory import least_memory
from autopar.solver.price_ladder import PriceLadder
from autopar.solver.problem import Floats, Row, Solution, row_bytes
from autopar.solver.settings import DEFAULTS, SearchSettings
from autopar.solver.solve import Outcome, solve

_LEAST: MutableMapping[MemoryModel, Solution] = WeakKeyDictionary()  # the solutions of least memory: often asked for twice


def within(
    formulated: PlanningProblem,
    memory_model: MemoryModel,
    limit: Bytes,
    *,
    cutoff: float = math.inf,
    ladder: PriceLadder | None = None,
    settings: SearchSettings = DEFAULTS,
) -> Solution | None:
    """The cheapest solution whose walk stays within `limit` bytes per device; None if there is none below `cutoff` seconds.

    With a `ladder` (see `price_ladder`) solutions at prices of memory are tried first. Raises SolverError where HiGHS fails or
    a limit of the settings leaves no answer.
    """
    found = _within(formulated, memory_model, limit, cutoff=cutoff, ladder=ladder, settings=settings)
    if found.solution is not None or not settings.branch_whole or cutoff < math.inf:
        return found.solution  # what takes the least memory is hardly ever fast
    least = smallest(formulated, memory_model, settings=settings)
    if least is None or memory_model.walk(least).max() > limit:
        return None
    return least.bounded(found.bound, settings.equal_price)


def _within(
    formulated: PlanningProblem,
    memory_model: MemoryModel,
    limit: float,
    *,
    cutoff: float,
    settings: SearchSettings,
    ladder: PriceLadder | None = None,
) -> Outcome:
    """The cheapest solution within a limit that is found near a relaxation, with what every solution costs at least."""
    unseen: dict[int, float] = {}  # bytes beyond what the row of a moment counts

    def judge(solution: Solution, final: bool) -> list[Row]:
        alive = memory_model.walk(solution)
        fresh = [moment for moment in _peaks(alive, limit, settings) if moment not in unseen]
        unseen.update(dict.fromkeys(fresh, 0.0))
        if final and not fresh and alive.max() > limit:
            # A moment that has its row already: a part of what the row does not see is asked for, twice as much the next time.
            fresh = [int(alive.argmax())]
            excess = float(alive.max()) - limit
            tightened = (2 * unseen[fresh[0]], settings.tighten_first * excess, settings.tighten_least * limit)
            unseen[fresh[0]] = max(tightened)
        return [memory_model.row(moment, float(limit), unseen[moment]) for moment in fresh]

    return solve(formulated.problem, judge, cutoff=cutoff, ladder=ladder, settings=settings)


def price_ladder(formulated: PlanningProblem, memory_model: MemoryModel, settings: SearchSettings = DEFAULTS) -> PriceLadder:
    """The ladder of prices of a problem, for several limits: each starts from the rungs of those before."""

    def peak_rows(solution: Solution) -> tuple[float, list[Row]]:
        alive = memory_model.walk(solution)
        peak = float(alive.max())
        return peak, [memory_model.row(moment, peak) for moment in _peaks(alive, 0.0, settings)[:1]]

    return PriceLadder(formulated.problem, peak_rows, settings)


def _peaks(alive: Floats, limit: float, settings: SearchSettings) -> list[int]:
    """The moments at which more than the limit is alive and more than at any moment near, the highest first."""
    near = max(1, int(len(alive) * settings.peak_neighbourhood))
    padded = np.pad(alive, near, constant_values=-np.inf)
    highest = np.lib.stride_tricks.sliding_window_view(padded, 2 * near + 1).max(axis=1)
    moments = np.flatnonzero((alive > limit) & (alive == highest))
    found: list[int] = []
    for moment in moments[np.argsort(-alive[moments], kind="stable")].tolist():
        if all(abs(moment - other) > near for other in found):
            found.append(moment)
    return found


def smallest(formulated: PlanningProblem, memory_model: MemoryModel, *, settings: SearchSettings = DEFAULTS) -> Solution | None:
    """A solution of least peak memory: nothing is found within `least_memory_step` less; None if there is no solution."""
    if memory_model in _LEAST:
        return _LEAST[memory_model]
    least = better = _least(formulated, memory_model, settings)
    while better is not None:
        least = better
        limit = math.floor((1 - settings.least_memory_step) * memory_model.walk(least).max())
        cutoff = settings.unlikely_price * least.seconds
        try:
            better = _within(formulated, memory_model, limit, cutoff=cutoff, settings=replace(settings, rens_nodes=0)).solution
        except SolverError:
            better = None
    if least is not None:
        _LEAST[memory_model] = least
    return least


def _least(formulated: PlanningProblem, memory_model: MemoryModel, settings: SearchSettings) -> Solution | None:
    """A solution of about the least peak memory."""
    cheapest = solve(formulated.problem, settings=settings).solution
    if cheapest is None:
        return None

    def judge(solution: Solution, unseen: dict[int, float]) -> tuple[float, list[Row]]:
        alive = memory_model.walk(solution)
        peak, rows = float(alive.max()), []
        for moment in _peaks(alive, 0.0, settings)[: settings.least_memory_peaks]:
            row = memory_model.row(moment, peak)
            seen = row_bytes(formulated.problem, row, solution.picks, solution.arcs, solution.recompute)
            more = max(0.0, float(alive[moment]) - seen) if moment in unseen else 0.0  # what the row does not see
            if moment not in unseen or more > unseen[moment] + settings.tighten_least * peak:
                unseen[moment] = more
                rows.append(memory_model.row(moment, peak, more))
        return peak, rows

    return least_memory(formulated.problem, judge, cheapest, settings)[0]
