"""A series of falling limits, solved by one warm solver, against enumeration and against a fresh solver for each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import highspy
import pytest

from autopar.solver import highs
from autopar.solver.deadline import Deadline
from autopar.solver.highs import Meaning
from autopar.solver.lazy_rows import Excess
from autopar.solver.problem import Problem, Row, Solution, row_bytes
from autopar.solver.search import Outcome
from autopar.solver.settings import DEFAULTS, EXACT, SearchSettings
from autopar.solver.solve import Solver, solve
from tests.solver.random_problems import enumerate_all, random_problem, random_row
from tests.solver.test_recompute import CASES, cheapest, tight_row

SHARES = (0.9, 0.75, 0.6, 0.45)  # of what the cheapest solution takes


def used(problem: Problem, row: Row, solution: Solution) -> float:
    """The left side of a row for a solution."""
    return row_bytes(problem, row, solution.picks, solution.arcs, solution.recompute)


def answer(solver: Solver, problem: Problem, row: Row, known: bool) -> Outcome:
    """What a solver finds within a row, which a judge brings unless it is known."""

    def judge(solution: Solution) -> Iterator[Excess]:
        excess = used(problem, row, solution) - row.limit
        if excess > 1e-6 * row.limit:
            yield Excess(row=row, bytes=excess)

    return solver.solve(judge, [row] if known else [])


def falling(problem: Problem, row: Row) -> list[Row]:
    """The row with limits that bind, falling."""
    free = solve(problem, settings=EXACT).solution
    assert free is not None
    return [replace(row, limit=share * used(problem, row, free), constant=0.0) for share in SHARES]


FAR = replace(EXACT, warm_start_rows=0, presolve_again_rows=0, warm_iterations=1)  # presolved again after one iteration


@pytest.mark.one_in(5)
@pytest.mark.parametrize("settings", [EXACT, FAR], ids=["near", "far"])
@pytest.mark.parametrize("seed", range(40))
def test_a_warm_solver_finds_the_optimum_within_every_limit(seed: int, settings: SearchSettings) -> None:
    problem = random_problem(seed)
    solver = Solver(problem, settings)
    for place, row in enumerate(falling(problem, random_row(problem, seed))):
        best, found = enumerate_all(problem, (row,)), answer(solver, problem, row, known=place > 0)
        assert (found.solution is None) == (best is None)
        if best is not None and found.solution is not None:
            assert found.solution.seconds == pytest.approx(best, rel=1e-6, abs=1e-9)
            assert found.bound <= best * (1 + 1e-6) + 1e-9
            assert used(problem, row, found.solution) <= row.limit * (1 + 1e-6)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("make, seed", CASES[::3])
def test_bounds_hold_where_members_are_recomputed_or_offloaded_and_answers_keep_to_their_limits(
    make: Callable[[int], Problem], seed: int
) -> None:
    problem = make(seed)
    solver = Solver(problem, EXACT)
    for place, row in enumerate(falling(problem, tight_row(problem, seed))[::2]):
        found = answer(solver, problem, row, known=place > 0)
        best = cheapest(problem, row)
        if best is not None:
            assert found.bound <= best * (1 + 1e-6) + 1e-9
        if found.solution is not None:
            assert used(problem, row, found.solution) <= row.limit * (1 + 1e-6)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("make, seed", CASES)
def test_less_memory_never_makes_a_faster_solution(make: Callable[[int], Problem], seed: int) -> None:
    problem = make(seed)
    rows = falling(problem, tight_row(problem, seed))
    found = [answer(Solver(problem, DEFAULTS), problem, row, known=False).seconds for row in rows]
    assert all(after >= before * (1 - DEFAULTS.gap) for before, after in itertools.pairwise(found))


def test_where_the_last_basis_is_bad_the_program_is_presolved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run, limits = highs.run, list[int]()

    def bad(solver: highspy.Highs, deadline: Deadline) -> Meaning:
        limits.append(solver.getOptionValue("simplex_iteration_limit")[1])
        return Meaning.TROUBLE if limits[-1] == FAR.warm_iterations else run(solver, deadline)

    monkeypatch.setattr(highs, "run", bad)
    for seed in range(10):
        problem = random_problem(seed)
        solver = Solver(problem, FAR)
        for place, row in enumerate(falling(problem, random_row(problem, seed))):
            best, found = enumerate_all(problem, (row,)), answer(solver, problem, row, known=place > 0)
            assert found.seconds == pytest.approx(math.inf if best is None else best, rel=1e-6, abs=1e-9)
    assert limits.count(FAR.warm_iterations) > 5
