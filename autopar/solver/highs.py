"""HiGHS behind one door: a matrix goes in, a status with one of five meanings comes out.

It runs silently, in one thread, from a fixed seed and without a time limit, so that the same program has the same answer on
every machine. Only a user's `Deadline`, or Ctrl-C, ends it earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

import highspy
import numpy as np

from autopar.errors import AutoparError
from autopar.solver.deadline import NEVER, Deadline, interrupts
from autopar.solver.matrix import SparseBlock
from autopar.solver.problem import Floats, Ints

_CHOOSE, _DEVEX = -1, 1  # how the dual simplex method weighs edges
_LOOK_ROWS = 500  # of a program from which on it can be ended: of a smaller one, an iteration takes less than a look at a clock
_STALLED = 100  # looks without an iteration after which a simplex method gets no further; one that does has up to 7
_INTEGER = np.uint8(1)  # highspy.HighsVarType.kInteger, as changeColsIntegrality takes it
# The bit of kPresolveRuleDoubletonEquation. With it HiGHS 1.15 never ends on some programs of a few thousand columns (two
# Evoformer blocks on eight A100-40GB: 0.7 s without), in presolve, where neither node limits nor callbacks reach.
_DOUBLETON_EQUATIONS = 1 << 9


class SolverError(AutoparError):
    """HiGHS stopped without an answer."""


class TimeLimitError(SolverError):
    """The user's time limit is over without a plan; every plan costs at least `bound` seconds."""

    def __init__(self, deadline: Deadline, bound: float = 0.0) -> None:
        self.bound = bound
        super().__init__(
            f"no plan was found in the time_limit of {deadline.seconds:g} s",
            fix="a longer time_limit=, or none; a larger budget=",
        )


class SlowerError(SolverError):
    """It is proven that no solution, in any memory, is faster than one known elsewhere."""


class Meaning(Enum):
    """What a HiGHS status means for the search."""

    SOLVED = auto()  # to the gap that was asked for
    INFEASIBLE = auto()  # there is no solution
    CUT_OFF = auto()  # there is no solution below the cutoff
    LIMIT = auto()  # a limit on iterations or nodes was reached, with or without a solution
    TIME_UP = auto()  # the user's deadline has passed, with or without a solution
    TROUBLE = auto()  # numerical trouble: another algorithm may do
    FAILED = auto()  # a program that HiGHS rejects, or a limit that is never set

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


STATUS: Mapping[str, Meaning] = {  # by name of highspy.HighsModelStatus, of every version
    "kOptimal": Meaning.SOLVED,
    "kModelEmpty": Meaning.SOLVED,
    "kInfeasible": Meaning.INFEASIBLE,
    "kUnboundedOrInfeasible": Meaning.INFEASIBLE,  # no price is negative, so that nothing is unbounded
    "kObjectiveBound": Meaning.CUT_OFF,
    "kIterationLimit": Meaning.LIMIT,  # simplex_iteration_limit
    "kSolutionLimit": Meaning.LIMIT,  # mip_max_nodes
    "kUnknown": Meaning.TROUBLE,
    "kSolveError": Meaning.TROUBLE,
    "kUnbounded": Meaning.FAILED,
    "kNotset": Meaning.TROUBLE,  # where the dual simplex method ends with bad bases only
    "kLoadError": Meaning.FAILED,
    "kModelError": Meaning.FAILED,
    "kPresolveError": Meaning.FAILED,
    "kPostsolveError": Meaning.FAILED,
    "kMemoryLimit": Meaning.FAILED,
    "kTimeLimit": Meaning.FAILED,  # never set: deadlines interrupt
    "kObjectiveTarget": Meaning.FAILED,  # never set
    "kInterrupt": Meaning.TIME_UP,
    "kHighsInterrupt": Meaning.TIME_UP,
}


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SolverResult:
    """Values of all columns; `objective` and the proven `bound` are in seconds (in the program's unit when it minimises
    memory). For a relaxation, `basis` is a warm start for similar programs."""

    values: Floats
    objective: float
    bound: float
    basis: highspy.HighsBasis | None = None


def load(block: SparseBlock, *, devex: bool = False, presolve: bool = True) -> highspy.Highs:
    """A HiGHS object that holds a program: columns from 0 up, rows between their bounds. Edges are weighed by the steepest one,
    or by Devex; without `presolve` the program is solved as it is."""
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(block.cost), len(block.lower)
    lp.col_cost_ = block.cost
    lp.col_lower_, lp.col_upper_ = np.zeros(len(block.cost)), np.full(len(block.cost), highspy.kHighsInf)
    lp.row_lower_, lp.row_upper_ = block.lower, block.upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = block.start, block.column, block.value
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("simplex_dual_edge_weight_strategy", _DEVEX if devex else _CHOOSE)
    if not presolve:
        solver.setOptionValue("presolve", "off")
    solver.passModel(lp)
    return solver


def append(solver: highspy.Highs, block: SparseBlock) -> None:
    """Add columns and rows to a program; its last basis is kept for warm starts."""
    number, none = len(block.cost), np.zeros(0, np.int32)
    solver.addCols(number, block.cost, np.zeros(number), np.full(number, highspy.kHighsInf), 0, none, none, np.zeros(0))
    solver.addRows(len(block.lower), block.lower, block.upper, len(block.value), block.start[:-1], block.column, block.value)


