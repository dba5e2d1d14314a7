"""The search for an integer solution, in HiGHS: relax, bound, branch.

relax     the linear relaxation
dive      fix what the relaxation made nearly whole, and relax again
settle    branch on what the relaxation left fractional, the rest fixed: often within the gap already
branch    the whole integer program, from the settled solution on
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt

from autopar.errors import AutoparError
from autopar.solver.integer_program import MICROSECONDS, IntegerProgram, SparseBlock
from autopar.solver.problem import Floats, Ints, Row

SURE = 0.9  # of a choice, from which on diving makes it
LARGE = 100_000  # rows from which on the last basis helps more than presolving
BACK = 2  # steps that a dive takes back
LONG = 10_000  # iterations of the simplex method after which a dive is given up
FRESH, AGAIN = 5_000, 1_000  # the same of a relaxation that may only better what there is: the first with new rows, and later
PART = 1 / 5  # of the rows of a program, if that is more
INTEGRAL = 1e-6  # how far from 0 or 1 a pick may be
NOTHING = (
    highspy.HighsModelStatus.kInfeasible,
    highspy.HighsModelStatus.kObjectiveBound,
    highspy.HighsModelStatus.kIterationLimit,
)  # of a relaxation: there is no solution, or none that counts
TROUBLE = (highspy.HighsModelStatus.kUnknown, highspy.HighsModelStatus.kSolveError)
INTEGER = np.uint8(1)  # highspy.HighsVarType.kInteger


class SolverError(AutoparError):
    """HiGHS stopped without an answer."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SolverResult:
    """Values of all columns; `objective` and the proven `bound` are in seconds (in the model's unit when it minimises
    memory)."""

    values: Floats
    objective: float
    bound: float


