"""The ladder of memory prices against enumeration: its bound is below every solution, its answers keep to their limits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.solver.price_ladder import PriceLadder
from autopar.solver.problem import Problem, Row, Solution, row_bytes
from autopar.solver.settings import EXACT, SearchSettings
from autopar.solver.solve import solve
from tests.solver.random_problems import enumerate_all, random_problem, random_row
from tests.solver.test_recompute import CASES, cheapest, tight_row

SHARES = (0.9, 0.75, 0.6, 0.45)  # of what the cheapest solution takes
LADDER = replace(EXACT, ladder_gap=1e-2)


def used(problem: Problem, row: Row, solution: Solution) -> float:
    """The left side of a row for a solution."""
    return row_bytes(problem, row, solution.picks, solution.arcs, solution.recompute)


def ladder_of(problem: Problem, row: Row, settings: SearchSettings = LADDER) -> PriceLadder:
    """A ladder of a problem with one moment."""
    return PriceLadder(problem, lambda solution: (used(problem, row, solution), [row]), settings)


def answer(problem: Problem, row: Row, limit: float, ladder: PriceLadder) -> Solution | None:
    """The solution within a limit that starts from the ladder; a row that is broken is tightened, as budgets are."""
    constants: list[float] = []

    def judge(solution: Solution, final: bool) -> list[Row]:
        excess = used(problem, row, solution) - limit
        if excess <= 1e-9 * limit or (constants and not final):
            return []
        constants.append(max(2 * constants[-1], excess / 8) if constants else 0.0)
        return [replace(row, limit=limit, constant=constants[-1])]

    return solve(problem, judge, ladder=ladder, settings=LADDER).solution


def limits(problem: Problem, row: Row) -> list[float]:
    """Limits that bind, falling."""
    free = solve(problem, settings=EXACT).solution
    assert free is not None
    return [share * used(problem, row, free) for share in SHARES]


@pytest.mark.parametrize("seed", range(24))
def test_the_optimum_within_a_limit_lies_between_the_bound_of_the_ladder_and_its_answer(seed: int) -> None:
    problem = random_problem(seed)
    row = replace(random_row(problem, seed), constant=0.0)
    ladder = ladder_of(problem, row)
    for limit in limits(problem, row):
        best, found = enumerate_all(problem, (replace(row, limit=limit),)), answer(problem, row, limit, ladder)
        if best is None:
            assert found is None
            continue
        assert ladder.bound(limit) <= best * (1 + 1e-6) + 1e-9
        if found is not None:
            assert used(problem, row, found) <= limit * (1 + 1e-6)
            assert found.bound <= best * (1 + 1e-6) + 1e-9
            assert found.seconds >= best * (1 - 1e-6) - 1e-9


@pytest.mark.parametrize("make, seed", CASES)
def test_the_bound_of_the_ladder_holds_where_members_are_recomputed_or_offloaded(
    make: Callable[[int], Problem], seed: int
) -> None:
    problem = make(seed)
    row = tight_row(problem, seed)
    limit = random.Random(seed).choice(limits(problem, row))
    ladder = ladder_of(problem, row)
    best, found = cheapest(problem, replace(row, limit=limit)), answer(problem, row, limit, ladder)
    if best is not None:
        assert ladder.bound(limit) <= best * (1 + 1e-6) + 1e-9
    if found is not None:
        assert used(problem, row, found) <= limit * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_the_bound_does_not_fall_when_the_limit_does(seed: int) -> None:
    problem = random_problem(seed)
    row = replace(random_row(problem, seed), constant=0.0)
    ladder = ladder_of(problem, row)
    falling = limits(problem, row)
    for limit in falling:
        ladder.bracket(limit, [ladder.presolved.row(replace(row, limit=limit))])
    bounds = [ladder.bound(limit) for limit in falling]
    assert bounds == sorted(bounds)


def test_rungs_on_both_sides_of_a_limit_take_more_and_less_than_it() -> None:
    bracketed = 0
    for make, seed in CASES:
        problem = make(seed)
        row = tight_row(problem, seed)
        ladder = ladder_of(problem, row)
        limit = limits(problem, row)[1]
        bracket = ladder.bracket(limit, [ladder.presolved.row(replace(row, limit=limit))])
        if bracket is not None and bracket[0] is not bracket[1]:
            low, high = bracket
            assert high.peak <= limit < low.peak
            assert low.seconds <= high.seconds + 1e-9
            assert low.price <= high.price
            bracketed += 1
    assert bracketed > len(CASES) / 2
