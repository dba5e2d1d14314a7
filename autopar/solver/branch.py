"""Branch and bound, of the whole program or of a neighbourhood of what is known: limited in nodes, and in seconds
only where the user asks for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import highspy
import numpy as np

from autopar.solver import highs
from autopar.solver.highs import Meaning, SolverError, SolverResult, TimeLimitError
from autopar.solver.integer_program import IntegerProgram
from autopar.solver.matrix import MICROSECONDS
from autopar.solver.problem import Bools, Ints
from autopar.solver.relaxation import fractional, picks_of
from autopar.solver.settings import SearchSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Branched:
    """The best solution found by branching; without one, `complete` says that none exists."""

    result: SolverResult | None
    complete: bool


def branch(
    program: IntegerProgram, settings: SearchSettings, *, integer_arcs: bool, start: SolverResult | None = None
) -> SolverResult | None:
    """The best solution of the whole program; None if it is infeasible.

    Args:
        program: the program, solved to the relative `settings.gap`.
        settings: `branch_nodes` and the gap.
        integer_arcs: whether each use of an arc is an integer too. Without rows that count uses, a whole route is cheapest, so
            only edges with several consumers need it.
        start: a solution to start from.

    Raises SolverError if no solution is found in `settings.branch_nodes` nodes, TimeLimitError if none by the deadline.
    """
    found = _branch(program, settings, settings.branch_nodes, program.integers(arcs=integer_arcs), start=start)
    if found.result is None and not found.complete:
        if settings.deadline.passed:
            raise TimeLimitError(settings.deadline)
        fix = "a coarser mesh, or fewer constraints"
        raise SolverError(f"no plan was found in {settings.branch_nodes} branch-and-bound nodes", fix=fix)
    return found.result


def branch_open_choices(program: IntegerProgram, relaxed: SolverResult, settings: SearchSettings) -> SolverResult | None:
    """The best solution that keeps every integral choice of the relaxation; None if none is found.

    Its bound is the relaxation's.
    """
    zeros = [
        first + np.flatnonzero(picks < 0.5)
        for first, picks in picks_of(program, relaxed.values)
        if not fractional(picks, settings.integrality).any()
    ]
    found = _branch(program, settings, settings.branch_nodes, program.integers(arcs=True), zeros=zeros).result
    return None if found is None else replace(found, bound=relaxed.bound)


def rens(
    program: IntegerProgram,
    relaxed: SolverResult,
    settings: SearchSettings,
    known: SolverResult | None = None,
    *,
    whole: bool = False,
    useless: Bools | None = None,
) -> SolverResult | None:
    """The best solution within the candidates and arcs that the relaxation, or a `known` solution, uses.

    Relaxation enforced neighbourhood search: T. Berthold, "RENS: the optimal rounding", Mathematical Programming Computation
    6 (2014). With `whole` all columns are searched, which raises the bound too, except `useless` ones: every solution with one
    of these costs more than the known one. None if no solution is found in `settings.rens_nodes` nodes.
    """
    unused = (relaxed.values <= settings.integrality) & (not whole)
    if known is not None:
        unused &= known.values <= settings.integrality
    if useless is not None:
        unused |= useless
    integers = program.integers(arcs=True)
    zeros = [np.flatnonzero(unused & integers)]
    closer = replace(settings, gap=min(settings.gap, settings.rens_gap))
    found = _branch(program, closer, settings.rens_nodes, integers, zeros=zeros, start=known).result
    return found and replace(found, bound=max(relaxed.bound, found.bound) if whole else relaxed.bound)


def branch_members(program: IntegerProgram, settings: SearchSettings) -> SolverResult | None:
    """The best integer numbers of members that recompute, convert again or offload, in a program of one candidate per choice.

    None if no solution is found in `settings.member_nodes` nodes.
    """
    return _branch(program, settings, settings.member_nodes, program.members(), most=math.inf).result


def _branch(
    program: IntegerProgram,
    settings: SearchSettings,
    nodes: int,
    integers: Bools,
    *,
    zeros: Sequence[Ints] = (),
    start: SolverResult | None = None,
    most: float = 1.0,
) -> Branched:
    """Branch on the columns `integers`, at most `most`, with the columns `zeros` fixed to 0."""
    solver = highs.load(program.block())
    highs.require_integers(solver, np.flatnonzero(integers), most)
    fixed = np.concatenate([np.zeros(0, np.int64), *zeros]).astype(np.int32)
    solver.changeColsBounds(len(fixed), fixed, np.zeros(len(fixed)), np.zeros(len(fixed)))
    if start is not None:
        solution = highspy.HighsSolution()
        solution.col_value = start.values.tolist()
        solver.setSolution(solution)
        highs.trust_start(solver)
    solver.setOptionValue("mip_max_nodes", nodes)
    solver.setOptionValue("mip_rel_gap", settings.gap)
    meaning = highs.run(solver, settings.deadline)
    if meaning is Meaning.INFEASIBLE:
        return Branched(result=None, complete=True)
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        if meaning not in (Meaning.LIMIT, Meaning.TIME_UP):
            raise SolverError(f"the integer program was not solved: {meaning}")
        return Branched(result=None, complete=False)
    objective, bound = info.objective_function_value / MICROSECONDS, info.mip_dual_bound / MICROSECONDS
    result = SolverResult(values=highs.values(solver), objective=objective, bound=bound)
    return Branched(result=result, complete=meaning is Meaning.SOLVED)