class Search:
    """One model in HiGHS. `time_limit` (seconds) and `gap` (relative) end the branching, `patience` (seconds) either.

    `quick`: for a first look, after which there are others.
    """

    def __init__(
        self, model: IntegerProgram, *, time_limit: float, gap: float, patience: float = math.inf, quick: bool = False
    ) -> None:
        self.model, self.time_limit, self.gap, self.patience = model, min(time_limit, patience), gap, patience
        self.treated, self._part = False, 0.0 if quick else PART
        self._solved, self._ended = False, True  # with these rows; and whether to the end
        self._load()

    def levy(self) -> None:
        """Add the tolls to a program without them. From its optimum the one with tolls is near; from nothing it is far."""
        self._relaxation.run()
        columns, entries = self.model.columns.count, self.model.rows
        self.model.levy()
        self._add(columns, entries)

    def bound(self, rows: Iterable[Row]) -> None:
        """Add rows to the program; with the first of them, what may be made again.

        With these so much is new, as with any in a program of some size, that presolving helps more than the last basis; in one
        that is large before there are any it does not. Where a row is only tightened the last basis is near.
        """
        columns, entries, first = self.model.columns.count, self.model.rows, not self.treated
        if first:
            self.treated = True
            self.model.treat()
        for row in rows:
            tightened = self.model.tighten(row)
            if tightened is None:
                self.model.bound(row)
            else:
                self._relaxation.changeRowBounds(tightened[0], -highspy.kHighsInf, tightened[1])
        if self.model.rows > entries:
            self._solved = False
            if self.model.rows < LARGE if first else self.model.rows > LARGE / 5:
                self._load()
            else:
                self._add(columns, entries)

    def _load(self) -> None:
        self._relaxation = load(self.model.part())
        self._relaxation.setOptionValue("time_limit", self.patience)

    def _add(self, columns: int, entries: int) -> None:
        """Add to the relaxation what the model has got since it had so many columns and rows."""
        part = self.model.part(columns, entries)
        none = np.zeros(0, np.int32)
        self._relaxation.addCols(
            len(part.cost),
            part.cost,
            np.zeros(len(part.cost)),
            np.full(len(part.cost), highspy.kHighsInf),
            0,
            none,
            none,
            np.zeros(0),
        )
        self._relaxation.addRows(
            len(part.lower), part.lower, part.upper, len(part.value), part.start[:-1], part.column, part.value
        )

    def relax(self, cutoff: float = math.inf, *, soon: bool = False) -> SolverResult | None:
        """The optimum of the linear relaxation; None if there is none below `cutoff` (in the unit of an objective).

        With a finite `cutoff` there is something already: it is None too if finding less takes long; and so it is with `soon`.
        """
        soon = soon or cutoff < math.inf
        self._relaxation.setOptionValue("objective_bound", cutoff * MICROSECONDS)
        limit = AGAIN if self._solved else max(FRESH, round(self._part * self.model.rows))
        self._relaxation.setOptionValue("simplex_iteration_limit", limit if soon else highspy.kHighsIInf)
        self._relaxation.run()
        self._solved = True
        status = self._relaxation.getModelStatus()
        self._ended = status != highspy.HighsModelStatus.kIterationLimit and (status not in TROUBLE or not soon)
        if status in TROUBLE and not soon:
            self._relaxation.clearSolver()  # the simplex method is in numerical trouble: interior points are not
            self._relaxation.setOptionValue("solver", "ipm")
            self._relaxation.run()
            self._relaxation.setOptionValue("solver", "choose")
            status = self._relaxation.getModelStatus()
        if status in NOTHING or (status in TROUBLE and soon):
            return None
        if status == highspy.HighsModelStatus.kTimeLimit:
            raise SolverError(f"no plan was found in {self.patience:.0f} s")
        if status != highspy.HighsModelStatus.kOptimal:
            raise SolverError(f"the relaxation was not solved: {self._relaxation.modelStatusToString(status)}")
        objective = self._relaxation.getInfo().objective_function_value / MICROSECONDS
        return (
            None
            if objective >= cutoff
            else SolverResult(values=_values(self._relaxation), objective=objective, bound=objective)
        )

    def proven(self, relaxed: SolverResult | None, cutoff: float) -> float:
        """What every solution costs at least, by what the last relaxation found below a cutoff."""
        return relaxed.bound if relaxed is not None else cutoff if self._ended else 0.0

    def reduced(self) -> tuple[list[Floats], list[Floats]]:
        """By how much a solution that takes it is dearer than the relaxation at least: each candidate, each arc; in seconds."""
        duals = np.maximum(np.array(self._relaxation.getSolution().col_dual), 0.0) / MICROSECONDS
        arcs = []
        for edge, use, flows in zip(self.model.problem.edges, self.model.columns.use, self.model.flows, strict=True):
            number, others = len(edge.seconds), [flow for flow in flows if flow != use]
            ways = [duals[flow : flow + number] for flow in others] or [np.zeros(number)]
            arcs.append(duals[use : use + number] + np.minimum.reduce(ways))
        return [picks for _, picks in self._picks(duals)], arcs

    def fractional(self, found: SolverResult) -> int:
        """How many choices are not made wholly."""
        return sum(bool(_fractional(picks).any()) for _, picks in self._picks(found.values))

    def partial(self, found: SolverResult) -> bool:
        """Whether something is made again for a part of a member."""
        problem, columns = self.model.problem, self.model.columns
        firsts = [(first, len(problem.choices[choice].seconds)) for choice, first in columns.rerun.items()]
        firsts += [(first, len(problem.edges[edge].seconds)) for edge, first in columns.resent.items()]
        firsts += [(first, len(nodes)) for first, nodes in columns.back.values()]
        return any(bool(_fractional(found.values[first : first + number]).any()) for first, number in firsts)

    def settle(self, relaxed: SolverResult) -> SolverResult | None:
        """The best solution in which every choice that the relaxation made wholly stays; None if there is none."""
        solver = load(self.model.part())
        fixed = [
            first + np.flatnonzero(picks < 0.5) for first, picks in self._picks(relaxed.values) if not _fractional(picks).any()
        ]
        columns = np.concatenate([np.zeros(0, np.int64), *fixed]).astype(np.int32)
        zeros = np.zeros(len(columns))
        solver.changeColsBounds(len(columns), columns, zeros, zeros)
        found = self._branched(solver, uses=True)
        return None if found is None else SolverResult(values=found.values, objective=found.objective, bound=relaxed.bound)

    def dive(self, relaxed: SolverResult) -> SolverResult | None:
        """A solution near the relaxation: what is nearly made is fixed and the rest relaxed again, until all is.

        A step that leads nowhere is taken back, and only the surest pick made. None if that leads nowhere either, or where too
        many steps were taken back.
        """
        solver, values = load(self.model.part()), relaxed.values
        solver.setOptionValue("time_limit", self.time_limit)
        made: set[int] = set()
        back, left = 0, LONG
        while open_choices := [(first, picks) for first, picks in self._picks(values) if first not in made]:
            surest = max(float(picks.max()) for _, picks in open_choices)
            step = [(first, picks) for first, picks in open_choices if picks.max() >= min(surest, SURE)]
            while not _without(solver, [first + _others(picks) for first, picks in step], left):
                back += 1
                if back > BACK or len(step) == 1:
                    return None
                step = [max(step, key=lambda entry: float(entry[1].max()))]
            made |= {first for first, _ in step}
            values, left = _values(solver), left - solver.getInfo().simplex_iteration_count
        info = solver.getInfo()
        objective = info.objective_function_value / MICROSECONDS if made else relaxed.objective
        return SolverResult(values=values, objective=objective, bound=relaxed.bound)

    def anything(self, relaxed: SolverResult, patience: float) -> SolverResult | None:
        """What `patience` seconds of branching find; None if that is nothing."""
        try:
            found = self.branch(None, uses=True, patience=patience)
        except SolverError:
            return None
        return None if found is None else SolverResult(values=found.values, objective=found.objective, bound=relaxed.bound)

    def branch(self, start: SolverResult | None, *, uses: bool, patience: float = math.inf) -> SolverResult | None:
        """The optimum of the integer program within the gap; None if it is infeasible.

        `uses`: the use of every arc is whole, too. Without rows that count uses a route costs least when it is whole, so that
        only wires with several consumers need it.
        """
        solver = load(self.model.part())
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = start.values.tolist()
            solver.setSolution(solution)
        return self._branched(solver, uses=uses, patience=patience)

    def _branched(self, solver: highspy.Highs, *, uses: bool, patience: float = math.inf) -> SolverResult | None:
        whole = np.concatenate(self.model.integer)
        if uses:
            for first, edge in zip(self.model.columns.use, self.model.problem.edges, strict=True):
                whole[first : first + len(edge.seconds)] = True
        integer = np.flatnonzero(whole).astype(np.int32)
        solver.changeColsIntegrality(len(integer), integer, np.full(len(integer), INTEGER))
        solver.setOptionValue("time_limit", min(self.time_limit, patience))
        solver.setOptionValue("mip_rel_gap", self.gap)
        solver.run()
        if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return None
        info = solver.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            raise SolverError(f"no plan was found in {self.time_limit:g} s", fix="a coarser mesh, or fewer constraints")
        return SolverResult(
            values=_values(solver),
            objective=info.objective_function_value / MICROSECONDS,
            bound=info.mip_dual_bound / MICROSECONDS,
        )

    def _picks(self, values: Floats) -> Iterable[tuple[int, Floats]]:
        """The first column and the values of every choice's picks."""
        for first, choice in zip(self.model.columns.pick, self.model.problem.choices, strict=True):
            yield first, values[first : first + len(choice.seconds)]


