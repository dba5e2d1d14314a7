"""Solving within a memory budget: solve, walk the step, bound the moment of the peak, solve again."""

from __future__ import annotations

import math

import numpy as np

from autopar.mesh import Bytes
from autopar.solver.followers import merge_followers
from autopar.solver.formulate import Formulated
from autopar.solver.memory import Ledger
from autopar.solver.problem import Floats, Row, Solution
from autopar.solver.solve import least_memory, solve


def within(
    formulated: Formulated, ledger: Ledger, limit: Bytes, *, cutoff: float = math.inf, patience: float = math.inf
) -> Solution | None:
    """The cheapest solution whose walk stays within `limit` bytes per device; None if there is none below `cutoff` seconds.

    Raises SolverError after about `patience` seconds without an answer.
    """
    merged = merge_followers(formulated.problem)
    asked: dict[int, float] = {}

    def judge(solution: Solution, final: bool) -> list[Row]:
        alive = ledger.walk(merged.expand(solution))
        fresh = [moment for moment in _peaks(alive, limit) if moment not in asked]
        asked.update(dict.fromkeys(fresh, float(limit)))
        if final and not fresh and alive.max() > limit:
            # A moment that has its row already is exceeded only by what rounds away there: ask for that much less.
            fresh = [int(alive.argmax())]
            asked[fresh[0]] -= float(alive.max()) - limit
        return [merged.row(ledger.row(moment, asked[moment])) for moment in fresh]

    solution = solve(merged.problem, judge, cutoff=cutoff, patience=patience)
    return None if solution is None else merged.expand(solution)


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
    cheapest = solve(merged.problem, patience=patience)
    if cheapest is None:
        return None
    scale = float(ledger.walk(merged.expand(cheapest)).max())  # the answer is of this order, whatever budget was asked for

    def judge(solution: Solution, peak: float) -> list[Row]:
        alive = ledger.walk(merged.expand(solution))
        return [merged.row(ledger.row(int(alive.argmax()), float(scale)))] if alive.max() > peak else []

    least = least_memory(merged.problem, judge, scale, patience=patience)
    return None if least is None else merged.expand(least)
