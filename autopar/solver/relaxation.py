"""The linear relaxation of an integer program, kept in HiGHS so that every change starts from the last basis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import highspy
import numpy as np

from autopar.solver import highs
from autopar.solver.highs import Meaning, SolverError, SolverResult, TimeLimitError
from autopar.solver.integer_program import IntegerProgram
from autopar.solver.matrix import MICROSECONDS
from autopar.solver.problem import Bools, Floats, Problem, Row
from autopar.solver.settings import SearchSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """The outcome of solving a relaxation below a cutoff, perhaps without `result`; every solution costs at least `bound`."""

    result: SolverResult | None
    bound: float


class Relaxation:
    """The relaxation of one program, to which rows are added between solves.

    Args:
        program: what is relaxed. Fixed charges and regions that it lacks can be added after a first solve.
        settings: limits and tolerances.
        quick: a first look at rows that others follow: iterations are limited regardless of size.
        presolve: whether HiGHS presolves it although it is large (`devex_rows`).
    """

    def __init__(
        self, program: IntegerProgram, settings: SearchSettings, *, quick: bool = False, presolve: bool = True
    ) -> None:
        self.program, self.settings, self._presolve = program, settings, presolve
        self.bounds_memory = False
        self._per_row = 0.0 if quick else settings.improving_iterations_per_row
        self._solved = False  # with the rows that there are now
        self._near = True  # whether the last basis is, as far as can be told
        self._loaded: highspy.Highs | None = None
        self._waiting: set[int] = set()  # rows (excess) of the whole that no solution has broken yet

    @property
    def _highs(self) -> highspy.Highs:
        """The program in HiGHS, loaded at the first solve, without rows (excess) that nothing has violated."""
        if self._loaded is None:
            rows, settings = self.program.matrix.rows, self.settings
            devex = rows > settings.devex_rows
            presolve = rows <= settings.unpresolved_rows or (devex and self._presolve)
            self._loaded = highs.load(self.program.block(), devex=devex, presolve=presolve)
            self._let_wait(self._loaded)
        return self._loaded

    def _let_wait(self, loaded: highspy.Highs) -> None:
        for row in sorted(self._waiting):
            loaded.changeRowBounds(row, -highspy.kHighsInf, highspy.kHighsInf)

    def add_fixed_charges(self) -> None:
        """Solve without fixed charges, then add them: the optimum with them is near, and a cold start would be far."""
        settings = self.settings
        highs.run_cold(
            self._highs, settings.deadline, steepest=settings.steepest_edge_iterations, devex=settings.devex_iterations
        )
        self._append(self.program.add_fixed_charges)

    def add_regions(self) -> None:
        """Add the regions, if there are any and they are not there yet: before any memory row.

        Their rows (excess) are long, and join one by one where a solution breaks them; a window, where they are short, has them
        from the start.
        """
        if self.program.problem.regions and not self.program.columns.regions:
            self._append(self.program.add_regions)
            self._waiting = {row for region in self.program.columns.regions for row in region.outlast}
            self._let_wait(self._highs)

    def _append(self, add: Callable[[], None]) -> None:
        """Add columns and rows to the program and to what is loaded; the last basis stays the one to start from."""
        columns, rows, loaded = self.program.matrix.columns, self.program.matrix.rows, self._highs
        add()
        highs.append(loaded, self.program.block(columns, rows))
        self._solved = False

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Add memory rows, and with the first of them the columns of what may be recomputed or offloaded.

        A row with an existing name is tightened in place: the last basis is near. Otherwise there may be so much new that
        presolving beats the last basis: with the first rows it does, unless the program is large already; for a large one, some
        iterations from the last basis tell.
        """
        matrix, first = self.program.matrix, not self.bounds_memory
        columns, first_row = matrix.columns, matrix.rows
        if first:
            self.bounds_memory = True
            idle = self.program.add_recomputation()
            if self._loaded is not None:
                for place in idle:
                    self._loaded.changeRowBounds(place, -highspy.kHighsInf, highspy.kHighsInf)
        for row in rows:
            tightened = self.program.tighten(row)
            if tightened is None:
                self.program.add_memory_row(row)
            elif self._loaded is not None:
                self._highs.changeRowBounds(tightened.row, -highspy.kHighsInf, tightened.upper)
        if matrix.rows > first_row:
            self._solved = False
            if self._loaded is None or (first and matrix.rows < self.settings.warm_start_rows):
                self._loaded = None
            else:
                highs.append(self._highs, self.program.block(columns, first_row))
                self._near = matrix.rows <= self.settings.presolve_again_rows

    def relax(self, cutoff: float = math.inf, *, improving: bool = False, proving: bool = False) -> Relaxed:
        """Solve, below `cutoff` (in seconds, or in the program's unit when it minimises memory).

        With a finite cutoff, or `improving`, a solution is known already: then iterations are limited, and there may be no
        result although a solution exists; with `proving` the limit is more generous. Raises SolverError where HiGHS fails, and
        at `relaxation_iterations`; TimeLimitError at the deadline.
        """
        improving = improving or cutoff < math.inf
        limit = self.settings.proving_iterations if proving and not improving else self._iterations(improving)
        improving = improving or proving
        meaning = self._started(cutoff, limit, improving=improving)
        while meaning is Meaning.SOLVED and (broken := self._most_broken()) is not None:
            self._highs.changeRowBounds(broken, 0.0, highspy.kHighsInf)
            self._waiting.remove(broken)
            meaning = self._run(improving=improving)
        self._solved = True
        match meaning:
            case Meaning.SOLVED:
                objective = self._highs.getInfo().objective_function_value / MICROSECONDS
                if objective >= cutoff:
                    return Relaxed(result=None, bound=cutoff)
                basis = self._highs.getBasis()
                result = SolverResult(values=highs.values(self._highs), objective=objective, bound=objective, basis=basis)
                return Relaxed(result=result, bound=objective)
            case Meaning.INFEASIBLE | Meaning.CUT_OFF:
                return Relaxed(result=None, bound=cutoff)
            case Meaning.TIME_UP:
                raise TimeLimitError(self.settings.deadline)
            case Meaning.LIMIT | Meaning.TROUBLE if improving and limit != self.settings.relaxation_iterations:
                return Relaxed(result=None, bound=0.0)
            case Meaning.LIMIT:
                raise SolverError(f"no plan was found in {limit} simplex iterations")
        raise SolverError(f"the relaxation was not solved: {meaning}")

    def _started(self, cutoff: float, limit: int | None, *, improving: bool) -> Meaning:
        """Solve from the last basis, or with presolve if some iterations show that this basis is bad or too far; unless
        presolve proves that there is no solution, which would take minutes from such a basis.
        """
        near, self._near = self._near, True
        if not near and highs.plainly_infeasible(self._highs):
            return Meaning.INFEASIBLE
        soon = self.settings.warm_iterations
        if not near and (limit is None or limit > soon):
            self._limit(cutoff, soon)
            meaning = highs.run(self._highs, self.settings.deadline)
            if meaning not in (Meaning.LIMIT, Meaning.TROUBLE):
                return meaning
            self._loaded = None
        self._limit(cutoff, limit)
        return self._run(improving=improving)

    def _limit(self, cutoff: float, iterations: int | None) -> None:
        self._highs.setOptionValue("objective_bound", cutoff * MICROSECONDS)
        self._highs.setOptionValue("simplex_iteration_limit", highspy.kHighsIInf if iterations is None else iterations)

    def _run(self, *, improving: bool) -> Meaning:
        meaning = highs.run(self._highs, self.settings.deadline)
        return self._interior_points() if meaning is Meaning.TROUBLE and not improving else meaning

    def _most_broken(self) -> int | None:
        """The row (excess) that the solution violates most, if any: added one by one, each starts from a near basis."""
        if not (waiting := np.array(sorted(self._waiting), dtype=np.int64)).size:
            return None
        activity = np.array(self._highs.getSolution().row_value)[waiting]
        return int(waiting[activity.argmin()]) if activity.min() < -self.settings.broken_row else None

    def _iterations(self, improving: bool) -> int | None:
        """The limit of simplex iterations of the next solve."""
        settings, hard = self.settings, self.settings.relaxation_iterations
        if not improving:
            return hard
        soft = settings.resolving_iterations
        if not self._solved:
            soft = max(settings.improving_iterations, round(self._per_row * self.program.matrix.rows))
        return soft if hard is None else min(hard, soft)

    def _interior_points(self) -> Meaning:
        """Solve by interior points where the simplex method is in numerical trouble."""
        self._highs.clearSolver()
        self._highs.setOptionValue("solver", "ipm")
        meaning = highs.run(self._highs, self.settings.deadline)
        self._highs.setOptionValue("solver", "choose")
        return meaning

    def open_choices(self, result: SolverResult) -> int:
        """How many choices have a fractional pick."""
        tolerance = self.settings.integrality
        return sum(bool(fractional(picks, tolerance).any()) for _, picks in picks_of(self.program, result.values))

    def reduced_costs(self) -> tuple[list[Floats], list[Floats]]:
        """The least additional seconds of a solution that uses a candidate (by choice) or an arc (by edge), over the
        relaxation.
        """
        duals = np.maximum(np.array(self._highs.getSolution().col_dual), 0.0) / MICROSECONDS
        arcs, columns = [], self.program.columns
        for edge, use, flows in zip(self.program.problem.edges, columns.use, columns.flow, strict=True):
            number, others = len(edge.seconds), [flow for flow in flows if flow != use]
            cheapest = [duals[flow : flow + number] for flow in others] or [np.zeros(number)]
            arcs.append(duals[use : use + number] + np.minimum.reduce(cheapest))
        return [picks for _, picks in picks_of(self.program, duals)], arcs

    def useless(self, seconds: float) -> Bools:
        """The columns that, by reduced cost, no solution below so many seconds uses."""
        duals, info = np.array(self._highs.getSolution().col_dual), self._highs.getInfo()
        width = seconds * MICROSECONDS * (1 + self.settings.equal_price) - info.objective_function_value
        return np.asarray(duals > width)

    def link_duals(self) -> list[Floats]:
        """The duals of rows (excess): the seconds saved per second less on each link of each region, from 0 to 1."""
        duals = np.clip(np.array(self._highs.getSolution().row_dual), 0.0, 1.0)
        return [duals[list(region.outlast)] for region in self.program.columns.regions]

    def row_prices(self) -> dict[str, float]:
        """The duals of memory rows: the seconds saved per additional byte, by name."""
        duals = np.maximum(-np.array(self._highs.getSolution().row_dual), 0.0) / MICROSECONDS
        rows = self.program.memory_rows.items()
        return {name: float(duals[self.program.matrix.first_row(block)]) / unit for name, (block, unit) in rows}


def relaxation_of(problem: Problem, settings: SearchSettings) -> Relaxation:
    """The relaxation of a problem without regions; fixed charges are added after solving without them.

    T5 on (2, 4), H100: 1.7 CPU seconds, 15.7 with charges from the start.
    """
    relaxation = Relaxation(IntegerProgram(problem, joint=False), settings)
    relaxation.add_fixed_charges()
    return relaxation


def picks_of(program: IntegerProgram, values: Floats) -> Iterator[tuple[int, Floats]]:
    """The first column and the values of every choice's picks."""
    for first, choice in zip(program.columns.pick, program.problem.choices, strict=True):
        yield first, values[first : first + len(choice.seconds)]


def fractional_recomputation(program: IntegerProgram, result: SolverResult, tolerance: float) -> bool:
    """Whether a part of a member is recomputed, converted again or offloaded."""
    return bool(fractional(result.values[program.members()], tolerance).any())


def fractional(values: Floats, tolerance: float) -> Bools:
    """Where values are not integers."""
    return np.asarray(np.abs(values - np.round(values)) > tolerance)
