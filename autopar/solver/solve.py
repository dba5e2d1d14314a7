"""Solve a planning problem. The steps, in the order in which they run, and what holds after each:

    step       function                        afterwards
    presolve   presolve.merge_followers        the aggregated problem has the same optimum
    relax      Relaxation.relax                every solution costs at least `bound`
    rows       LazyRows, _relax_with_rows      what a judge finds too large in a rounded relaxation is forbidden everywhere
    prices     price_ladder.PriceLadder        where rows bind: the plans on both sides of the limit, and a bound at it
    window     reduced_cost_fixing.window      what is left out costs more than the window is wide, whatever rows are added
    dive       dive.dive                       where rows bind: a solution near the relaxation
    rens       branch.rens                     where that is far from its bound: the best one of what relaxation and dive use
    branch     branch.branch                   where no rows bind: a solution within the gap
    judge      LazyRows.broken                 the solution breaks no row, those included that nobody has asked for yet
    reroute    routes.reroute                  the same layouts for no more, in fewer messages
    bound      _bounded_by_whole               how far from the optimum the solution can be

`solve` runs presolve and relax, then the others in what bracketing prices use (`_search_prices`), in one window after the other
(`_search_windows`) and at last in the whole problem (`_search_whole`), until one of these is near its bound; `_search_rows` is
rows to reroute in one of them. The answer is checked, not trusted: its price is
summed from its own picks and arcs (`problem.price`), and the bound is HiGHS's. No step reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from autopar.solver.branch import branch, branch_open_choices, rens
from autopar.solver.dive import dive
from autopar.solver.highs import SolverResult
from autopar.solver.presolve import merge_followers
from autopar.solver.price_ladder import PriceLadder
from autopar.solver.problem import Problem, Row, Solution, row_bytes
from autopar.solver.reduced_cost_fixing import Window, whole_problem, window
from autopar.solver.relaxation import Relaxation, Relaxed, fractional_recomputation, relaxation_of
from autopar.solver.rounding import NoRouteError, rounded
from autopar.solver.routes import reroute
from autopar.solver.settings import DEFAULTS, SearchSettings

Judge = Callable[[Solution, bool], Iterable[Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The best solution that was found below a cutoff, if any, and a lower bound in seconds on every solution.

    `complete`: nothing better is worth looking for.
    """

    solution: Solution | None
    bound: float
    complete: bool = False

    @property
    def seconds(self) -> float:
        """The price of the solution, infinite without one."""
        return math.inf if self.solution is None else self.solution.seconds


def solve(
    problem: Problem,
    judge: Judge = lambda solution, final: (),
    rows: Iterable[Row] = (),
    *,
    cutoff: float = math.inf,
    ladder: PriceLadder | None = None,
    settings: SearchSettings = DEFAULTS,
) -> Outcome:
    """The cheapest solution that every row allows.

    Args:
        problem: what is solved.
        judge: `judge(solution, final)` returns the rows that a solution breaks; they join the program, which is solved again
            until a final solution breaks none. One that is not final is a rounded relaxation: it may bring rows, but need not.
        rows: rows that are known from the start.
        cutoff: only solutions below so many seconds count, and only those that are found soon.
        ladder: relaxations of this problem at prices of memory, where the rows are of memory under one limit.
        settings: see `SearchSettings`.

    Raises SolverError where HiGHS fails or a limit of the settings leaves no answer.
    """
    presolved = merge_followers(problem, settings) if ladder is None else ladder.presolved
    memory = LazyRows(
        lambda solution, final: map(presolved.row, judge(presolved.expand(solution), final)), map(presolved.row, rows)
    )
    whole = _Search(whole_problem(presolved.problem), settings)
    relaxed = whole.relaxation.relax(cutoff)
    if relaxed.result is None:
        return Outcome(solution=None, bound=relaxed.bound, complete=True)
    if not memory.rows:
        memory.broken_by_rounding(whole, relaxed.result)
    found = Outcome(solution=None, bound=relaxed.bound)
    if ladder is not None and memory.rows and cutoff == math.inf:
        found = _search_prices(ladder, memory, settings)
    if not found.complete:
        found = _better(found, _search_windows(whole, memory, relaxed.bound, min(cutoff, found.seconds)))
    if not found.complete:
        found = _search_whole(whole, memory, found, cutoff)
    if found.solution is None:
        return found
    return replace(found, solution=presolved.expand(found.solution.bounded(found.bound, settings.equal_price)))


