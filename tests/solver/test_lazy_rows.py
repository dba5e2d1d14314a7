"""Lazy rows: when a solution holds more than a row counts, the row is tightened from then on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from autopar.solver.lazy_rows import Excess, LazyRows
from autopar.solver.problem import Solution, row_bytes
from autopar.solver.reduced_cost_fixing import whole_problem
from autopar.solver.settings import EXACT
from autopar.solver.solve import solve
from tests.solver.random_problems import bytes_of, enumerate_all, random_problem, random_row

UNSEEN = 5.0  # bytes that no row counts


@pytest.mark.parametrize("seed", range(40))
def test_a_tightened_row_counts_a_solution_in_full(seed: int) -> None:
    problem, row = random_problem(seed), replace(random_row(random_problem(seed), seed), constant=0.0)
    free = solve(problem, settings=EXACT).solution
    assert free is not None
    holds = UNSEEN + bytes_of(problem, row, free.picks, free.arcs)
    row = replace(row, limit=holds - 1.0)
    rows = LazyRows(lambda solution: (), lambda row: row, [row], EXACT)
    (tight,) = rows.tightened(whole_problem(problem), free, [Excess(row=row, bytes=1.0)])
    assert row_bytes(problem, tight, free.picks, free.arcs) == pytest.approx(holds)
    (tighter,) = rows.tightened(whole_problem(problem), free, [Excess(row=row, bytes=1.0)])
    assert tighter.constant > tight.constant


@pytest.mark.parametrize("seed", range(40))
def test_where_a_row_misses_the_same_of_all_solutions_the_best_that_fits_is_found(seed: int) -> None:
    problem = random_problem(seed)
    row = replace(random_row(problem, seed), constant=0.0)
    unseen = 0.25 * row.limit

    def judge(solution: Solution) -> Iterator[Excess]:
        more = unseen + bytes_of(problem, row, solution.picks, solution.arcs) - row.limit
        if more > 1e-9:
            yield Excess(row=row, bytes=more)

    found = solve(problem, judge, settings=EXACT).solution
    best = enumerate_all(problem, (replace(row, constant=unseen),))
    assert (found and found.seconds) == (best and pytest.approx(best))
