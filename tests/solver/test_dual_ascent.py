"""The bound of dual ascent, against enumeration and HiGHS, and what a core leaves out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autopar.solver.core import core, whole
from autopar.solver.dual_ascent import DualBound, dual_ascent
from autopar.solver.integer_program import IntegerProgram
from autopar.solver.problem import Problem, price
from autopar.solver.reduced_cost_fixing import whole_problem, window
from autopar.solver.relaxation import Relaxation
from autopar.solver.settings import DEFAULTS, EXACT
from autopar.solver.solve import solve
from tests.solver.random_problems import enumerate_all, random_problem, with_regions
from tests.solver.test_reduced_cost_fixing import without_dead_ends

SEEDS = range(120)
SMALL = [seed for seed in SEEDS if len(random_problem(seed).choices) == 3]


def relaxed(problem: Problem) -> float:
    """The price of the relaxation by the simplex method."""
    return Relaxation(IntegerProgram(problem), EXACT).relax().bound


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_is_never_above_the_relaxation_nor_the_optimum(seed: int) -> None:
    problem = random_problem(seed)
    bound, best = dual_ascent(problem).bound, enumerate_all(problem)
    assert bound <= relaxed(problem) + 1e-9
    assert best is None or bound <= best + 1e-9


def test_the_bound_is_near_the_relaxation() -> None:
    shares = [dual_ascent(problem).bound / relaxed(problem) for problem in map(random_problem, SEEDS) if relaxed(problem)]
    assert np.median(shares) > 0.99
    assert np.quantile(shares, 0.1) > 0.9


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", SMALL)
def test_whoever_takes_a_candidate_or_an_arc_pays_its_reduced_cost(seed: int) -> None:
    problem = random_problem(seed)
    pays(problem, dual_ascent(problem))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", SMALL)
def test_so_it_is_with_the_reduced_costs_of_a_core_where_those_say_more(seed: int) -> None:
    problem, dual = random_problem(seed), dual_ascent(random_problem(seed))
    part = whole(problem, EXACT)
    if part.relaxed.result is None:
        return
    raised = dual.raised(part.search.window, part.relaxed.bound, *part.reduced_costs)
    pays(problem, raised)
    both = zip((*raised.candidates, *raised.arcs), (*dual.candidates, *dual.arcs), strict=True)
    assert all((more >= costs).all() for more, costs in both)


def pays(problem: Problem, dual: DualBound) -> None:
    """See that every solution costs its bound and the reduced cost of each part."""
    for picks in itertools.product(*(range(len(c.seconds)) for c in problem.choices)):
        for used in itertools.product(*(without_dead_ends(edge, picks) for edge in problem.edges)):
            most = max(costs[pick] for costs, pick in zip(dual.candidates, picks, strict=True))
            most = max([most, *(costs[a] for costs, some in zip(dual.arcs, used, strict=True) for a in some)])
            assert price(problem, picks, used) >= dual.bound + most - 1e-9


def test_where_no_route_joins_any_candidates_the_bound_is_infinite() -> None:
    problem = next(problem for problem in map(random_problem, SEEDS) if problem.edges)
    edge = problem.edges[0]
    none, nothing = np.zeros(0, np.int64), np.zeros(0)
    cut = replace(
        edge, nodes=2, produced=np.zeros_like(edge.produced), source=none, target=none, seconds=nothing,
        free=nothing.astype(bool),
        consumers=tuple(replace(end, wants=np.ones_like(end.wants)) for end in edge.consumers),
        conditional_costs=(), recompute=None, offload=None,
    )  # fmt: skip
    impossible = Problem(choices=problem.choices, edges=(cut, *problem.edges[1:]))
    assert dual_ascent(impossible).bound == np.inf
    assert solve(impossible).solution is None


def test_it_leaves_something_out() -> None:
    left = []
    for problem in map(random_problem, SEEDS):
        dual = dual_ascent(problem)
        part = window(whole_problem(problem), dual.candidates, dual.arcs, 0.5, 1.0)
        left.append(1.0 if part is None else np.mean([len(pick) for pick in part.picks]))
    assert sum(one == 1.0 for one in left) > len(SEEDS) / 4


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(60))
def test_a_core_has_the_optimum_of_the_whole(seed: int) -> None:
    problem = with_regions(random_problem(seed), seed)
    best, found = enumerate_all(problem), core(problem, replace(EXACT, largest_core=1.0))
    assert found is not None
    if best is None:
        assert found.relaxed.result is None
        return
    inside = solve(found.search.window.problem, settings=EXACT).solution
    assert inside is not None
    assert inside.seconds == pytest.approx(best, rel=1e-6)
    assert found.bound <= best + 1e-9


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_below_a_cutoff_that_is_the_optimum(seed: int) -> None:
    problem = random_problem(seed)
    best = enumerate_all(problem)
    if best is None:
        return
    assert solve(problem, settings=EXACT, cutoff=best * (1 - 1e-3)).solution is None
    found = solve(problem, settings=EXACT, cutoff=best * (1 + 1e-3) + 1e-6).solution
    assert found is not None
    assert found.seconds == pytest.approx(best, rel=1e-6)


def test_a_core_is_smaller_than_the_whole_and_its_relaxation_no_cheaper() -> None:
    smaller = 0
    for problem in map(random_problem, SEEDS):
        part, everything = core(problem, DEFAULTS), whole(problem, DEFAULTS)
        if part is None or part.relaxed.result is None:
            continue
        assert part.relaxed.bound >= everything.relaxed.bound - 1e-9
        smaller += part.search.relaxation.program.matrix.columns < everything.search.relaxation.program.matrix.columns
    assert smaller > len(SEEDS) / 2
