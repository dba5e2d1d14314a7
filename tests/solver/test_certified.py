"""The solver against enumeration, with feasibility checked independently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pulp
import pytest

from autopar.solver.integer_program import IntegerProgram
from autopar.solver.lazy_rows import Excess
from autopar.solver.matrix import MICROSECONDS
from autopar.solver.problem import Problem, Row, Solution, price
from autopar.solver.pulp_export import to_pulp
from autopar.solver.relaxation import Relaxation
from autopar.solver.routes import reroute
from autopar.solver.settings import EXACT, SearchSettings
from autopar.solver.solve import Solver, solve
from tests.solver.random_problems import bytes_of, enumerate_all, random_problem, random_row, trees, with_regions


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(200))
def test_the_solver_finds_the_optimum_of_small_problems(seed: int) -> None:
    certify(random_problem(seed), seed)


def certify(problem: Problem, seed: int) -> None:
    """Solve a problem under some random memory rows, and enumerate it."""
    rows = tuple(random_row(problem, 7 * seed + i) for i in range(seed % 3))
    best, solution = enumerate_all(problem, rows), solve(problem, rows=rows, settings=EXACT).solution
    if best is None:
        assert solution is None
        return
    assert solution is not None
    assert solution.seconds == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert solution.bound <= best + 1e-6
    assert solution.seconds == price(problem, solution.picks, solution.arcs)
    assert all(bytes_of(problem, row, solution.picks, solution.arcs) <= row.limit * (1 + 1e-6) for row in rows)


@pytest.mark.parametrize("gap", [0.0, 10.0])
def test_by_prices_of_rows_a_solution_is_within_the_gap_and_the_optimum_is_found_beyond_it(
    gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, found = replace(EXACT, window_gap=gap, weighed_columns=0), Counter[str]()
    for name in ("_by_prices", "_everything"):
        monkeypatch.setattr(Solver, name, counted(getattr(Solver, name), found))
    certify_lazily([random_problem(seed) for seed in range(60)], settings, above=gap)
    assert found["_by_prices"] >= 5 if gap else found["_everything"] > 5, found


@pytest.mark.parametrize("share", [0.05, 10.0])
def test_the_optimum_is_found_in_a_wide_window_with_rows_or_beyond_it(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, found = replace(EXACT, wide_window=share, bounded_columns=0, window_gap=1.0), Counter[str]()
    monkeypatch.setattr(Solver, "_at_once", counted(Solver._at_once, found))
    certify_lazily([with_regions(random_problem(seed), seed) for seed in range(60)], settings)
    assert found["_at_once"] >= 3 if share > 1 else found["_at_once"] < 3, found


def certify_lazily(problems: Sequence[Problem], settings: SearchSettings, above: float = 0.0) -> None:
    """Solve problems under rows that join once a solution breaks them, and enumerate them: solutions may be dearer than the
    optimum by the share `above`."""
    for seed, problem in enumerate(problems):
        rows = [random_row(problem, 7 * seed + i) for i in range(1 + seed % 2)]

        def judge(one: Solution, problem: Problem = problem, rows: list[Row] = rows) -> Iterator[Excess]:
            for row in rows:
                more = bytes_of(problem, row, one.picks, one.arcs) - row.limit
                if more > 1e-6 * row.limit:
                    yield Excess(row=row, bytes=more)

        best, solution = enumerate_all(problem, rows), solve(problem, judge, settings=settings).solution
        assert (solution is None) == (best is None)
        if solution is not None:
            assert best * (1 - 1e-6) - 1e-9 <= solution.seconds <= (1 + above) * best * (1 + 1e-6) + 1e-9
            assert solution.bound <= best * (1 + 1e-6) + 1e-9
            assert not list(judge(solution))


T = TypeVar("T")


def counted(method: Callable[..., T | None], found: Counter[str]) -> Callable[..., T | None]:
    """A method that counts what it makes."""

    def made(*arguments: object) -> T | None:
        one = method(*arguments)
        found[method.__name__] += one is not None
        return one

    return made


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(200))
def test_the_solver_finds_the_optimum_where_messages_overlap_with_computing(seed: int) -> None:
    certify(with_regions(random_problem(seed), seed), seed)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(60))
def test_where_a_candidate_would_take_days_the_relaxation_is_still_below_the_optimum(seed: int) -> None:
    """It makes rows of regions so uneven that HiGHS would drop the seconds of a link from its own row."""
    problem = random_problem(seed)
    days = np.array([1e6, *np.ones(len(problem.choices[0].seconds))])
    twice = lambda ends: ends[[0, *range(len(ends))]]  # noqa: E731
    slow = replace(problem.choices[0], seconds=days * (twice(problem.choices[0].seconds) + 1.0), tie=0.0 * days)
    edges = tuple(replace(edge, produced=twice(edge.produced)) if edge.producer == 0 else edge for edge in problem.edges)
    problem = with_regions(replace(problem, choices=(slow, *problem.choices[1:]), edges=edges), seed)
    best = enumerate_all(problem)
    assert best is None or Relaxation(IntegerProgram(problem), EXACT).relax().bound <= best * (1 + 1e-6)


def test_overlap_decides_some_of_these_problems() -> None:
    plain = [random_problem(seed) for seed in range(60)]
    picks = [[solve(one, settings=EXACT).solution.picks for one in (p, with_regions(p, i))] for i, p in enumerate(plain)]
    assert sum(before != after for before, after in picks) > 5


def test_where_messages_overlap_a_dive_that_fails_is_not_taken_for_a_proof() -> None:
    nowhere = SearchSettings(dive_iterations=0, rens_nodes=0)
    for seed in range(12):
        problem = with_regions(random_problem(seed), seed)
        assert (solve(problem, settings=nowhere).solution is None) == (solve(problem, settings=EXACT).solution is None)


@pytest.mark.parametrize("seed", range(5))
def test_pulp_states_the_same_program(seed: int) -> None:
    problem = random_problem(seed)
    model = IntegerProgram(problem)
    program = to_pulp(model)
    program.solve(pulp.HiGHS(msg=False))
    assert pulp.value(program.objective) / MICROSECONDS == pytest.approx(enumerate_all(problem), rel=1e-6, abs=1e-9)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(60))
def test_routes_led_anew_cost_no_more_and_reach_what_is_wanted(seed: int) -> None:
    problem = random_problem(seed)
    picks = tuple(seed % len(choice.seconds) for choice in problem.choices)
    arcs = tuple(min(trees(edge, picks), default=()) for edge in problem.edges)
    before = price(problem, picks, arcs)
    found = reroute(problem, Solution(picks=picks, arcs=arcs, seconds=before, bound=0.0, status="feasible"), 1e-6)
    assert found.seconds == price(problem, found.picks, found.arcs) <= before * (1 + 1e-6)
    for edge, used in zip(problem.edges, found.arcs, strict=True):
        assert sorted(used) in map(sorted, trees(edge, found.picks))
