"""The least memory: minimise the peak, whatever the step time, first in windows around the fastest solution."""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.solver.dive import dive
from autopar.solver.integer_program import IntegerProgram
from autopar.solver.matrix import MICROSECONDS
from autopar.solver.presolve import Aggregated, merge_followers
from autopar.solver.problem import Problem, Row, Solution
from autopar.solver.reduced_cost_fixing import Window, whole_problem, window
from autopar.solver.relaxation import Relaxation, relaxation_of
from autopar.solver.rounding import NoRouteError, rounded
from autopar.solver.settings import DEFAULTS, SearchSettings

PeakJudge = Callable[[Solution, dict[int, float]], tuple[float, list[Row]]]


def least_memory(
    problem: Problem,
    judge: PeakJudge,
    first: Solution,
    scale: float,
    settings: SearchSettings = DEFAULTS,
    *,
    below: float = math.inf,
    at_least: Callable[[Solution], float] = lambda solution: 0.0,
) -> tuple[Solution, float]:
    """A solution of nearly least peak memory, at any price, and its peak in bytes; or `first`, if no peak is `below` so many.

    Args:
        problem: what is solved.
        judge: `judge(solution, unseen)` returns the peak of a solution in bytes, and rows of moments at which much is alive;
            `unseen` is its notebook, by moment: bytes that the row which the program has of that moment does not count.
        first: any solution; it may be one whose peak is infinite, since it does not fit otherwise.
        scale: the unit of peaks, in bytes: about what a solution has.
        settings: `lean_windows`, `least_memory_rounds`, `least_memory_gap`.
        below: a known peak: then only the first window is searched, which saves most of what can be saved.
        at_least: bytes that the peak of every solution has at least, by the moments at which a solution has most.
    """
    if at_least(first) >= below:
        return first, below
    presolved = merge_followers(problem, settings)
    relaxation = relaxation_of(presolved.problem, settings)
    relaxed = relaxation.relax()
    assert relaxed.result is not None, "there is a solution"
    best, least = first, min(below, judge(first, {})[0])
    reduced_costs, whole = relaxation.reduced_costs(), whole_problem(presolved.problem)
    widths = [share * relaxed.bound for share in settings.lean_windows]
    found = [window(whole, *reduced_costs, width, settings.largest_window) for width in widths]
    parts = [*(part for part in found if part is not None), whole]
    for part in parts if below == math.inf else parts[:1]:
        best, least = _least_in(part, presolved, judge, (best, least), (scale, first.seconds), settings)
        if least <= (1 + settings.least_memory_gap) * at_least(best):
            break
    return best, least


def _least_in(
    part: Window,
    presolved: Aggregated,
    judge: PeakJudge,
    known: tuple[Solution, float],
    units: tuple[float, float],
    settings: SearchSettings,
) -> tuple[Solution, float]:
    """The solution of least peak in a window, or the known one; `units` are the bytes and seconds that objectives are in."""
    best, least = known
    scale, seconds = units
    program, unseen = IntegerProgram(part.problem), dict[int, float]()
    _, rows = judge(best, unseen)
    peak_column = program.minimise_peak(scale, seconds, settings)
    relaxation = Relaxation(program, settings)
    for _ in range(settings.least_memory_rounds):
        relaxation.add_rows(part.row(presolved.row(row)) for row in rows)
        cutoff = math.inf if least >= scale else settings.peak_weight / MICROSECONDS * least / scale
        found = relaxation.relax(cutoff).result
        if found is None:
            break
        if relaxation.open_choices(found):
            found = dive(program, found, settings) or found
        try:
            solution = presolved.expand(part.expand(rounded(program, found, settings)))
        except NoRouteError:
            break
        peak, rows = judge(solution, unseen)
        if peak < least:
            best, least = solution, peak
        if not rows or least <= found.values[peak_column] * scale * (1 + settings.least_memory_gap):
            break
    return best, least
