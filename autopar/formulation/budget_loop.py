"""Solving within a memory budget: solve, walk the step, bound the moment of the peak, solve again."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from weakref import WeakKeyDictionary

import numpy as np

from autopar.formulation.formulate import PlanningProblem
from autopar.formulation.memory_model import MemoryModel
from autopar.ir.mesh import Bytes
from autopar.solver.highs import SolverError
from autopar.solver.presolve import Aggregated, merge_followers
from autopar.solver.problem import Floats, Row, Solution, row_bytes
from autopar.solver.solve import DEAR, POLISH, least_memory, solve

LITTLE = 1e-4  # of the limit: the least by which a row that was kept but did not suffice is tightened
PART = 1 / 8  # of what exceeds it, by which it is tightened first: plans are few, and one just below may be next
FINE = 0.01  # of the least memory, by which less is tried

_FOUND: MutableMapping[MemoryModel, Solution] = WeakKeyDictionary()  # the solutions of least memory: often asked for twice


def within(
    formulated: PlanningProblem,
    memory_model: MemoryModel,
    limit: Bytes,
    *,
    cutoff: float = math.inf,
    patience: float = math.inf,
    near: bool = False,
) -> Solution | None:
    """The cheapest solution whose walk stays within `limit` bytes per device; None if there is none below `cutoff` seconds.

    Raises SolverError after about `patience` seconds without an answer. With `near` only a solution near the relaxation counts:
    then it is None too if that would take long to find.
    """
    merged = merge_followers(formulated.problem)

    def last() -> Solution | None:
        if near or cutoff < math.inf:  # what takes the least memory is hardly ever fast
            return None
        least = _smallest(merged, memory_model, patience)
        return None if least is None or memory_model.walk(merged.expand(least)).max() > limit else least

    polish = 0.0 if near else POLISH
    solution = _within(merged, memory_model, limit, last, cutoff=cutoff, patience=patience, polish=polish, branches=not near)
    return None if solution is None else merged.expand(solution)


def _within(
    merged: Aggregated,
    memory_model: MemoryModel,
    limit: float,
    last: Callable[[], Solution | None],
    *,
    cutoff: float = math.inf,
    patience: float = math.inf,
    polish: float = POLISH,
    branches: bool = True,
) -> Solution | None:
    """The same of the merged problem, where `last` is asked if nothing is found near the relaxation."""
    asked: dict[int, float] = {}  # bytes beyond what the row of a moment counts

    def judge(solution: Solution, final: bool) -> list[Row]:
        alive = memory_model.walk(merged.expand(solution))
        fresh = [moment for moment in _peaks(alive, limit) if moment not in asked]
        asked.update(dict.fromkeys(fresh, 0.0))
        if final and not fresh and alive.max() > limit:
            # A moment that has its row already: a part of what the row does not see is asked for, twice as much the next time.
            fresh = [int(alive.argmax())]
            asked[fresh[0]] = max(2 * asked[fresh[0]], PART * (float(alive.max()) - limit), LITTLE * limit)
        return [merged.row(memory_model.row(moment, float(limit), asked[moment])) for moment in fresh]

    return solve(merged.problem, judge, last=last, cutoff=cutoff, patience=patience, polish=polish, branches=branches)


def _peaks(alive: Floats, limit: float) -> list[int]:
    """The moments at which more than the limit is alive and more than at any moment near, the highest first."""
    near = max(1, len(alive) // 16)
    padded = np.pad(alive, near, constant_values=-np.inf)
    highest = np.lib.stride_tricks.sliding_window_view(padded, 2 * near + 1).max(axis=1)
    moments = np.flatnonzero((alive > limit) & (alive == highest))
    found: list[int] = []
    for moment in moments[np.argsort(-alive[moments], kind="stable")].tolist():
        if all(abs(moment - other) > near for other in found):
            found.append(moment)
    return found


def smallest(formulated: PlanningProblem, memory_model: MemoryModel, *, patience: float = math.inf) -> Solution | None:
    """A solution of least peak memory; None if there is no solution at all. `patience` as for `within`."""
    merged = merge_followers(formulated.problem)
    least = _smallest(merged, memory_model, patience)
    return None if least is None else merged.expand(least)


def _smallest(merged: Aggregated, memory_model: MemoryModel, patience: float) -> Solution | None:
    """The same of the merged problem: nothing is found within a hundredth less."""
    if memory_model in _FOUND:
        return _FOUND[memory_model]
    least = better = _least(merged, memory_model, patience)
    while better is not None:
        least = better
        limit = math.floor((1 - FINE) * memory_model.walk(merged.expand(least)).max())
        try:
            better = _within(
                merged, memory_model, limit, lambda: None, cutoff=DEAR * least.seconds, patience=patience, polish=0.0
            )
        except SolverError:
            better = None
    if least is not None:
        _FOUND[memory_model] = least
    return least


def _least(merged: Aggregated, memory_model: MemoryModel, patience: float) -> Solution | None:
    """A solution of about the least peak memory."""
    cheapest = solve(merged.problem, patience=patience)
    if cheapest is None:
        return None

    def judge(solution: Solution, beyond: dict[int, float]) -> tuple[float, list[Row]]:
        whole = merged.expand(solution)
        alive = memory_model.walk(whole)
        peak, rows = float(alive.max()), []
        for moment in _peaks(alive, 0.0)[:3]:
            row = memory_model.row(moment, peak)
            seen = row_bytes(merged.original, row, whole.picks, whole.arcs, whole.recompute)
            more = max(0.0, float(alive[moment]) - seen) if moment in beyond else 0.0  # what the row does not see
            if moment not in beyond or more > beyond[moment] + LITTLE * peak:
                beyond[moment] = more
                rows.append(merged.row(memory_model.row(moment, peak, more)))
        return peak, rows

    return least_memory(merged.problem, judge, cheapest, patience=patience)
