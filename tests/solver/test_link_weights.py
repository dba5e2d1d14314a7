"""Regions as prices: a bound for any weights, the bound of the rows with the best ones, and a solution with its true price."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.solver.core import core
from autopar.solver.integer_program import IntegerProgram
from autopar.solver.link_weights import best_weights, totals, weighed
from autopar.solver.overlap import Load
from autopar.solver.problem import Problem, price
from autopar.solver.relaxation import Relaxation
from autopar.solver.settings import EXACT
from autopar.solver.solve import solve
from tests.solver.random_problems import bytes_of, enumerate_all, random_problem, random_row, with_regions

SEEDS = range(60)
ALWAYS = replace(EXACT, weighed_columns=0, weights_gap=1e-9, weights_rounds=100)


def a_third(load: Load) -> Load:
    """A third of a load: all three regions together are busy with no more than what prices hold."""
    third = lambda found: {key: seconds / 3 for key, seconds in found.items()}  # noqa: E731
    return Load(
        choices=third(load.choices), reruns=third(load.reruns), arcs=third(load.arcs), conditional=third(load.conditional),
        reconverts=third(load.reconverts), charges=third(load.charges),
    )  # fmt: skip


def overlapping(seed: int) -> Problem:
    problem = with_regions(random_problem(seed), seed)
    return replace(problem, regions=tuple(replace(region, busy=a_third(region.busy)) for region in problem.regions))


def relaxed(problem: Problem) -> float:
    return Relaxation(IntegerProgram(problem), EXACT).relax().bound


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_any_weights_bound_every_solution(seed: int) -> None:
    problem, draw = overlapping(seed), random.Random(seed)
    best = enumerate_all(problem)
    if best is None:
        return
    for _ in range(3):
        weights = [np.array([draw.random() for _ in region.links]) for region in problem.regions]
        most = max(totals(problem, weights)[0])
        weights = [weight / max(1.0, most) for weight in weights]
        found = enumerate_all(weighed(problem, weights))
        assert found is not None
        assert found <= best + 1e-9


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_weights_have_the_bound_of_the_rows(seed: int) -> None:
    problem = overlapping(seed)
    if enumerate_all(problem) is None:
        return
    found = best_weights(problem, ALWAYS)
    bounded = core(found.problem, ALWAYS)  # which may be above the relaxation: it leaves out what no optimum uses
    assert bounded is not None
    assert bounded.bound >= relaxed(problem) * (1 - 1e-5)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_within_rows_a_solution_has_its_own_price_and_a_bound(seed: int) -> None:
    problem = overlapping(seed)
    rows = tuple(random_row(problem, 7 * seed + i) for i in range(1 + seed % 2))
    best, found = enumerate_all(problem, rows), solve(problem, rows=rows, settings=ALWAYS).solution
    if best is None:
        assert found is None
        return
    assert found is not None
    assert found.bound <= best + 1e-6
    assert found.seconds >= best - 1e-6
    assert found.seconds == price(problem, found.picks, found.arcs)
    assert all(bytes_of(problem, row, found.picks, found.arcs) <= row.limit * (1 + 1e-6) for row in rows)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_without_rows_a_solution_has_its_own_price_and_a_bound(seed: int) -> None:
    problem = overlapping(seed)
    best, found = enumerate_all(problem), solve(problem, settings=ALWAYS).solution
    if best is None:
        assert found is None
        return
    assert found is not None
    assert found.bound <= best + 1e-6
    assert found.seconds >= best - 1e-6
    assert found.seconds == pytest.approx(price(problem, found.picks, found.arcs), rel=1e-9)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_where_rens_comes_first_a_solution_keeps_to_the_rows(seed: int) -> None:
    problem, settings = overlapping(seed), replace(ALWAYS, devex_rows=0)
    row = random_row(problem, 7 * seed)
    best, found = enumerate_all(problem, (row,)), solve(problem, rows=(row,), settings=settings).solution
    assert (best is None) == (found is None)
    if best is not None and found is not None:
        assert found.bound <= best + 1e-6
        assert found.seconds >= best - 1e-6
        assert bytes_of(problem, row, found.picks, found.arcs) <= row.limit * (1 + 1e-6)


def test_most_of_these_solutions_are_optimal() -> None:
    shares = []
    for seed in SEEDS:
        problem = overlapping(seed)
        rows = (random_row(problem, 7 * seed),)
        best, found = enumerate_all(problem, rows), solve(problem, rows=rows, settings=ALWAYS).solution
        if best and found is not None:
            shares.append(found.seconds / best)
    assert np.median(shares) <= 1 + 1e-6
    assert max(shares) < 1.5
