"""Solving within a memory budget: solve, walk the step, bound the moment of the peak, solve again."""

from __future__ import annotations

from autopar.mesh import Bytes
from autopar.solver.followers import merge_followers
from autopar.solver.formulate import Formulated
from autopar.solver.memory import Ledger
from autopar.solver.problem import Row, Solution
from autopar.solver.solve import least_memory, solve


def within(formulated: Formulated, ledger: Ledger, limit: Bytes, *, cutoff: float = float("inf")) -> Solution | None:
    """The cheapest solution whose walk stays within `limit` bytes per device; None if there is none below `cutoff` seconds."""
    merged = merge_followers(formulated.problem)
    asked: dict[int, float] = {}

    def judge(solution: Solution) -> list[Row]:
        alive = ledger.walk(merged.expand(solution))
        moment, peak = int(alive.argmax()), float(alive.max())
        if peak <= limit:
            return []
        # A moment that has its row already is exceeded only by what rounds away there: ask for that much less.
        asked[moment] = asked.get(moment, float(limit)) - (peak - limit if moment in asked else 0.0)
        return [merged.row(ledger.row(moment, asked[moment]))]

    solution = solve(merged.problem, judge, cutoff=cutoff)
    return None if solution is None else merged.expand(solution)


def smallest(formulated: Formulated, ledger: Ledger) -> Solution | None:
    """A solution of least peak memory; None if there is no solution at all."""
    merged = merge_followers(formulated.problem)
    cheapest = solve(merged.problem)
    if cheapest is None:
        return None
    scale = float(ledger.walk(merged.expand(cheapest)).max())  # the answer is of this order, whatever budget was asked for

    def judge(solution: Solution, peak: float) -> list[Row]:
        alive = ledger.walk(merged.expand(solution))
        return [merged.row(ledger.row(int(alive.argmax()), float(scale)))] if alive.max() > peak else []

    least = least_memory(merged.problem, judge, scale)
    return None if least is None else merged.expand(least)
