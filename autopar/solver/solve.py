"""Solve a planning problem. The steps, in the order in which they run, and what holds after each:

    step       function                        afterwards
    presolve   presolve.merge_followers        the aggregated problem has the same optimum
    relax      Relaxation.relax                every solution costs at least `bound`
    window     reduced_cost_fixing.window      what is left out costs more than the window is wide, whatever rows are added
    rows       LazyRows, search.search_rows    what a judge finds too large in a rounded relaxation is forbidden everywhere
    dive       dive.dive                       where rows bind or messages overlap: a solution near the relaxation
    rens       branch.rens                     where that is far from its bound: the best one of what relaxation and dive use
    branch     branch.branch                   where no rows bind, nor dive and rens find one: a solution within the gap
    members    members.WholeMembers            the best whole numbers of members of its layouts, which break no row
    judge      LazyRows.excess                 the solution breaks no row, those included that nobody has asked for yet
    reroute    routes.reroute                  the same layouts for no more, in fewer messages
    bound      Solver._proven                  how far from the optimum the solution can be; if far, a better one

`Solver.solve` runs presolve and relax, without regions. Where rows bind, narrow windows are searched until one holds a solution
(`_near`), then a window of everything that could be better (`_proven`). Where messages overlap with computing, the rounded
relaxation is the solution to start from (0 to 1% above the bound on 15 baselines), and the long rows of regions join in that
window: 0.2 CPU seconds for GPT-2 on (2, 2, 2) of A100, 11 in the whole. Elsewhere the whole is searched. `search.search_rows`
is rows to reroute in one of them. The answer is checked, not trusted: its price is summed from its own picks and arcs
(`problem.price`), and the bound is HiGHS's. No step reads a clock, unless the user sets a deadline: then
the best solution so far is the answer, with the bound that is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from autopar.solver.highs import SolverResult, TimeLimitError
from autopar.solver.lazy_rows import Judge, LazyRows
from autopar.solver.presolve import merge_followers
from autopar.solver.problem import Floats, Problem, Row, Solution
from autopar.solver.reduced_cost_fixing import whole_problem, window
from autopar.solver.relaxation import Relaxed, relaxation_of
from autopar.solver.search import Outcome, Search, rerouted, round_and_judge, search_rows
from autopar.solver.settings import DEFAULTS, SearchSettings


def solve(
    problem: Problem,
    judge: Judge = lambda solution: (),
    rows: Iterable[Row] = (),
    *,
    cutoff: float = math.inf,
    settings: SearchSettings = DEFAULTS,
) -> Outcome:
    """The cheapest solution of a problem that every row allows: see `Solver.solve`."""
    return Solver(problem, settings).solve(judge, rows, cutoff=cutoff)


class Solver:
    """One problem with its relaxation, which stays warm from one limit to the next.

    Args:
        problem: what is solved.
        settings: see `SearchSettings`.
    """

    def __init__(self, problem: Problem, settings: SearchSettings = DEFAULTS) -> None:
        self.settings, self._presolved = settings, merge_followers(problem, settings)
        problem = self._presolved.problem
        self._whole = Search(whole_problem(problem), settings, relaxation_of(problem, settings))
        self._bound = 0.0  # of the last relaxation of the whole
        self._reduced_costs: tuple[list[Floats], list[Floats]] | None = None  # at that relaxation
        self._first: SolverResult | None = None  # the first relaxation of the whole
        self._series = False  # whether a limit was searched before

    def solve(self, judge: Judge = lambda solution: (), rows: Iterable[Row] = (), *, cutoff: float = math.inf) -> Outcome:
        """The cheapest solution that every row allows.

        Args:
            judge: says at which moments a solution holds more than its limit, and by how much. Their rows join the program,
                which is solved again, and are tightened, until a solution holds too much at no moment.
            rows: rows that are known from the start. Those of the last call are to be among them, with limits that are no
                higher: a series of limits falls.
            cutoff: only solutions below so many seconds count, and only those that are found soon.

        Raises SolverError where HiGHS fails or a limit of the settings leaves no answer, TimeLimitError where the deadline
        leaves none.
        """
        presolved, whole, start = self._presolved, self._whole, None
        memory = LazyRows(lambda one: judge(presolved.expand(one)), presolved.row, map(presolved.row, rows), self.settings)
        if self._reduced_costs is None:
            relaxed = whole.relaxation.relax(cutoff)
            if relaxed.result is None:
                return Outcome(solution=None, bound=relaxed.bound)
            self._keep(relaxed)
            self._first = relaxed.result
        if not memory.rows and self._first is not None:
            start, _ = round_and_judge(whole, memory, self._first)
        found = Outcome(solution=None, bound=self._bound)
        try:
            if memory.rows:
                found = self._near(memory, cutoff)
            elif start is not None and start.seconds < cutoff and whole.window.problem.regions:
                found = Outcome(solution=rerouted(whole, memory, start), bound=self._bound)
            if found.solution is not None and not found.complete:
                found = self._proven(memory, found.solution, found.bound)
                self._series = bool(memory.rows)
            if found.solution is None and not found.complete:
                last = search_rows(self._everything(), memory, cutoff)
                found = replace(last, bound=max(found.bound, last.bound))
        except TimeLimitError as error:
            if found.solution is None and start is not None and start.seconds < cutoff:
                found = Outcome(solution=rerouted(whole, memory, start), bound=self._bound)
            if found.solution is None:
                raise TimeLimitError(self.settings.deadline, self._bound) from error
        if found.solution is None:
            return found
        return replace(found, solution=presolved.expand(found.solution.bounded(found.bound, self.settings.equal_price)))

    def _everything(self) -> Search:
        """The search of the whole, with regions: they have long rows, so that few windows must do without."""
        self._whole.relaxation.add_regions()
        return self._whole

    def _keep(self, relaxed: Relaxed) -> None:
        """Keep what windows are made from: a relaxation of the whole, with the reduced costs there."""
        self._bound, self._reduced_costs = relaxed.bound, self._whole.relaxation.reduced_costs()

    def _near(self, memory: LazyRows, cutoff: float) -> Outcome:
        """A solution of the first window that holds one; it is best if it costs no more than the window is wide."""
        settings, bound = self.settings, self._bound
        assert self._reduced_costs is not None
        for share in settings.windows:
            widest = (1 + share) * self._bound
            part = window(self._whole.window, *self._reduced_costs, widest - self._bound, settings.largest_window)
            if part is None:
                break
            search = Search.of(part, settings, quick=share == settings.windows[0])
            below = min(cutoff, settings.unlikely_price * self._bound)
            found = search_rows(search, memory, below)
            bound = max(bound, min(widest, found.bound))
            if found.seconds < below:
                assert found.solution is not None
                return Outcome(solution=part.expand(found.solution), bound=bound, complete=found.seconds <= widest)
            if widest >= cutoff:
                return Outcome(solution=None, bound=bound, complete=True)
        return Outcome(solution=None, bound=bound)

    def _proven(self, memory: LazyRows, best: Solution, bound: float) -> Outcome:
        """A solution with the bound of all that could be better; where it is far from that, the best that is found there."""
        settings = self.settings
        if best.seconds <= (1 + settings.equal_price) * bound:
            return Outcome(solution=best, bound=min(bound, best.seconds))
        assert self._reduced_costs is not None
        largest = settings.largest_window if self._series else 1.0  # the whole takes longer, but only once in a series
        part = window(self._whole.window, *self._reduced_costs, best.seconds - self._bound, largest)
        search = self._everything() if part is None else Search.of(part, settings)
        search.add([search.window.row(replace(row, constant=0.0)) for row in memory.rows.values()])
        relaxed = search.relaxation.relax(proving=not memory.rows)
        bound = max(bound, min(best.seconds, relaxed.bound))
        if relaxed.result is None:
            return Outcome(solution=best, bound=bound)
        if part is None:
            self._keep(relaxed)
        enough = settings.window_gap if memory.rows else settings.gap
        if best.seconds > (1 + max(enough, settings.equal_price)) * bound:
            better = window(search.window, *search.relaxation.reduced_costs(), best.seconds - bound, 1.0)
            assert better is not None, "no share is too large"
            found = search_rows(Search.of(better, settings), memory, best.seconds)
            bound = max(bound, min(best.seconds, found.bound))
            if found.seconds < best.seconds:
                assert found.solution is not None
                best = better.expand(found.solution)
        return Outcome(solution=best, bound=bound)
