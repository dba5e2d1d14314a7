"""Memory rows as prices: no solution costs more under them, and column generation bounds every one that satisfies the rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autopar.solver.memory_prices import charged, least_bytes
from autopar.solver.problem import Arcs, Edge, Picks, Problem, Row, end_node, price, row_bytes
from autopar.solver.settings import EXACT
from autopar.solver.solve import solve
from tests.solver.random_problems import trees
from tests.solver.test_recompute import SMALL, all_again, cheapest, held, repeated, tight_row

CASES = [(make, seed) for make in (repeated, held) for seed in SMALL[:30]]
BY_PRICES = replace(EXACT, weighed_columns=0, window_gap=10.0)


def rows_of(problem: Problem, seed: int) -> list[Row]:
    """Rows of two moments; at the second one, edges are held of the first members alone."""
    second = tight_row(problem, seed + 1)
    first = tuple(replace(kept, first_share=0.5, bytes=kept.bytes / 2) for kept in second.retained)
    return [replace(tight_row(problem, seed), name="whole"), replace(second, name="first", retained=first)]


def straight_to(edge: Edge, picks: Picks) -> tuple[int, ...]:
    """The arc of an edge that has one from each layout that is produced to each that is wanted."""
    (arc,) = np.flatnonzero((edge.source == end_node(edge, -1, picks)) & (edge.target == end_node(edge, 0, picks)))
    return (int(arc),)


def solutions(problem: Problem) -> list[tuple[Picks, Arcs]]:
    """Every way to pick, and to convert without detours that return."""
    return [
        (picks, arcs)
        for picks in itertools.product(*(range(len(choice.seconds)) for choice in problem.choices))
        for arcs in itertools.product(*(trees(edge, picks) for edge in problem.edges))
    ]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("make, seed", CASES)
def test_no_solution_costs_more_by_prices_whatever_is_made_again(make: Callable[[int], Problem], seed: int) -> None:
    problem, draw = make(seed), random.Random(seed)
    rows = rows_of(problem, seed)
    prices = {row.name: draw.choice([0.0, 0.02, 0.1, 0.5]) for row in rows}
    by_prices = charged(problem, rows, prices)
    more = by_prices.problem.edges[len(problem.edges) :]
    for picks, arcs in draw.sample(found := solutions(problem), min(8, len(found))):
        ways = list(all_again(problem, picks, arcs))
        least = min(
            price(problem, picks, arcs, again)
            + sum(prices[row.name] * (row_bytes(problem, row, picks, arcs, again) - row.limit) for row in rows)
            for again in draw.sample(ways, min(200, len(ways)))
        )
        routes = (*arcs, *(straight_to(edge, picks) for edge in more))
        assert price(by_prices.problem, picks, routes) - by_prices.limits <= least + 1e-9


@pytest.mark.parametrize("seed", SMALL[:30])
def test_where_nothing_is_made_again_and_one_end_saves_prices_are_exact(seed: int) -> None:
    problem = repeated(seed)
    problem = replace(
        problem,
        choices=tuple(replace(choice, recompute=None) for choice in problem.choices),
        edges=tuple(replace(edge, recompute=None) for edge in problem.edges),
    )
    (row, _), cost = rows_of(problem, seed), 0.1
    row = replace(row, recompute={}, retained=tuple(replace(k, saved_by=k.saved_by[:1], read_by=()) for k in row.retained))
    by_prices = charged(problem, [row], {row.name: cost})
    more = by_prices.problem.edges[len(problem.edges) :]
    for picks, arcs in solutions(problem)[:50]:
        routes = (*arcs, *(straight_to(edge, picks) for edge in more))
        found = price(by_prices.problem, picks, routes) - by_prices.limits
        assert found == pytest.approx(price(problem, picks, arcs) + cost * (row_bytes(problem, row, picks, arcs) - row.limit))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("make, seed", CASES)
def test_column_generation_bounds_every_solution_and_what_it_finds_keeps_the_row(
    make: Callable[[int], Problem], seed: int
) -> None:
    problem = make(seed)
    row = tight_row(problem, seed)
    best, found = cheapest(problem, row), solve(problem, rows=[row], settings=BY_PRICES)
    if best is None:
        return
    assert found.bound <= best * (1 + 1e-6) + 1e-9
    if found.solution is not None:
        one = found.solution
        assert one.seconds == pytest.approx(price(problem, one.picks, one.arcs, one.recompute))
        assert row_bytes(problem, row, one.picks, one.arcs, one.recompute) <= row.limit + 1e-6


@pytest.mark.one_in(5)
@pytest.mark.parametrize("make, seed", CASES)
def test_no_solution_has_less_than_the_least_bytes_whatever_is_made_again(make: Callable[[int], Problem], seed: int) -> None:
    problem, draw = make(seed), random.Random(seed)
    rows = rows_of(problem, seed)
    for row, least in zip(rows, least_bytes(problem, rows), strict=True):
        for picks, arcs in draw.sample(found := solutions(problem), min(20, len(found))):
            ways = list(all_again(problem, picks, arcs))
            for again in draw.sample(ways, min(200, len(ways))):
                assert row_bytes(problem, row, picks, arcs, again) - row.constant >= least - 1e-9


@pytest.mark.parametrize("seed", SMALL[:30])
def test_least_bytes_are_exact_where_nothing_is_made_again_nor_saved_nor_converted(seed: int) -> None:
    problem = repeated(seed)
    row = replace(rows_of(problem, seed)[0], recompute={}, retained=(), uses={})
    least = min(row_bytes(problem, row, picks, arcs) for picks, arcs in solutions(problem))
    assert list(least_bytes(problem, [row])) == [pytest.approx(least - row.constant)]
