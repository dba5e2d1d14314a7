"""A proposal by sums, for a judge that knows more of overlap than rows can say.

The law of regions has computing lose beta seconds per second of a message that is sent ahead (`overlap_rows`,
`formulation.overlap`), wherever it runs. Only a schedule tells what overlaps with what: a message next to another one that is
waited for slows nothing down. So a solution that the law prices higher may be faster, above all one that hides little. Such a
solution is the cheapest if nothing is hidden:

    minimise    prices + sum_p (1 - beta) ahead[p]        without regions: no long rows

in the window left by the law's bound by messages, and by a relaxation with rows if there is one: both exist already.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.solver.dual_ascent import DualBound
from autopar.solver.highs import SolverError
from autopar.solver.lazy_rows import LazyRows
from autopar.solver.link_weights import LoadedPrices
from autopar.solver.problem import Problem, Solution
from autopar.solver.reduced_cost_fixing import whole_problem, window
from autopar.solver.relaxation import relaxation_of
from autopar.solver.search import Search, search_rows
from autopar.solver.settings import SearchSettings


def by_sums(
    problem: Problem, dual: DualBound, best: float, beta: float, memory: LazyRows, settings: SearchSettings
) -> Solution | None:
    """The best solution at prices without overlap; its `seconds` and `bound` are in these prices.

    Args:
        problem: with regions.
        dual: its bound, which may know of rows by its reduced costs.
        best: seconds of its best solution.
        beta: seconds that computing loses per second of a message beside it.
        memory: the rows that solutions must not break.
        settings: `proposal_window`, `proposal_columns`, `proposal_iterations`.

    None if it is not found soon, or nearly everything may be as good as the best solution.
    """
    quick = replace(
        settings.near_relaxation(), branch_nodes=settings.rens_nodes, relaxation_iterations=settings.proposal_iterations
    )
    width = (1 + settings.proposal_window) * max(best, dual.bound) - dual.bound
    priced = summed(problem, beta)
    part = window(whole_problem(priced), dual.candidates, dual.arcs, width, settings.largest_core)
    if part is None or sum(map(len, (*part.picks, *part.arcs))) > settings.proposal_columns:
        return None
    try:
        search = Search.of(part, quick) if memory.rows else Search(part, quick, relaxation_of(part.problem, quick))
        found = search_rows(search, memory, math.inf).solution
    except SolverError:
        return None
    return found and part.expand(found)


def summed(problem: Problem, beta: float) -> Problem:
    """The problem with all messages at their full seconds, as `formulate` poses it for a device with beta 1."""
    prices = LoadedPrices(problem)
    for region in problem.regions:
        prices.add(region.ahead, 1 - beta)
    return prices.problem()


__all__ = ["by_sums", "summed"]
