"""The core of a problem: the part that holds every solution up to a price, relaxed without rows.

It does not need the relaxation of the whole: dual ascent bounds that in a fraction of the time, its reduced costs exclude most
columns, and the price of the rounded relaxation of the rest tells which columns had to stay:

    bound of dual ascent        a rounded relaxation      a window
    |---------------------------|-------------------------|           all that is cheaper lies in the window
    10.36 ms                    10.41                     10.46
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.solver.dual_ascent import DualBound, dual_ascent
from autopar.solver.highs import TimeLimitError
from autopar.solver.problem import Floats, Problem
from autopar.solver.reduced_cost_fixing import Window, whole_problem, window
from autopar.solver.relaxation import Relaxed, relaxation_of
from autopar.solver.rounding import NoRouteError, rounded
from autopar.solver.search import Search
from autopar.solver.settings import SearchSettings


@dataclass(slots=True, kw_only=True)
class Core:
    """A window with its relaxation; it contains every solution that costs at most `holds` seconds.

    `relaxed` is the last relaxation, `reduced_costs` are those at it, of candidates by choice and arcs by edge. Without a
    result there is no solution below the cutoff. `dual` bounds the whole problem, if that was bounded by messages.
    """

    search: Search
    relaxed: Relaxed
    reduced_costs: tuple[list[Floats], list[Floats]]
    holds: float = math.inf
    dual: DualBound | None = None

    @property
    def bound(self) -> float:
        """A lower bound in seconds on every solution."""
        return min(self.holds, self.relaxed.bound)

    def keep(self, relaxed: Relaxed) -> None:
        """Replace the relaxation by a newer one of the window."""
        self.relaxed, self.reduced_costs = relaxed, self.search.relaxation.reduced_costs()

    def window(self, seconds: float, largest: float) -> Window | None:
        """The part that contains every solution up to a price: see `reduced_cost_fixing.window`."""
        return window(self.search.window, *self.reduced_costs, seconds - self.relaxed.bound, largest)

    def everything(self) -> Search:
        """The search of the whole window, with regions: their rows are long, so few windows need to do without."""
        self.search.relaxation.add_regions()
        return self.search


def whole(problem: Problem, settings: SearchSettings, cutoff: float = math.inf) -> Core:
    """The core without exclusions."""
    return _relaxed(whole_problem(problem), settings, cutoff)


def core(problem: Problem, settings: SearchSettings, cutoff: float = math.inf, *, dual: DualBound | None = None) -> Core | None:
    """A core that contains every solution cheaper than a known one, or than the cutoff in seconds; None if none is below the
    cutoff. At the deadline the last core that rounds to a solution, which may not contain all cheaper ones. `dual` is the bound
    by messages, if known.

    Raises TimeLimitError if the deadline comes before there is one.
    """
    dual, everything = dual or dual_ascent(problem, settings), whole_problem(problem)
    if dual.bound >= cutoff:
        return None
    found = _smallest(problem, dual, everything, settings, cutoff)
    return found and replace(found, dual=dual)


def _smallest(problem: Problem, dual: DualBound, everything: Window, settings: SearchSettings, cutoff: float) -> Core | None:
    known: Core | None = None
    try:
        for share in settings.core_windows:
            found = _up_to(min(cutoff, (1 + share) * dual.bound), everything, dual, settings, cutoff)
            price = math.inf if found is None else _price(found, settings)
            if price < math.inf:
                known = found
                settings.deadline.note_solution()
            if found is not None and found.holds < price < math.inf:
                found = _up_to(min(cutoff, price), everything, dual, settings, cutoff)
            if found is None:
                break
            if found.holds >= min(cutoff, price):
                return None if found.relaxed.result is None else found
        found = whole(problem, settings, cutoff)
    except TimeLimitError as error:
        if known is None:
            raise TimeLimitError(settings.deadline, dual.bound) from error
        return known
    return None if found.relaxed.result is None and cutoff < math.inf else found


def _up_to(holds: float, everything: Window, dual: DualBound, settings: SearchSettings, cutoff: float) -> Core | None:
    """The core that contains every solution up to a price; None if that is nearly everything."""
    part = window(everything, dual.candidates, dual.arcs, holds - dual.bound, settings.largest_core)
    return None if part is None else _relaxed(part, settings, cutoff, holds)


def _relaxed(part: Window, settings: SearchSettings, cutoff: float, holds: float = math.inf) -> Core:
    search = Search(part, settings, relaxation_of(part.problem, settings))
    relaxed = search.relaxation.relax(cutoff)
    return Core(search=search, relaxed=relaxed, reduced_costs=search.relaxation.reduced_costs(), holds=holds)


def _price(core: Core, settings: SearchSettings) -> float:
    """Seconds of the rounded relaxation; infinite if there is none."""
    if core.relaxed.result is None:
        return math.inf
    try:
        return rounded(core.search.relaxation.program, core.relaxed.result, settings).seconds
    except NoRouteError:
        return math.inf


__all__ = ["Core", "core", "whole"]
