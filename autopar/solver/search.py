"""Search one window: relax with rows, dive or branch, find whole members, judge; the steps are those of `solve`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from autopar.solver.branch import branch, branch_open_choices, rens
from autopar.solver.dive import dive
from autopar.solver.highs import SolverResult, TimeLimitError
from autopar.solver.integer_program import IntegerProgram
from autopar.solver.lazy_rows import Excess, LazyRows, Tightening
from autopar.solver.members import WholeMembers
from autopar.solver.problem import Row, Solution, row_bytes
from autopar.solver.reduced_cost_fixing import Window
from autopar.solver.relaxation import Relaxation, Relaxed, fractional_recomputation
from autopar.solver.rounding import NoRouteError, rounded
from autopar.solver.routes import reroute
from autopar.solver.settings import SearchSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The best solution found below a cutoff, if any, and a lower bound in seconds on every solution.

    `complete`: nothing better is worth looking for.
    """

    solution: Solution | None
    bound: float
    complete: bool = False

    @property
    def seconds(self) -> float:
        """The price of the solution, infinite without one."""
        return math.inf if self.solution is None else self.solution.seconds


@dataclass(slots=True)
class Search:
    """A window with its relaxation and the rows that the relaxation has."""

    window: Window
    settings: SearchSettings
    relaxation: Relaxation
    rows: dict[str, Row] = field(default_factory=dict)

    @classmethod
    def of(cls, window: Window, settings: SearchSettings, *, quick: bool = False, presolve: bool = True) -> Search:
        """The search of a window that is first relaxed with rows (`quick`, `presolve`: see `Relaxation`)."""
        return cls(window, settings, Relaxation(IntegerProgram(window.problem), settings, quick=quick, presolve=presolve))

    @property
    def tightened(self) -> bool:
        """Whether a row has been tightened: then a relaxation's optimum is not a bound."""
        return any(row.constant for row in self.rows.values())

    def add(self, rows: list[Row]) -> None:
        """Add rows to the relaxation."""
        if rows:
            self.relaxation.add_rows(rows)
            self.rows |= {row.name: row for row in rows}

    def keeps(self, solution: Solution) -> bool:
        """Whether a rounded solution satisfies the rows: rounding picks one route of a mixture, which may need more."""
        problem, slack = self.window.problem, 1 + self.settings.equal_price
        return all(
            row_bytes(problem, row, solution.picks, solution.arcs, solution.recompute) <= row.limit * slack
            for row in self.rows.values()
        )


def search_rows(search: Search, memory: LazyRows, cutoff: float) -> Outcome:
    """Rows, dive, rens or branch, members, judge: again until a solution breaks no row; then reroute it."""
    settings, window, rows, bound = search.settings, search.window, list(memory.rows.values()), 0.0
    if any(row.constant for row in rows):  # the bound is that of the rows without what they ask for beyond what they see
        search.relaxation.add_rows(window.row(replace(row, constant=0.0)) for row in rows)
        relaxed = search.relaxation.relax(cutoff)
        bound = relaxed.bound
        if relaxed.result is None and cutoff < math.inf:
            return Outcome(solution=None, bound=bound)
    rows, best, tightening = memory.take(window, rows), None, Tightening(memory, window, settings.tighten_halvings)
    while True:
        try:
            relaxed = relax_with_rows(search, memory, rows, cutoff)
            bound = max(bound, relaxed.bound)
            solution = None if relaxed.result is None else _integral(search, relaxed.result)
        except TimeLimitError:
            if best is None:
                raise
            break
        if solution is None:
            rows = tightening.looser() if best is None else []
            if not rows:
                break
            continue
        bound = bound if search.tightened else max(bound, solution.bound)
        solution, excess, rows = _with_whole_members(search, memory, solution, math.inf if best is None else best.seconds)
        if not excess:
            best = solution if best is None or solution.seconds < best.seconds else best
            if not rows or best.gap <= settings.gap:
                break
        rows = rows or tightening.tighter(solution, excess)
        if not rows:
            break
    if best is None:
        return Outcome(solution=None, bound=bound)
    best = rerouted(search, memory, best)
    return Outcome(solution=best, bound=bound if search.tightened else max(bound, best.bound))


def rerouted(search: Search, memory: LazyRows, best: Solution) -> Solution:
    """The solution with the same layouts, no more expensive routes and fewer messages, if that violates no row."""
    other = _in_fewer_messages(search, best)
    return best if other is None or memory.excess(search.window, other) else other


def _in_fewer_messages(search: Search, best: Solution) -> Solution | None:
    """The candidate that `rerouted` judges; None if it equals the solution."""
    other, equal = reroute(search.window.problem, best, search.settings.equal_price), 1 + search.settings.equal_price
    changed = (other.picks, other.arcs, other.recompute) != (best.picks, best.arcs, best.recompute)
    return other if changed and other.seconds <= best.seconds * equal and search.keeps(other) else None


def _with_whole_members(
    search: Search, memory: LazyRows, solution: Solution, known: float
) -> tuple[Solution, list[Excess], list[Row]]:
    """A solution with the best whole numbers of members, where its own hold too much or are far from the bound; when it holds
    too much; and the rows of moments that had none.

    Where it takes less than the `known` seconds and is still far from the bound, rows as tight as its members needed: other
    layouts may be better then. Not in a large program, where relaxing once more takes longer than all before.
    """
    window, settings = search.window, search.settings
    solution, excess, rows = _judged(search, memory, solution)
    if rows or not search.relaxation.bounds_memory or not (excess or solution.gap > settings.gap):
        return solution, excess, rows
    members = WholeMembers(window, solution, memory.copy(), settings)
    better = members.best(math.inf if excess else solution.seconds)
    if better is None:
        return solution, excess, memory.met_by_copies(window)
    far = better.gap > settings.dive_gap and better.seconds < (1 - settings.gap) * known and not _large(search)
    return better, [], memory.as_tight(window, members.rows) if far else memory.met_by_copies(window)