def load(part: SparseBlock) -> highspy.Highs:
    """A HiGHS object with a whole program in it, silent and repeatable."""
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(part.cost), len(part.lower)
    lp.col_cost_ = part.cost
    lp.col_lower_, lp.col_upper_ = np.zeros(len(part.cost)), np.full(len(part.cost), highspy.kHighsInf)
    lp.row_lower_, lp.row_upper_ = part.lower, part.upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = part.start, part.column, part.value
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("threads", 1)
    solver.passModel(lp)
    return solver


def _others(picks: Floats) -> Ints:
    """Where the picks of a choice stand, except the surest."""
    return np.flatnonzero(np.arange(len(picks)) != picks.argmax())


def _without(solver: highspy.Highs, columns: list[Ints], iterations: int) -> bool:
    """Solve with columns fixed to 0; False, with them as they were, if that has no solution, or takes more iterations."""
    fixed = np.concatenate(columns).astype(np.int32)
    zeros = np.zeros(len(fixed))
    *_, upper, _ = solver.getCols(len(fixed), fixed)
    solver.changeColsBounds(len(fixed), fixed, zeros, zeros)
    solver.setOptionValue("simplex_iteration_limit", max(0, iterations))
    solver.run()
    if solver.getModelStatus() == highspy.HighsModelStatus.kOptimal:
        return True
    solver.changeColsBounds(len(fixed), fixed, zeros, np.array(upper))
    return False


def _values(solver: highspy.Highs) -> Floats:
    return np.array(solver.getSolution().col_value)


def _fractional(picks: Floats) -> npt.NDArray[np.bool_]:
    return np.asarray(np.abs(picks - np.round(picks)) > INTEGRAL)
