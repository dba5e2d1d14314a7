"""Integer member counts against enumeration: no others are cheaper under the same picks and routes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.solver.problem import Problem, Solution, price
from autopar.solver.settings import DEFAULTS
from autopar.solver.solve import solve
from tests.solver.test_recompute import CASES, all_again, members_bytes, straight, tight_row


def found_of(make: Callable[[int], Problem], seed: int) -> tuple[Problem, Solution | None]:
    """A random problem and its solution within a row."""
    problem = make(seed)
    return problem, solve(problem, rows=[tight_row(problem, seed)], settings=DEFAULTS).solution


@pytest.mark.one_in(5)
@pytest.mark.parametrize("make, seed", CASES)
def test_no_other_numbers_of_members_are_cheaper(make: Callable[[int], Problem], seed: int) -> None:
    problem, found = found_of(make, seed)
    if found is None or not all(map(straight, problem.edges, found.arcs)):
        return
    row = tight_row(problem, seed)
    least = min(
        price(problem, found.picks, found.arcs, recompute)
        for recompute in all_again(problem, found.picks, found.arcs)
        if members_bytes(problem, row, found.picks, found.arcs, recompute) <= row.limit + 1e-9
    )
    assert found.seconds <= least * (1 + DEFAULTS.gap)


def test_some_numbers_are_neither_none_nor_all() -> None:
    solutions = [found_of(make, seed)[1] for make, seed in CASES]
    counts = [n for one in solutions if one for part in (one.recompute.choices, one.recompute.arcs) for n in part.values()]
    assert 1 in counts
    assert 2 in counts
