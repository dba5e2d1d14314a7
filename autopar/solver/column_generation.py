"""Solves a large problem within memory rows by column generation: of all layouts, only those that a few prices use.

`memory_prices.charged` turns the rows into prices, so that the whole problem is bounded as fast as without a budget. The
columns that its optimum uses join a small program with rows and regions, whose duals are the next prices, until it gets no
cheaper (Dantzig and Wolfe, "Decomposition principle for linear programs", Operations Research 8, 1960). GPT-3 on (8, 16, 8)
takes one round, to a program of 133 candidates and 213 arcs of 153,000, whose optimum no more columns improve by a
thousandth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.solver.core import core
from autopar.solver.lazy_rows import LazyRows
from autopar.solver.link_weights import Weighed, note, weighed
from autopar.solver.memory_prices import charged
from autopar.solver.problem import Problem
from autopar.solver.reduced_cost_fixing import selected
from autopar.solver.search import Search, relax_with_rows
from autopar.solver.settings import SearchSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A search over the columns that prices used, and a lower bound, in seconds, on the cost of every solution of the whole."""

    search: Search
    bound: float


def best_prices(problem: Problem, known: Weighed, memory: LazyRows, settings: SearchSettings) -> Priced:
    """The columns and the bound found by pricing memory, when further columns gain less than `weights_gap`.

    Args:
        problem: the whole problem.
        known: the best weights of its regions without rows.
        memory: the violated rows; rows of moments that the small program violates are added.
        settings: `price_rounds`, `price_shares`, `first_price`.
    """
    weights, bound, last, steep = known.weights, known.bound, np.inf, settings.first_price
    picks, arcs = [one.copy() for one in known.picks], [one.copy() for one in known.arcs]
    for _ in range(settings.price_rounds):
        part = selected(problem, [np.flatnonzero(one) for one in picks], arcs)
        search = Search.of(part, settings, presolve=False)
        relaxed = relax_with_rows(search, memory, [part.row(row) for row in memory.rows.values()], np.inf)
        if relaxed.result is None:  # infeasible: memory is worth more than assumed
            prices, steep = {row.name: steep * known.bound / max(row.limit, 1.0) for row in memory.rows.values()}, 2 * steep
        else:
            if relaxed.bound >= (1 - settings.weights_gap) * last:
                break
            last, prices, weights = relaxed.bound, search.relaxation.row_prices(), search.relaxation.link_duals()
        weighted = weighed(problem, weights)
        for share in settings.price_shares:
            priced = charged(weighted, tuple(memory.rows.values()), {name: share * price for name, price in prices.items()})
            found = core(priced.problem, settings)
            if found is None or found.relaxed.result is None:
                return Priced(search=search, bound=bound)
            bound = max(bound, found.bound - priced.limits)
            note(found.search.window, found.search.relaxation, found.relaxed.result.values, settings.integrality, picks, arcs)
        if bound >= settings.unlikely_price * known.bound:
            break
    return Priced(search=search, bound=bound)


__all__ = ["Priced", "best_prices"]
