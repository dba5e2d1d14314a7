"""Solving within a memory budget with lazy rows.

Solve without memory rows, simulate the memory of the solution, add a row for each moment that exceeds the budget, and solve
again until the simulation fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np

from autopar.formulation.formulate import PlanningProblem
from autopar.formulation.memory_model import MemoryModel
from autopar.ir.device import Bytes
from autopar.ir.layout import State
from autopar.solver.highs import SolverError
from autopar.solver.lazy_rows import Excess, Judge
from autopar.solver.least_memory import least_memory
from autopar.solver.memory_prices import least_bytes
from autopar.solver.problem import Floats, Row, Solution, row_bytes
from autopar.solver.search import Outcome
from autopar.solver.settings import DEFAULTS, SearchSettings
from autopar.solver.solve import Solver, solve

Posed = tuple[MemoryModel, Solution]  # a problem, and a solution of it

_LEAST: MutableMapping[MemoryModel, Solution] = WeakKeyDictionary()  # of least memory: the search and its errors need it


def within(
    formulated: PlanningProblem,
    memory_model: MemoryModel,
    limit: Bytes,
    *,
    cutoff: float = math.inf,
    settings: SearchSettings = DEFAULTS,
) -> Solution | None:
    """The cheapest solution whose simulated memory stays within `limit` bytes per device: see `BudgetLoop.within`."""
    return BudgetLoop(formulated, memory_model, settings).within(limit, cutoff=cutoff)


class BudgetLoop:
    """Solves a problem within one limit after the other; limits fall, so that each starts from the results of the last.

    Args:
        formulated: the problem.
        memory_model: its memory.
        settings: of the search.
    """

    def __init__(self, formulated: PlanningProblem, memory_model: MemoryModel, settings: SearchSettings = DEFAULTS) -> None:
        self._formulated, self._memory_model, self._settings = formulated, memory_model, settings
        self._solver = Solver(formulated.problem, settings)
        self._rows: dict[int, Row] = {}  # of the moments that exceeded a limit
        self._alive = np.zeros(0)  # bytes by moment, of the last solution
        self._away: dict[State, Row] = {}  # of the host and the disk, once a solution had too much there

    @property
    def binds(self) -> bool:
        """Whether a limit has been binding: whether the cheapest solution without a limit holds too much."""
        return bool(self._rows or self._away)

    @property
    def small(self) -> bool:
        """Whether the whole program is small enough to be branched on."""
        return self._solver.small

    @property
    def stopped(self) -> bool:
        """Whether the deadline has come."""
        return self._settings.deadline.passed

    def none_below(self, limit: Bytes, cutoff: float) -> bool:
        """Whether it is proven that no solution within a limit takes less than `cutoff` seconds."""
        return self._solver.none_below(cutoff, self._judge(limit))

    def within(self, limit: Bytes, *, cutoff: float = math.inf) -> Solution | None:
        """The cheapest solution whose simulated memory stays within `limit` bytes per device; None if none beats `cutoff`
        seconds.

        Raises SolverError if HiGHS fails or a limit of the settings leaves no answer.
        """
        memory_model, settings = self._memory_model, self._settings
        if not settings.branch_whole or cutoff < math.inf:
            return self.near(limit, cutoff).solution  # the solution of least memory is hardly ever below a cutoff
        found = self.near(limit, cutoff, everywhere=False)
        if found.solution is not None or found.bound == math.inf:
            return found.solution
        if settings.below < math.inf:
            return self.near(limit, settings.below).solution
        least = smallest(self._formulated, memory_model, settings=settings)
        if least is None or memory_model.walk(least).max() > limit or memory_model.excess(least):
            return None
        found = self.near(limit, cutoff)
        return found.solution or least.bounded(found.bound, settings.equal_price)

    def near(self, limit: float, cutoff: float, *, everywhere: bool = True) -> Outcome:
        """The cheapest solution within a limit found near the relaxation, or `everywhere`, with a lower bound on every
        solution.
        """
        judge, critical = self._judge(limit), partial(self._critical, limit)
        return self._solver.solve(judge, self._known(limit), cutoff=cutoff, everywhere=everywhere, critical=critical)

    def free(self) -> Solution | None:
        """The cheapest solution without a memory limit; None if there is none at all."""
        return self._solver.solve().solution

    def by_sums(self, best: Solution, limit: Bytes) -> Solution | None:
        """The best solution within a limit if nothing overlapped, searched near the best one; None if that is not found
        soon.
        """
        beta = self._formulated.prices.device.interference
        return self._solver.by_sums(best, beta, self._judge(limit), self._known(limit))

    def _known(self, limit: float) -> list[Row]:
        return [replace(row, limit=limit) for row in self._rows.values()] + [*self._away.values()]

    def _judge(self, limit: float) -> Judge:
        """The judge that tells at which moments a solution exceeds a limit."""

        def judge(solution: Solution) -> Iterator[Excess]:
            yield from self._elsewhere(solution)
            self._alive = alive = self._memory_model.walk(solution)
            for moment in _peaks(alive, limit, self._settings):
                if moment not in self._rows:
                    self._rows[moment] = self._memory_model.row(moment, limit)
                yield Excess(row=replace(self._rows[moment], limit=limit), bytes=float(alive[moment]) - limit)

        return judge

    def _critical(self, limit: float) -> list[Row]:
        return _critical(self._memory_model, self._alive, limit, self._settings)

    def _elsewhere(self, solution: Solution) -> Iterator[Excess]:
        """The host or the disk, if a solution stores too much there."""
        for there, more in self._memory_model.excess(solution).items():
            self._away[there] = self._away.get(there) or self._memory_model.away_row(there)
            yield Excess(row=self._away[there], bytes=float(more))


def _peaks(alive: Floats, limit: float, settings: SearchSettings) -> list[int]:
    """The local maxima of the memory curve above the limit, highest first."""
    near = max(1, int(len(alive) * settings.peak_neighbourhood))
    padded = np.pad(alive, near, constant_values=-np.inf)
    highest = np.lib.stride_tricks.sliding_window_view(padded, 2 * near + 1).max(axis=1)
    moments = np.flatnonzero((alive > limit) & (alive == highest))
    found: list[int] = []
    for moment in moments[np.argsort(-alive[moments], kind="stable")].tolist():
        if all(abs(moment - other) > near for other in found):
            found.append(moment)
    return found


def _critical(memory_model: MemoryModel, alive: Floats, limit: float, settings: SearchSettings) -> list[Row]:
    """The rows of the moments at which most is alive, which hardly anything may lower where the loss is computed."""
    moments = np.argsort(-alive, kind="stable")[: settings.critical_moments]
    return [memory_model.row(moment, limit) for moment in moments.tolist()]


def smallest(formulated: PlanningProblem, memory_model: MemoryModel, *, settings: SearchSettings = DEFAULTS) -> Solution | None:
    """A solution of least peak memory, up to `least_memory_step`; None if the problem has no solution."""
    found = smallest_of([memory_model], settings)
    return None if found is None else found[1]


def smallest_of(models: Iterable[MemoryModel], settings: SearchSettings) -> Posed | None:
    """The solution of least peak memory of any of these problems, up to `least_memory_step`; None if they have none.

    Each is only searched below the peak of those before.
    """
    best: Posed | None = None
    for model in models:
        found = _LEAST.get(model) or _below(model, best, settings)
        if found is not None and (best is None or model.walk(found).max() < best[0].walk(best[1]).max()):
            best, _LEAST[model] = (model, found), found
    return best


def _below(model: MemoryModel, known: Posed | None, settings: SearchSettings) -> Solution | None:
    """The solution of least peak memory below that of a known one, which may be of another problem; None if none is found."""
    peak, seconds = (math.inf, 0.0) if known is None else (float(known[0].walk(known[1]).max()), known[1].seconds)
    found = _least_of_both(model.formulated, model, settings, peak)
    loop = BudgetLoop(model.formulated, model, replace(settings, rens_nodes=0, tighten_halvings=0))
    if found is not None:
        peak, seconds = float(model.walk(found).max()), found.seconds
    elif known is None or not loop.small:  # from the solution of another problem, it takes a minute in a large one
        return None
    smaller = 1 - settings.least_memory_step
    with suppress(SolverError):
        while better := loop.near(math.floor(smaller * peak), settings.unlikely_price * seconds).solution:
            found, peak, seconds = better, float(model.walk(better).max()), better.seconds
    return found


def _least_of_both(
    formulated: PlanningProblem, memory_model: MemoryModel, settings: SearchSettings, below: float
) -> Solution | None:
    """The better result of `_least` with own rows and without them, since its dive never switches between the two."""
    found = [_least(formulated, memory_model, settings, below)]
    shared = [np.array([i for i, c in enumerate(known) if not c.own], dtype=np.int64) for known in formulated.candidates]
    if any(len(left) < len(known) for left, known in zip(shared, formulated.candidates, strict=True)) and all(map(len, shared)):
        inner = formulated.within(shared)
        other = _least(inner, MemoryModel(inner, memory_model.optimizer), settings, below)
        if other is not None:
            picks = tuple(int(left[pick]) for left, pick in zip(shared, other.picks, strict=True))
            found.append(replace(other, picks=picks))
    return min(filter(None, found), key=lambda one: float(memory_model.walk(one).max()), default=None)


def _least(formulated: PlanningProblem, memory_model: MemoryModel, settings: SearchSettings, below: float) -> Solution | None:
    """A solution that minimises peak memory, before `smallest_of` improves it; None if nothing is found `below` that peak."""
    cheapest = solve(formulated.problem, settings=settings).solution
    if cheapest is None:
        return None

    def judge(solution: Solution, tightened_by: dict[int, float]) -> tuple[float, list[Row]]:
        alive = memory_model.walk(solution)
        peak = float(alive.max())
        rows = [] if tightened_by else [memory_model.away_row(there) for there in memory_model.limits]
        for moment in _peaks(alive, 0.0, settings)[: settings.least_memory_peaks]:
            row = memory_model.row(moment, peak)
            seen = row_bytes(formulated.problem, row, solution.picks, solution.arcs, solution.recompute)
            more = max(0.0, float(alive[moment]) - seen) if moment in tightened_by else 0.0  # what the row does not count
            if moment not in tightened_by or more > tightened_by[moment] + settings.tighten_least * peak:
                tightened_by[moment] = more
                rows.append(memory_model.row(moment, peak, more))
        return math.inf if memory_model.excess(solution) else peak, rows

    def at_least(solution: Solution) -> float:
        rows = _critical(memory_model, memory_model.walk(solution), 0.0, settings)
        return max(least_bytes(formulated.problem, rows))

    scale = float(memory_model.walk(cheapest).max())
    found, peak = least_memory(formulated.problem, judge, cheapest, scale, settings, below=below, at_least=at_least)
    return found if peak < below or below == math.inf else None