class LazyRows:
    """The memory rows that solutions broke so far: they hold in the whole problem, and so in each of its windows."""

    def __init__(self, judge: Judge, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self._judge = judge

    def broken(self, window: Window, solution: Solution, *, final: bool) -> list[Row]:
        """The rows that a solution of a window breaks, as rows of the window."""
        found = list(self._judge(window.expand(solution), final))
        self.rows += found
        return [window.row(row) for row in found]

    def broken_by_rounding(self, search: _Search, relaxed: SolverResult) -> list[Row]:
        """The rows that a rounded relaxation breaks; none where no routes join what it takes most of."""
        try:
            return self.broken(search.window, rounded(search.relaxation.program, relaxed, search.settings), final=False)
        except NoRouteError:
            return []


@dataclass(slots=True)
class _Search:
    """A window with its relaxation and the rows that the relaxation has."""

    window: Window
    settings: SearchSettings
    quick: bool = False
    rows: list[Row] = field(default_factory=list)
    relaxation: Relaxation = field(init=False)

    def __post_init__(self) -> None:
        self.relaxation = relaxation_of(self.window.problem, self.settings, quick=self.quick)

    @property
    def tightened(self) -> bool:
        """Whether a row asks for more than it sees: then a relaxation's optimum bounds nothing."""
        return any(row.constant for row in self.rows)

    def add(self, rows: list[Row]) -> None:
        """Add rows to the relaxation."""
        if rows:
            self.relaxation.add_rows(rows)
            self.rows += rows

    def keeps(self, solution: Solution) -> bool:
        """Whether a rounded solution keeps to the rows: of a mixture of routes one is taken, which may need more."""
        problem, slack = self.window.problem, 1 + self.settings.equal_price
        return all(
            row_bytes(problem, row, solution.picks, solution.arcs, solution.recompute) <= row.limit * slack for row in self.rows
        )


def _search_prices(ladder: PriceLadder, memory: LazyRows, settings: SearchSettings) -> Outcome:
    """Search what the plans on both sides of the limit use between them: a mixture of the two by members of classes."""
    limit = memory.rows[0].limit
    bracket = ladder.bracket(limit, memory.rows)
    bound = ladder.bound(limit)
    if bracket is None:
        return Outcome(solution=None, bound=bound)
    known = {row.name for row in memory.rows}
    memory.rows += [row for row in ladder.rows(limit) if row.name not in known]
    part = ladder.mixture(*bracket)
    solution = _search_rows(_Search(part, settings), memory, math.inf).solution
    if solution is None:
        return Outcome(solution=None, bound=bound)
    near = solution.seconds <= (1 + settings.ladder_gap) * bound
    return Outcome(solution=part.expand(solution), bound=bound, complete=near)


def _better(first: Outcome, second: Outcome) -> Outcome:
    """The better solution of two searches, with the better bound."""
    best = second if second.seconds < first.seconds else first
    complete = first.complete or second.complete
    return Outcome(solution=best.solution, bound=max(first.bound, second.bound), complete=complete)


def _search_windows(whole: _Search, memory: LazyRows, relaxed: float, cutoff: float) -> Outcome:
    """Search windows of growing width around the relaxation, where there are rows; what is found is best if it costs no more
    than the window is wide."""
    settings, reduced_costs = whole.settings, whole.relaxation.reduced_costs()
    best, bound = None, relaxed
    for share in settings.windows if memory.rows else ():
        widest = (1 + share) * relaxed if best is None else best.seconds
        part = window(whole.window.problem, *reduced_costs, widest - relaxed, settings.largest_window)
        if part is None:
            break
        below = min(cutoff, settings.unlikely_price * relaxed) if best is None else best.seconds
        search = _Search(part, settings, quick=share == settings.windows[0])
        found = _search_rows(search, memory, below)
        bound = max(bound, min(widest, found.bound))
        if found.solution is not None and found.solution.seconds < below:
            best = part.expand(found.solution)
        if best is not None and best.seconds <= widest:
            return Outcome(solution=best, bound=bound, complete=True)
        if widest >= cutoff:
            return Outcome(solution=None, bound=bound, complete=True)
    return Outcome(solution=best, bound=bound)


def _search_whole(whole: _Search, memory: LazyRows, found: Outcome, cutoff: float) -> Outcome:
    """Search the whole problem where its windows hold nothing, or bound what they hold."""
    if found.solution is not None:
        return _bounded_by_whole(whole, memory, found.solution, found.bound)
    last = _search_rows(whole, memory, cutoff)
    return replace(last, bound=max(found.bound, last.bound))


def _bounded_by_whole(whole: _Search, memory: LazyRows, best: Solution, bound: float) -> Outcome:
    """A window's solution with the bound of the whole; where it is far from that, the better of it and what the whole holds."""
    whole.relaxation.add_rows(replace(row, constant=0.0) for row in memory.rows)
    relaxed = whole.relaxation.relax()
    bound = bound if relaxed.result is None else max(bound, relaxed.bound)
    if best.seconds > (1 + whole.settings.window_gap) * bound:
        better = _search_rows(whole, memory, best.seconds).solution
        best = best if better is None or better.seconds >= best.seconds else better
    return Outcome(solution=best, bound=bound)


def _search_rows(search: _Search, memory: LazyRows, cutoff: float) -> Outcome:
    """Rows, dive, rens or branch, judge: again until a solution breaks no row; then reroute it."""
    rows, bound = [search.window.row(row) for row in memory.rows], 0.0
    if any(row.constant for row in rows):  # the bound is that of the rows without what they ask for beyond what they see
        search.relaxation.add_rows(replace(row, constant=0.0) for row in rows)
        relaxed = search.relaxation.relax(cutoff)
        bound = relaxed.bound
        if relaxed.result is None and cutoff < math.inf:
            return Outcome(solution=None, bound=bound)
    while True:
        relaxed = _relax_with_rows(search, memory, rows, cutoff)
        bound = max(bound, relaxed.bound)
        solution = None if relaxed.result is None else _integral(search, relaxed.result)
        if solution is None:
            return Outcome(solution=None, bound=bound)
        rows = memory.broken(search.window, solution, final=True)
        if not rows:
            break
    other = reroute(search.window.problem, solution, search.settings.equal_price)
    cheap = other.seconds <= solution.seconds * (1 + search.settings.equal_price)
    if cheap and search.keeps(other) and not memory.broken(search.window, other, final=True):
        solution = other
    return Outcome(solution=solution, bound=bound if search.tightened else max(bound, solution.bound))


def _relax_with_rows(search: _Search, memory: LazyRows, rows: list[Row], cutoff: float) -> Relaxed:
    """Add rows and relax, until the rounded relaxation breaks no more."""
    bound = 0.0
    while True:
        search.add(rows)
        relaxed = search.relaxation.relax(cutoff, improving=search.tightened and not search.settings.exact)
        bound = bound if search.tightened else max(bound, relaxed.bound)
        if relaxed.result is None or not search.relaxation.open_choices(relaxed.result):
            return replace(relaxed, bound=bound)
        rows = memory.broken_by_rounding(search, relaxed.result)
        if not rows:
            return replace(relaxed, bound=bound)


def _integral(search: _Search, relaxed: SolverResult) -> Solution | None:
    """A solution with whole picks near the relaxation, with as little branching as that takes."""
    program, settings = search.relaxation.program, search.settings
    if not search.relaxation.open_choices(relaxed):
        solution = rounded(program, relaxed, settings)
        partial = fractional_recomputation(program, relaxed, settings.integrality)
        if partial or (solution.status == "optimal" and search.keeps(solution)):
            return solution
    if not search.relaxation.bounds_memory:
        return _branched(search, relaxed)
    near = _near(search, relaxed)
    if not settings.exact or (near is not None and search.keeps(near) and near.gap <= settings.equal_price):
        return near
    return _branched(search, relaxed)


def _near(search: _Search, relaxed: SolverResult) -> Solution | None:
    """A solution near the relaxation: a dive's, or where that is far from its bound or fails, the best of its neighbourhood."""
    program, settings = search.relaxation.program, search.settings
    dived = dive(program, relaxed, settings)
    solution = None if dived is None else rounded(program, dived, settings)
    if not settings.rens_nodes or (solution is not None and solution.gap <= settings.dive_gap):
        return solution
    better = rens(program, relaxed, settings, dived)
    if better is None:
        return solution
    other = rounded(program, better, settings)
    cheap = solution is None or other.seconds < solution.seconds
    return other if cheap and (solution is None or search.keeps(other)) else solution


def _branched(search: _Search, relaxed: SolverResult) -> Solution | None:
    """A solution within the gap: branching on what the relaxation leaves open, then on everything."""
    program, settings = search.relaxation.program, search.settings
    gap, start = max(settings.gap, settings.equal_price), None
    if search.relaxation.open_choices(relaxed) <= settings.open_choices * len(program.problem.choices):
        start = branch_open_choices(program, relaxed, settings)
    if start is not None:
        solution = rounded(program, start, settings)
        if not settings.branch_whole or (solution.gap <= gap and search.keeps(solution)):
            return solution
    if not settings.branch_whole:
        return None
    for integer_arcs in (False, True):
        found = branch(program, settings, integer_arcs=integer_arcs, start=start)
        if found is None:
            return None
        solution = rounded(program, found, settings)
        if search.keeps(solution) and solution.gap <= gap:
            break
    return solution
