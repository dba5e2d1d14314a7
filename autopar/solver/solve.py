"""Solving: the relaxation first, then branching where it is fractional, then the routes read off as trees.

The answer is checked, not trusted: its price is summed from its own picks and arcs (`problem.price`), and the bound is HiGHS's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.highs import INTEGRAL, Search, SolverResult
from autopar.solver.integer_program import HEAVY, MICROSECONDS, IntegerProgram
from autopar.solver.problem import Problem, RecomputeCounts, Row, Solution, homes, price, row_bytes
from autopar.solver.reduced_cost_fixing import whole, window
from autopar.solver.routes import SAME, together, tree

PROVEN = 1e-3  # the relative gap at which branching stops
FEW = 0.2  # the share of choices up to which those that the relaxation left open are settled by themselves first
NEAR, POLISH = 1e-2, 2.0  # the gap beyond which a dive is followed by branching, and for how many seconds
DEAR = 10.0  # times the relaxation: so dear a solution is sought only if there is no other
CLOSE = 5e-3  # of the least memory, by which an answer may exceed it
ROUNDS = 12  # in which the least memory is sought
WINDOWS = (0.005, 0.01, 0.04, 0.16)  # of the relaxation, by which a solution within a budget may be dearer; tried in turn
LEAN = (0.002, *WINDOWS)  # the same where memory is all that counts
WIDE = 0.05  # the gap up to which a solution found in a window is as good as those that diving in the whole finds


class NoRouteError(Exception):
    """Fractional picks, rounded, are not joined by any route: what is left of conversions allows only some pairs."""


Judge = Callable[[Solution, bool], Iterable[Row]]


def solve(
    problem: Problem,
    judge: Judge = lambda solution, final: (),
    rows: Iterable[Row] = (),
    *,
    last: Callable[[], Solution | None] | None = None,
    cutoff: float = float("inf"),
    time_limit: float = 300.0,
    gap: float = PROVEN,
    patience: float = math.inf,
    polish: float = POLISH,
    windows: Sequence[float] = WINDOWS,
    branches: bool = True,
) -> Solution | None:
    """The cheapest solution that every row allows; None if there is none, or none below `cutoff` seconds.

    `judge(solution, final)` looks at a solution and returns the rows that it breaks; they join the program and it is
    solved again until a final solution breaks none. What is not final is a rounded relaxation: it may bring rows, but need
    not. `last()` is a solution that keeps to all rows, asked for where none is found near the relaxation; without it there
    is branching until one is found. `time_limit` is in seconds, `gap` the relative gap at which branching stops,
    `polish` the seconds of branching after a dive that stayed far from its bound. Where there are rows, it is looked for within
    `windows` of the relaxation without rows first, shares of its price. What is found there is best if the window is as wide as
    it is dear; where that is too wide, the whole gives the bound, and is searched only if that is far. Unless it `branches`,
    only solutions near a relaxation are found; with a `cutoff` only those that are found soon. Raises SolverError after about
    `patience` seconds without an answer.
    """
    effort = _Effort(time_limit=time_limit, gap=gap, patience=patience, polish=polish, branches=branches)
    search, asked = effort.search(problem), list(rows)
    relaxed = search.relax(cutoff)
    if relaxed is None:
        return None
    asked = asked or _rounded(search, relaxed, judge)
    best, proven, reduced = None, relaxed.bound, search.reduced()
    for share in windows if asked else ():
        most = (1 + share) * relaxed.bound if best is None else best.seconds
        part = window(problem, *reduced, most - relaxed.bound)
        if part is None:
            break
        rows, smaller = [part.row(row) for row in asked], effort.search(part.problem, quick=share == windows[0])
        below = min(cutoff, DEAR * relaxed.bound) if best is None else best.seconds
        found, bound = _solved(smaller, part.judge(judge, asked), rows, lambda: None, below, effort)
        proven = max(proven, min(most, bound))
        best = best if found is None or found.seconds >= below else part.expand(found)
        if best is not None and best.seconds <= most:
            return _bounded(best, proven)
        if most >= cutoff:
            return None
    if best is None:
        found, bound = _solved(search, judge, asked, last, cutoff, effort)
        return found and _bounded(found, max(proven, bound))
    return _beside_whole(best, proven, search, judge, asked, effort)


def _beside_whole(best: Solution, proven: float, search: Search, judge: Judge, asked: list[Row], effort: _Effort) -> Solution:
    """A solution of a window with the bound of the whole, or where that is far what a search of the whole betters."""
    search.bound(replace(row, constant=0.0) for row in asked)
    relaxed = search.relax()
    proven = proven if relaxed is None else max(proven, relaxed.bound)
    if best.seconds > (1 + WIDE) * proven:
        found, _ = _solved(search, judge, asked, lambda: None, best.seconds, replace(effort, polish=0.0))
        best = best if found is None or found.seconds >= best.seconds else found
    return _bounded(best, proven)


def _bounded(solution: Solution, proven: float) -> Solution:
    """A solution with the bound that is proven."""
    bound = min(solution.seconds, proven)
    same = solution.seconds - bound <= SAME * solution.seconds
    return replace(solution, bound=bound, status="optimal" if same else "feasible")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effort:
    """How long and how closely to search: see `solve`."""

    time_limit: float
    gap: float
    patience: float
    polish: float
    branches: bool

    def search(self, problem: Problem, *, quick: bool = False) -> Search:
        """The search for a problem's solution, with its tolls."""
        limits = {"time_limit": self.time_limit, "gap": self.gap, "patience": self.patience}
        found = Search(IntegerProgram(problem, fixed_charges=False), **limits, quick=quick)
        found.levy()
        return found


