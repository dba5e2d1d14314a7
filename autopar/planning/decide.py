"""The integer program proposes, the simulator decides.

The proposals are the plan of least price; that of all layouts if a named strategy's is cheaper; and, if the simulated step is
longer than its price, the best plan by sums and, if messages go over several axes at once, the best one whose messages go over
one each.

The integer program prices overlap by a law that is linear in what a region computes and sends; the simulator runs the emitted
order, in which a message over several axes delays the messages that tensor parallelism waits for on one of them. If it finds a
proposal faster, that becomes the plan. Its `gap` is still that of the law: its own price over the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from autopar.errors import BudgetError
from autopar.formulation.read_solution import assignment
from autopar.ir.device import Seconds
from autopar.plan.budget import parse_bytes
from autopar.plan.options import AUTO, Options
from autopar.planning.optimize import Optimized, Stop, solution_time, solved
from autopar.simulator.instructions import simulated
from autopar.solver.highs import SlowerError, TimeLimitError
from autopar.solver.settings import SearchSettings


def decided(best: Optimized, options: Options, settings: SearchSettings, stop: Stop) -> Optimized:
    """The solution with the shortest simulated step: the one of least price, or a proposal of its search, which ends here."""
    if settings.deadline.passed or options.strategy != AUTO:
        return best.searched
    least, longest = simulated_seconds(best), (1 + settings.simulated_gap) * solution_time(best.memory_model, best.solution)
    by_sums = least > longest or settings.below < math.inf
    seconds, other = _fastest([(least, best.searched), *_simulated(_proposed(best, options, by_sums=by_sums))])
    if seconds > longest:
        below = replace(settings, below=(1 + settings.simulated_gain) * seconds)
        seconds, other = _fastest([(seconds, other), *_simulated(_over_single_axes(best, options, below, stop))])
    best = best.searched
    stop("decide")
    if seconds >= (1 - settings.proposal_gain) * least:
        return best
    cheapest = f"the plan of least price ({1e3 * best.solution.seconds:.3f} ms) takes {1e3 * least:.3f}"
    return replace(other, decided=f"decided by the simulator: {1e3 * seconds:.3f} ms, where {cheapest}")


def _simulated(proposed: Iterable[Optimized]) -> Iterator[tuple[Seconds, Optimized]]:
    return ((simulated_seconds(one), one) for one in proposed)


def _fastest(simulated: Iterable[tuple[Seconds, Optimized]]) -> tuple[Seconds, Optimized]:
    return min(simulated, key=lambda pair: pair[0])


def simulated_seconds(found: Optimized) -> Seconds:
    """The simulated step time of a solution."""
    chosen = assignment(found.formulated, found.solution)
    return simulated(found.memory_model.liveness, found.formulated.step_prices, chosen).seconds


def _proposed(best: Optimized, options: Options, *, by_sums: bool) -> Iterator[Optimized]:
    """What the search of all layouts proposes besides the best solution: its own best, and if requested the best by sums, as
    far as they differ.
    """
    own = best.beside or best
    if best.beside is not None:
        yield _bounded(own.searched, best)
    if by_sums and own.loop is not None:
        solution = own.loop.by_sums(own.solution, parse_bytes(options.budget, own.formulated.mesh))
        if solution is not None and (solution.picks, solution.arcs) != (own.solution.picks, own.solution.arcs):
            yield _bounded(replace(own.searched, solution=solution), best)


def _over_single_axes(best: Optimized, options: Options, settings: SearchSettings, stop: Stop) -> Iterator[Optimized]:
    """The solution of the shortest simulated step whose messages go over one axis each; None if the best is one, or if all are
    proven slower than the settings' cutoff.
    """
    formulated = best.formulated
    routes = assignment(formulated, best.solution).routes.values()
    if any(len(step.axes) > 1 for steps in routes for step in steps):
        mesh = replace(formulated.mesh, flattened=())
        with suppress(BudgetError, SlowerError, TimeLimitError):
            found = decided(solved(formulated.analysis, mesh, options, stop, settings=settings), options, settings, stop)
            yield replace(_bounded(found, best), shapes=best.shapes)


def _bounded(found: Optimized, best: Optimized) -> Optimized:
    """A solution with the bound of the best one, which is valid for all, if that is lower than its own."""
    solution, bound = found.solution, best.solution.bound
    return replace(found, solution=replace(solution, bound=bound, status="feasible")) if bound < solution.bound else found


__all__ = ["decided", "simulated_seconds"]
