"""Solving within a memory budget: solve, walk the step, bound the moment of the peak, solve again."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autopar.mesh import Bytes
from autopar.solver.followers import Merged, merge_followers
from autopar.solver.formulate import Formulated
from autopar.solver.memory import Ledger
from autopar.solver.problem import Floats, Row, Solution, row_bytes
from autopar.solver.search import SolverError
from autopar.solver.solve import POLISH, least_memory, solve

LITTLE, MORE = 1e-4, 1.25  # of the limit, and times: by so much at least a row that was kept but did not suffice is tightened
FINE, REFINE = 0.01, 5.0  # of the least memory, by which less is tried, and for how many seconds


def within(
    formulated: Formulated, ledger: Ledger, limit: Bytes, *, cutoff: float = math.inf, patience: float = math.inf
) -> Solution | None:
    """The cheapest solution whose walk stays within `limit` bytes per device; None if there is none below `cutoff` seconds.

    Raises SolverError after about `patience` seconds without an answer.
    """
    merged = merge_followers(formulated.problem)

    def last() -> Solution | None:
        least = _smallest(merged, ledger, patience)
        return None if least is None or ledger.walk(merged.expand(least)).max() > limit else least

    solution = _within(merged, ledger, limit, last, cutoff=cutoff, patience=patience)
    return None if solution is None else merged.expand(solution)


def _within(
    merged: Merged,
    ledger: Ledger,
    limit: float,
    last: Callable[[], Solution | None],
    *,
    cutoff: float = math.inf,
    patience: float = math.inf,
    polish: float = POLISH,
) -> Solution | None:
    """The same of the merged problem, where `last` is asked if nothing is found near the relaxation."""
    asked: dict[int, float] = {}  # bytes beyond what the row of a moment counts

    def judge(solution: Solution, final: bool) -> list[Row]:
        whole = merged.expand(solution)
        alive = ledger.walk(whole)
        fresh = [moment for moment in _peaks(alive, limit) if moment not in asked]
        asked.update(dict.fromkeys(fresh, 0.0))
        if final and not fresh and alive.max() > limit:
            # A moment that has its row already: what the row does not see there is asked for.
            fresh = [int(alive.argmax())]
            row = ledger.row(fresh[0], float(limit))
            seen = row_bytes(merged.original, row, whole.picks, whole.arcs, whole.again)
            asked[fresh[0]] = max(float(alive.max()) - seen, MORE * asked[fresh[0]] + LITTLE * limit)
        return [merged.row(ledger.row(moment, float(limit), asked[moment])) for moment in fresh]

    return solve(merged.problem, judge, last=last, cutoff=cutoff, patience=patience, polish=polish)


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


def smallest(formulated: Formulated, ledger: Ledger, *, patience: float = math.inf) -> Solution | None:
    """A solution of least peak memory; None if there is no solution at all. `patience` as for `within`."""
    merged = merge_followers(formulated.problem)
    least = _smallest(merged, ledger, patience)
    return None if least is None else merged.expand(least)


def _smallest(merged: Merged, ledger: Ledger, patience: float) -> Solution | None:
    """The same of the merged problem: nothing is found within a hundredth less."""
    least = better = _least(merged, ledger, patience)
    while better is not None:
        least = better
        limit = math.floor((1 - FINE) * ledger.walk(merged.expand(least)).max())
        try:
            better = _within(merged, ledger, limit, lambda: None, patience=min(patience, REFINE), polish=0.0)
        except SolverError:
            better = None
    return least


def _least(merged: Merged, ledger: Ledger, patience: float) -> Solution | None:
    """A solution of about the least peak memory."""
    cheapest = solve(merged.problem, patience=patience)
    if cheapest is None:
        return None
    beyond: dict[int, float] = {}

    def judge(solution: Solution) -> tuple[float, list[Row]]:
        whole = merged.expand(solution)
        alive = ledger.walk(whole)
        peak, rows = float(alive.max()), []
        for moment in _peaks(alive, 0.0)[:3]:
            row = ledger.row(moment, peak)
            seen = row_bytes(merged.original, row, whole.picks, whole.arcs, whole.again)
            more = max(0.0, float(alive[moment]) - seen) if moment in beyond else 0.0  # what the row does not see
            if moment not in beyond or more > beyond[moment] + LITTLE * peak:
                beyond[moment] = more
                rows.append(merged.row(ledger.row(moment, peak, more)))
        return peak, rows

    return least_memory(merged.problem, judge, cheapest, patience=patience)
