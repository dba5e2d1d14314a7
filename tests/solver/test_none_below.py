"""Whether anything that satisfies a row is cheaper than the known solution: against enumeration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autopar.solver.lazy_rows import Excess, Judge
from autopar.solver.problem import Problem, Row, Solution, row_bytes
from autopar.solver.settings import EXACT
from autopar.solver.solve import Solver, solve
from tests.solver.random_problems import enumerate_all, random_problem, random_row, with_regions

SEEDS = range(60)


def judged(problem: Problem, row: Row) -> Judge:
    """What says by how much a solution breaks a row."""

    def judge(solution: Solution) -> Iterator[Excess]:
        excess = row_bytes(problem, row, solution.picks, solution.arcs, solution.recompute) - row.limit
        if excess > 1e-6 * row.limit:
            yield Excess(row=row, bytes=excess)

    return judge


def binding(problem: Problem, seed: int) -> Row:
    """A row that the cheapest solution breaks."""
    row = replace(random_row(problem, seed), constant=0.0)
    free = solve(problem, settings=EXACT).solution
    assert free is not None
    return replace(row, limit=0.75 * row_bytes(problem, row, free.picks, free.arcs, free.recompute))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_said_to_be_slower_than_a_price_above_the_optimum(seed: int, *, regions: bool) -> None:
    problem = with_regions(random_problem(seed), seed) if regions else random_problem(seed)
    row = binding(problem, seed)
    best = enumerate_all(problem, (row,))
    if best is not None:
        assert not Solver(problem, EXACT).none_below(best * (1 + 1e-6) + 1e-9, judged(problem, row))


def test_a_row_that_binds_proves_more_than_the_bound_without_it() -> None:
    proven = 0
    for seed in SEEDS:
        problem, solver = random_problem(seed), Solver(random_problem(seed), EXACT)
        row = binding(problem, seed)
        best = enumerate_all(problem, (row,))
        if best is None or solver.bound >= (close := 0.98 * best):
            continue
        proven += solver.none_below(close, judged(problem, row))
    assert proven >= 5


def test_without_searching_everywhere_only_limits_that_no_solution_meets_have_an_infinite_bound() -> None:
    proven = 0
    for seed in SEEDS:
        problem = random_problem(seed)
        row = replace(binding(problem, seed), limit=0.0 if seed % 2 else binding(problem, seed).limit / 2)
        found = Solver(problem, EXACT).solve(judged(problem, row), everywhere=False)
        best = enumerate_all(problem, (row,))
        if found.bound == math.inf:
            assert best is None
        proven += found.bound == math.inf
        assert found.solution is None or best is not None
    assert proven >= 10