def _solved(
    search: Search,
    judge: Judge,
    rows: list[Row],
    last: Callable[[], Solution | None] | None,
    cutoff: float,
    effort: _Effort,
) -> tuple[Solution | None, float]:
    """See `solve`, of the problem of a search, all of it; with what every solution of it costs at least.

    What a row asks for beyond what it sees proves nothing: the bound is that of the rows without.
    """
    problem, polish = search.model.problem, effort.polish
    broken, known, proven = rows, list[Row](), 0.0
    if any(row.constant for row in rows):
        search.bound(replace(row, constant=0.0) for row in rows)
        relaxed = search.relax(cutoff)
        proven = search.proven(relaxed, cutoff)
        if relaxed is None and cutoff < math.inf:
            return None, proven
    while True:
        if broken:
            search.bound(broken)
            known += broken
        tight = any(row.constant for row in known)
        relaxed = search.relax(cutoff, soon=tight and last is not None)
        proven = proven if tight else max(proven, search.proven(relaxed, cutoff))
        if relaxed is None and cutoff < math.inf:
            return None, proven
        if relaxed is not None and search.fractional(relaxed):
            broken = _rounded(search, relaxed, judge)
            if broken:
                continue
        more = 0.0 if tight else polish
        found = None
        if relaxed is not None:
            found = _whole(search, relaxed, known, effort.gap, last is not None, more, effort.branches)
        if found is None:
            return None if last is None else last(), proven
        solution, near = found
        broken = list(judge(solution, True))
        if broken:
            continue
        for better in _better(search, solution, near, polish):
            cheap = better.seconds <= solution.seconds * (1 + SAME)
            if cheap and _kept(problem, better, known) and not list(judge(better, True)):
                solution = better
        return solution, proven if tight else max(proven, solution.bound)


def _rounded(search: Search, relaxed: SolverResult, judge: Judge) -> list[Row]:
    """The rows that a rounded relaxation breaks; none where no routes join what it takes most of."""
    try:
        return list(judge(_read(search.model, relaxed), False))
    except NoRouteError:
        return []


def _better(search: Search, solution: Solution, near: SolverResult | None, polish: float) -> Iterator[Solution]:
    """What may be better than a solution: what some seconds of branching find where a dive stayed far from the bound, and the
    same routes together."""
    if near is not None and polish and solution.gap > NEAR:
        branched = search.branch(near, uses=True, patience=polish)
        if branched is not None:
            solution = _read(search.model, branched)
            yield solution
    yield together(search.model.problem, solution)


def _whole(
    search: Search, relaxed: SolverResult, rows: Sequence[Row], gap: float, dives: bool, polish: float, branches: bool
) -> tuple[Solution, SolverResult | None] | None:
    """An integer solution within the gap of the relaxation, found with as little branching as that takes; with the end of the
    dive that found it. If it `dives`, there is no branching but for `polish` seconds where it finds nothing."""
    model = search.model
    open_choices, settled = search.fractional(relaxed), None
    if not open_choices:
        solution = _read(model, relaxed)
        if search.partial(relaxed) or (solution.status == "optimal" and _kept(model.problem, solution, rows)):
            return solution, None
    if search.treated:
        near = search.dive(relaxed) or (search.anything(relaxed, polish) if dives and polish else None)
        if near is not None and (dives or _kept(model.problem, _read(model, near), rows)):
            return _read(model, near), near
        if dives:
            return None
    if open_choices <= FEW * len(model.problem.choices):
        settled = search.settle(relaxed)
    if settled is not None:
        solution = _read(model, settled)
        if solution.gap <= max(gap, SAME) or not branches:
            return solution, None
    if not branches:
        return None
    for uses in (False, True):
        found = search.branch(settled, uses=uses)
        if found is None:
            return None
        solution = _read(model, found)
        if _kept(model.problem, solution, rows) and solution.gap <= max(gap, SAME):
            break
    return solution, None


