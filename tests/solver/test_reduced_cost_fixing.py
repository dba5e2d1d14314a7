"""Fixing by reduced costs: what it leaves out costs at least as much as they say, and no optimum is lost."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autopar.solver.integer_program import IntegerProgram
from autopar.solver.problem import Edge, Picks, Problem, Row, leading_to, price, row_bytes
from autopar.solver.reduced_cost_fixing import whole_problem, window
from autopar.solver.relaxation import Relaxation
from autopar.solver.settings import DEFAULTS, EXACT
from autopar.solver.solve import solve
from tests.solver.random_problems import random_problem, random_row, trees

SEEDS = range(40)
SMALL = [seed for seed in range(120) if len(random_problem(seed).choices) == 3]
WIDTHS = (0.0, 0.5, 2.0)


def searched(problem: Problem) -> tuple[Relaxation, float]:
    """A relaxation that is solved, and what it costs."""
    relaxation = Relaxation(IntegerProgram(problem), EXACT)
    relaxed = relaxation.relax()
    assert relaxed.result is not None
    return relaxation, relaxed.bound


def without_dead_ends(edge: Edge, picks: Picks) -> list[tuple[int, ...]]:
    """The trees of a wire of which every arc leads to a consumer."""
    every = frozenset(range(len(edge.consumers)))
    return [used for used in trees(edge, picks) if set(used) == set(leading_to(edge, every, picks, used))]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", SMALL)
def test_whoever_takes_a_candidate_or_a_conversion_pays_its_reduced_cost(seed: int) -> None:
    problem = random_problem(seed)
    relaxation, bound = searched(problem)
    candidates, arcs = relaxation.reduced_costs()
    for picks in itertools.product(*(range(len(c.seconds)) for c in problem.choices)):
        for used in itertools.product(*(without_dead_ends(edge, picks) for edge in problem.edges)):
            dearest = max(costs[pick] for costs, pick in zip(candidates, picks, strict=True))
            dearest = max([dearest, *(costs[a] for costs, some in zip(arcs, used, strict=True) for a in some)])
            assert price(problem, picks, used) >= bound + dearest - 1e-6


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_solution_of_what_is_left_is_one_of_the_whole_with_the_same_price_and_bytes(seed: int) -> None:
    problem = random_problem(seed)
    row = random_row(problem, seed)
    relaxation, _ = searched(problem)
    for width in WIDTHS:
        part = window(whole_problem(problem), *relaxation.reduced_costs(), width, DEFAULTS.largest_window)
        if part is None:
            continue
        found = solve(part.problem, settings=replace(EXACT, windows=())).solution
        assert found is not None
        whole = part.expand(found)
        assert price(problem, whole.picks, whole.arcs) == pytest.approx(found.seconds)
        expected = row_bytes(problem, row, whole.picks, whole.arcs)
        assert row_bytes(part.problem, part.row(row), found.picks, found.arcs) == pytest.approx(expected)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_within_rows_the_best_is_found_with_windows_as_without(seed: int) -> None:
    problem = random_problem(seed)
    rows: list[Row] = [random_row(problem, seed), random_row(problem, seed + 1000)]
    tried = (replace(EXACT, windows=windows) for windows in ((0.05, 0.2), ()))
    found, expected = (solve(problem, rows=rows, settings=settings).solution for settings in tried)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.bound <= expected.seconds + 1e-6
        assert found.seconds == pytest.approx(expected.seconds, rel=1e-6)


def test_reduced_cost_fixing_leaves_something_out() -> None:
    sizes = []
    for seed in SEEDS:
        problem = random_problem(seed)
        relaxation, _ = searched(problem)
        part = window(whole_problem(problem), *relaxation.reduced_costs(), 0.5, DEFAULTS.largest_window)
        sizes.append(1.0 if part is None else np.mean([len(pick) for pick in part.picks]))
    assert min(sizes) == 1.0
    assert sum(size == 1.0 for size in sizes) < len(SEEDS) / 2
