"""The program proposes, the simulator decides: between the plan of least price and the one that is best by sums.

The integer program prices overlap by a law that is linear in what a region computes and sends; the simulator runs the emitted
order. Where it finds the proposal faster, that is the plan. Its `gap` stays that of the law: its own price over the bound.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.formulation.read_solution import assignment
from autopar.ir.mesh import Seconds
from autopar.plan.budget import parse_bytes
from autopar.plan.options import AUTO, Options
from autopar.planning.optimize import Optimized, Stop
from autopar.simulator.instructions import simulated
from autopar.solver.settings import SearchSettings


def decided(best: Optimized, options: Options, settings: SearchSettings, stop: Stop) -> Optimized:
    """The solution of the shorter simulated step: that of least price, or the proposal of its search, which ends here."""
    other = None if settings.deadline.passed or options.strategy != AUTO else _proposed(best, options)
    best = replace(best, loop=None)
    if other is None:
        return best
    least, seconds = simulated_seconds(best), simulated_seconds(other)
    stop("decide")
    if seconds >= (1 - settings.proposal_gain) * least:
        return best
    cheapest = f"the plan of least price ({1e3 * best.solution.seconds:.3f} ms) takes {1e3 * least:.3f}"
    return replace(other, decided=f"decided by the simulator: {1e3 * seconds:.3f} ms, where {cheapest}")


def simulated_seconds(found: Optimized) -> Seconds:
    """The step of a solution as the simulator runs it."""
    chosen = assignment(found.formulated, found.solution)
    return simulated(found.memory_model.liveness, found.formulated.step_prices, chosen).seconds


def _proposed(best: Optimized, options: Options) -> Optimized | None:
    """What the search proposes beside its best solution; None if that is the same."""
    if best.loop is None:
        return None
    solution = best.loop.by_sums(best.solution, parse_bytes(options.budget, best.formulated.mesh))
    if solution is None or (solution.picks, solution.arcs) == (best.solution.picks, best.solution.arcs):
        return None
    return replace(best, solution=solution, loop=None)


__all__ = ["decided", "simulated_seconds"]
