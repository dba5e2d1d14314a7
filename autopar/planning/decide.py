"""The program proposes, the simulator decides: between the plan of least price, the one that is best by sums, and, where
messages go over several axes at once and the simulated step is longer than its price, the best whose messages go over one each.

The integer program prices overlap by a law that is linear in what a region computes and sends; the simulator runs the emitted
order, in which a message over several axes is in the way of what tensor parallelism waits for on one of them. Where it finds a
proposal faster, that is the plan. Its `gap` stays that of the law: its own price over the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from autopar.errors import BudgetError
from autopar.formulation.read_solution import assignment
from autopar.ir.mesh import Seconds
from autopar.plan.budget import parse_bytes
from autopar.plan.options import AUTO, Options
from autopar.planning.optimize import Optimized, Stop, solution_time, solved
from autopar.simulator.instructions import simulated
from autopar.solver.highs import SlowerError, TimeLimitError
from autopar.solver.settings import SearchSettings


def decided(best: Optimized, options: Options, settings: SearchSettings, stop: Stop) -> Optimized:
    """The solution of the shortest simulated step: that of least price, or a proposal of its search, which ends here."""
    if settings.deadline.passed or options.strategy != AUTO:
        return replace(best, loop=None)
    least, proposed = simulated_seconds(best), [*_by_sums(best, options)]
    if least > (1 + settings.flattened_gap) * solution_time(best.memory_model, best.solution):
        below = replace(settings, below=(1 + settings.simulated_gain) * least)
        proposed += _over_single_axes(best, options, below, stop)
    best = replace(best, loop=None)
    seconds, other = min(((simulated_seconds(one), one) for one in proposed), key=lambda pair: pair[0], default=(least, best))
    stop("decide")
    if seconds >= (1 - settings.proposal_gain) * least:
        return best
    cheapest = f"the plan of least price ({1e3 * best.solution.seconds:.3f} ms) takes {1e3 * least:.3f}"
    return replace(other, decided=f"decided by the simulator: {1e3 * seconds:.3f} ms, where {cheapest}")


def simulated_seconds(found: Optimized) -> Seconds:
    """The step of a solution as the simulator runs it."""
    chosen = assignment(found.formulated, found.solution)
    return simulated(found.memory_model.liveness, found.formulated.step_prices, chosen).seconds


def _by_sums(best: Optimized, options: Options) -> Iterator[Optimized]:
    """What the search proposes beside its best solution, unless that is the same."""
    if best.loop is not None:
        solution = best.loop.by_sums(best.solution, parse_bytes(options.budget, best.formulated.mesh))
        if solution is not None and (solution.picks, solution.arcs) != (best.solution.picks, best.solution.arcs):
            yield replace(best, solution=solution, loop=None)


def _over_single_axes(best: Optimized, options: Options, settings: SearchSettings, stop: Stop) -> Iterator[Optimized]:
    """The solution of the shortest simulated step whose messages go over one axis each; none where those of the best do, or
    where it is proven that all take longer than the settings ask for."""
    formulated = best.formulated
    routes = assignment(formulated, best.solution).routes.values()
    if any(len(step.axes) > 1 for steps in routes for step in steps):
        mesh = replace(formulated.mesh, flattened=())
        with suppress(BudgetError, SlowerError, TimeLimitError):
            found = decided(solved(formulated.analysis, mesh, options, stop, settings=settings), options, settings, stop)
            solution, bound = found.solution, best.solution.bound  # which counts for these, too
            if bound < solution.bound:
                solution = replace(solution, bound=bound, status="feasible")
            yield replace(found, solution=solution, shapes=best.shapes)


__all__ = ["decided", "simulated_seconds"]