def _kept(problem: Problem, solution: Solution, rows: Iterable[Row]) -> bool:
    """Whether a solution, as it was read off, keeps to the rows: of a mixture of routes one is taken, which may need more."""
    return all(
        row_bytes(problem, row, solution.picks, solution.arcs, solution.recompute) <= row.limit * (1 + SAME) for row in rows
    )


def least_memory(
    problem: Problem,
    judge: Callable[[Solution, dict[int, float]], tuple[float, list[Row]]],
    first: Solution,
    *,
    time_limit: float = 300.0,
    patience: float = math.inf,
) -> Solution:
    """A solution of about least peak memory, whatever it costs.

    `judge(solution, beyond)` returns the peak of a solution in bytes, and rows of moments at which much is alive; `beyond` is
    its notebook, by moment: what rows that the program has do not see. `first` is any solution, `patience` as for `solve`. It
    is looked for within `LEAN` of the relaxation first: most of the memory that can be saved is saved there, soon.
    """
    effort = _Effort(time_limit=time_limit, gap=PROVEN, patience=patience, polish=0.0, branches=False)
    search = effort.search(problem)
    relaxed = search.relax()
    assert relaxed is not None, "there is a solution"
    scale, _ = judge(first, {})
    best, least, reduced = first, scale, search.reduced()
    narrow = [window(problem, *reduced, share * relaxed.bound) for share in LEAN]
    for part in (*(part for part in narrow if part), whole(problem)):
        model, beyond = IntegerProgram(part.problem), dict[int, float]()
        _, rows = judge(best, beyond)
        model.minimise_peak(scale, first.seconds)
        assert model.peak is not None
        lean = Search(model, time_limit=time_limit, gap=PROVEN, patience=patience)
        for _ in range(ROUNDS):
            lean.bound(part.row(row) for row in rows)
            found = lean.relax(math.inf if best is first else HEAVY / MICROSECONDS * least / scale)
            if found is None:
                break
            if lean.fractional(found):
                found = lean.dive(found) or found
            try:
                solution = part.expand(_read(model, found))
            except NoRouteError:
                break
            peak, rows = judge(solution, beyond)
            if peak < least:
                best, least = solution, peak
            if not rows or least <= found.values[model.peak[0]] * scale * (1 + CLOSE):
                break
    return best


def _read(model: IntegerProgram, answer: SolverResult) -> Solution:
    """Picks by the largest value; routes as the cheapest trees, from the produced to the wanted layouts; members wholly."""
    problem, columns, values = model.problem, model.columns, answer.values
    picks = tuple(
        int(np.argmax(values[first : first + len(choice.seconds)]))
        for first, choice in zip(columns.pick, problem.choices, strict=True)
    )
    arcs: list[tuple[int, ...]] = []
    for edge, use in zip(problem.edges, columns.use, strict=True):
        used = np.flatnonzero(values[use : use + len(edge.seconds)] > INTEGRAL)
        found = tree(edge, picks, used)
        if found is None:
            found = tree(edge, picks)
        if found is None:
            raise NoRouteError(f"{edge.name}: no route to the layouts that were picked")
        arcs.append(found)
    rerun = {choice: _members(values[first + picks[choice]]) for choice, first in columns.rerun.items()}
    resent = {(w, arc): _members(values[first + arc]) for w, first in columns.resent.items() for arc in arcs[w]}
    recompute = RecomputeCounts(
        choices={choice: members for choice, members in rerun.items() if members},
        arcs={end: members for end, members in resent.items() if members},
        offload=_away(model, answer, picks, arcs),
    )
    seconds = price(problem, picks, tuple(arcs), recompute)
    bound = min(answer.bound, seconds)
    return Solution(
        picks=picks, arcs=tuple(arcs), seconds=seconds, bound=bound, recompute=recompute,
        status="optimal" if seconds - bound <= SAME * seconds else "feasible",
    )  # fmt: skip


def _away(
    model: IntegerProgram, answer: SolverResult, picks: Sequence[int], arcs: Sequence[tuple[int, ...]]
) -> dict[tuple[int, int], int]:
    """How many members of each wire come back from the host, by the layouts that there are."""
    found: dict[tuple[int, int], int] = {}
    for w, (first, nodes) in model.columns.back.items():
        edge, lies = model.problem.edges[w], homes(model.problem.edges[w])
        there = {int(lies[edge.produced[picks[edge.producer]]]), *(int(lies[edge.target[arc]]) for arc in arcs[w])}
        for place, node in enumerate(nodes.tolist()):
            members = min(edge.count, _members(answer.values[first + place]))
            if members and node in there:
                found[w, node] = members
    return found


def _members(value: float) -> int:
    """A number of members, the last of them wholly."""
    return math.ceil(value - INTEGRAL)
