"""The multiple-choice knapsack against enumeration, cost by cost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.solver.knapsack import choose


@pytest.mark.parametrize("seed", range(20))
def test_each_cost_is_the_least_among_the_best_by_the_costs_before(seed: int) -> None:
    draw = np.random.default_rng(seed)
    sizes = [draw.integers(1, 6, draw.integers(1, 5)) for _ in range(draw.integers(1, 6))]
    capacity = int(draw.integers(len(sizes), 4 * len(sizes)))
    costs = [[draw.integers(-3, 3, len(own)) * scale for own in sizes] for scale in (1e7, 1.0, 1e-7)]  # ties are many

    def totals(picks: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(sum(own[pick] for own, pick in zip(cost, picks, strict=True)) for cost in costs)

    every = itertools.product(*(range(len(own)) for own in sizes))
    fitting = [p for p in every if sum(own[pick] for own, pick in zip(sizes, p, strict=True)) <= capacity]
    found = choose(sizes, capacity, costs)
    assert (found is None) == (not fitting)
    assert found is None or totals(found) == pytest.approx(min(map(totals, fitting)), rel=1e-9)


def test_without_room_there_is_no_choice_and_without_takers_nothing_to_choose() -> None:
    assert choose([np.array([3, 2]), np.array([2])], 3, [[np.zeros(2), np.zeros(1)]]) is None
    assert choose([], 3, [[]]) == ()


@pytest.mark.parametrize("seed", [3, 6, 11, 13])
def test_the_optimum_of_many_takers_is_that_of_dynamic_programming(seed: int) -> None:
    """R. Bellman's recursion over capacities; costs nearly follow sizes, so that HiGHS's own gap of 1e-4 leaves these open."""
    draw = np.random.default_rng(seed)
    sizes = [np.sort(draw.choice(np.arange(1, 40), 6, replace=False)) for _ in range(60)]
    costs = [-(1000 * own + draw.integers(0, 8, 6)).astype(float) for own in sizes]
    capacity = 800
    best = np.zeros(capacity + 1)
    for own, cost in zip(sizes, costs, strict=True):
        taken = [np.concatenate([np.full(size, np.inf), best[:-size]]) + price for size, price in zip(own, cost, strict=True)]
        best = np.min(taken, axis=0)
    found = choose(sizes, capacity, [costs])
    assert found is not None
    assert sum(cost[pick] for cost, pick in zip(costs, found, strict=True)) == best.min()