def _judged(search: Search, memory: LazyRows, solution: Solution) -> tuple[Solution, list[Excess], list[Row]]:
    """A solution, when it holds too much, and the rows of moments that had none.

    As long as no row binds it is rerouted before, not only at the end, and what is taken as a rule is walked once.
    """
    other = None if search.relaxation.bounds_memory else _in_fewer_messages(search, solution)
    if other is not None and not memory.excess(search.window, other):
        return other, [], []
    excess = memory.excess(search.window, solution)
    return solution, excess, memory.fresh(search.window, excess)


def round_and_judge(search: Search, memory: LazyRows, relaxed: SolverResult) -> tuple[Solution | None, list[Row]]:
    """The rounded and rerouted relaxation, None if no routes connect its picks or it holds too much; and the rows that it
    violates.
    """
    try:
        solution = rounded(search.relaxation.program, relaxed, search.settings)
    except NoRouteError:
        return None, []
    solution, excess, rows = _judged(search, memory, solution)
    return None if excess else solution, rows


def relax_with_rows(search: Search, memory: LazyRows, rows: list[Row], cutoff: float) -> Relaxed:
    """Add rows and relax, until the rounded relaxation breaks no more."""
    bound = 0.0
    while True:
        search.add(rows)
        relaxed = search.relaxation.relax(cutoff, improving=search.tightened and not search.settings.exact)
        bound = bound if search.tightened else max(bound, relaxed.bound)
        if relaxed.result is None or not search.relaxation.open_choices(relaxed.result):
            return replace(relaxed, bound=bound)
        _, rows = round_and_judge(search, memory, relaxed.result)
        if not rows:
            return replace(relaxed, bound=bound)


def _integral(search: Search, relaxed: SolverResult) -> Solution | None:
    """An integral solution near the relaxation, with as little branching as possible."""
    program, settings = search.relaxation.program, search.settings
    if not search.relaxation.open_choices(relaxed):
        solution = rounded(program, relaxed, settings)
        partial = fractional_recomputation(program, relaxed, settings.integrality)
        if partial or (solution.status == "optimal" and search.keeps(solution)):
            return solution
    if not (search.relaxation.bounds_memory or program.columns.regions):  # regions have long rows: branching takes minutes
        return _branched(search, relaxed)
    near = _near(search, relaxed)
    if not settings.exact and (near is not None or search.relaxation.bounds_memory):
        return near
    searched = _wholly(search) or (near is not None and near.gap <= settings.equal_price)
    if near is not None and searched and search.keeps(near):
        return near
    return _branched(search, relaxed)


def _near(search: Search, relaxed: SolverResult) -> Solution | None:
    """A solution near the relaxation: a dive's, or where that is far from its bound or fails, the best of its neighbourhood.

    In a large program, where a dive is slow, that neighbourhood comes first; in a small one that no memory rows bound too, as a
    dive is slower than branching on so few columns; and in others, where what it holds is within the gap.
    """
    program, settings = search.relaxation.program, search.settings
    if settings.rens_nodes and _large(search):
        found = rens(program, relaxed, settings)
        if found is not None:
            return rounded(program, found, settings)
    nearest = rens(program, relaxed, settings) if _soon(search) else None
    if nearest is not None and not _small(search) and nearest.objective > (1 + settings.gap) * nearest.bound:
        nearest = None
    dived = nearest or dive(program, relaxed, settings)
    solution = None if dived is None else rounded(program, dived, settings)
    if not settings.rens_nodes or (solution is not None and solution.gap <= settings.dive_gap):
        return solution
    better = nearest or rens(program, relaxed, settings, dived, whole=_wholly(search))
    if _small(search) and (better is None or better.objective > (1 + settings.dive_gap) * better.bound):
        known = better or dived
        useless = None if known is None else search.relaxation.useless(known.objective)
        better = rens(program, relaxed, settings, known, whole=True, useless=useless) or better
    if better is None:
        return solution
    other = rounded(program, better, settings)
    if solution is None or (other.seconds < solution.seconds and search.keeps(other)):
        return other
    return replace(solution, bound=max(solution.bound, min(better.bound, solution.seconds)))


def _large(search: Search) -> bool:
    """Whether a relaxation takes long."""
    return search.relaxation.program.matrix.rows > search.settings.devex_rows


def _small(search: Search) -> bool:
    """Whether all columns may be branched on."""
    return search.relaxation.program.matrix.columns <= search.settings.small_program


def _soon(search: Search) -> bool:
    """Whether branching on what a relaxation uses ends sooner than a dive: ViT-L on (8, 8) takes 0.06 CPU seconds, and 0.5;
    Llama-3 70B on 512 devices 0.3, and 10."""
    settings, bounded = search.settings, search.relaxation.bounds_memory
    return settings.rens_nodes > 0 and not (settings.exact or (bounded and _small(search)))


def _wholly(search: Search) -> bool:
    """Whether all columns are branched on at once. Without memory rows the columns in use are tried first, and all of them only
    where a gap remains."""
    return _small(search) and (search.settings.exact or search.relaxation.bounds_memory)


def _branched(search: Search, relaxed: SolverResult) -> Solution | None:
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


__all__ = ["Outcome", "Search", "relax_with_rows", "rerouted", "round_and_judge", "search_rows"]