def require_integers(solver: highspy.Highs, columns: Ints, most: float) -> None:
    """Restrict these columns to integers up to `most`; HiGHS branches from now on.

    HiGHS finds few of the bounds that rows imply: with those of binary columns stated, it has cliques and fixes more at the
    root (ViT-L on (8, 8), 4,659 columns: 1.8 CPU seconds, 4.6 without).
    """
    solver.changeColsBounds(len(columns), columns.astype(np.int32), np.zeros(len(columns)), np.full(len(columns), most))
    solver.changeColsIntegrality(len(columns), columns.astype(np.int32), np.full(len(columns), _INTEGER))
    solver.setOptionValue("presolve_rule_off", _DOUBLETON_EQUATIONS)


def trust_start(solver: highspy.Highs) -> None:
    """Turn off sub-MIP heuristics, since a solution is known from a dive or a smaller search, and root restarts, since the
    search ends soon.

    ViT-L on (8, 8): 0.7 CPU seconds, 1.8 with them, and 1.3 with restarts.
    """
    for heuristic in ("rins", "rens", "root_reduced_cost"):
        solver.setOptionValue(f"mip_heuristic_run_{heuristic}", False)
    solver.setOptionValue("mip_allow_restart", False)


def run(solver: highspy.Highs, deadline: Deadline = NEVER) -> Meaning:
    """Solve, and return how that ended.

    It is in trouble, too, when the simplex method takes back one bad basis after another. That is no iteration, so that no
    limit ends it: GPT-2 on (2, 2) within 700 MB spent 370 CPU seconds on a program of 13,329 rows.

    Raises what Ctrl-C raises, normally KeyboardInterrupt, if it is pressed meanwhile.
    """
    if deadline.passed:
        return Meaning.TIME_UP
    with _held_interrupts() as pressed:
        progress = _Progress()

        def look(event: highspy.highs.HighsCallbackEvent) -> None:
            event.interrupt(bool(pressed) or deadline.passed)

        def look_at_simplex(event: highspy.highs.HighsCallbackEvent) -> None:
            event.interrupt(progress.stalled(event.data_out.simplex_iteration_count) or bool(pressed) or deadline.passed)

        asked = ((solver.cbSimplexInterrupt, look_at_simplex), (solver.cbIpmInterrupt, look), (solver.cbMipInterrupt, look))
        for callback, answer in asked if solver.getNumRow() >= _LOOK_ROWS else ():
            callback.subscribe(answer)
        try:
            solver.run()
        finally:
            for callback, answer in asked:
                callback.unsubscribe(answer)
    return Meaning.TROUBLE if progress.looks > _STALLED else STATUS[solver.getModelStatus().name]


class _Progress:
    """Looks at a simplex method since its last iteration."""

    def __init__(self) -> None:
        self.iterations, self.looks = -1, 0

    def stalled(self, iterations: int) -> bool:
        """Whether it makes no progress, after another look at its iterations."""
        self.looks = self.looks + 1 if iterations == self.iterations else 1
        self.iterations = iterations
        return self.looks > _STALLED


def plainly_infeasible(solver: highspy.Highs) -> bool:
    """Whether presolve alone proves a program infeasible; its last basis is kept for warm starts.

    It takes moments, whereas the simplex method, which does not presolve a program with a basis, may take minutes: 0.04 and 25
    CPU seconds for 18,799 rows of a stage of Llama-3 70B, 0.1 and more than 100 for 57,928 of one of GPT-3 175B.
    """
    solver.presolve()
    return solver.getModelPresolveStatus() == highspy.HighsPresolveStatus.kInfeasible


@contextmanager
def _held_interrupts() -> Iterator[list[int]]:
    """Hold Ctrl-C back until the end, since no exception may pass through HiGHS; the yielded value tells whether it was
    pressed.
    """
    pressed: list[int] = []
    with interrupts(lambda usual: pressed.append(1)) as usual:
        yield pressed
    if pressed:
        usual()


def run_cold(solver: highspy.Highs, deadline: Deadline = NEVER, *, steepest: int, devex: int) -> None:
    """Solve a program without a basis: by steepest edge for so many iterations, then by Devex, then by steepest edge to the
    end.

    Steepest edge takes fewer iterations, whose cost grows with the program; Devex's hardly does. Which one is better shows only
    when tried, and each starts afresh: HiGHS keeps no basis of a presolved program that it leaves.
    """
    for weights, iterations in ((_CHOOSE, steepest), (_DEVEX, devex), (_CHOOSE, highspy.kHighsIInf)):
        solver.setOptionValue("simplex_dual_edge_weight_strategy", weights)
        solver.setOptionValue("simplex_iteration_limit", iterations)
        if run(solver, deadline) is not Meaning.LIMIT:
            break
    solver.setOptionValue("simplex_dual_edge_weight_strategy", _CHOOSE)


def values(solver: highspy.Highs) -> Floats:
    """The values of all columns."""
    return np.array(solver.getSolution().col_value)


def duals(solver: highspy.Highs) -> Floats:
    """The dual values of all rows."""
    return np.array(solver.getSolution().row_dual)
