"""A proposal by sums: the best solution if nothing overlaps, with its price by the law."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.solver.dual_ascent import dual_ascent
from autopar.solver.lazy_rows import LazyRows
from autopar.solver.overlap import Load
from autopar.solver.problem import Problem, price
from autopar.solver.proposal import by_sums, summed
from autopar.solver.settings import EXACT, SearchSettings
from autopar.solver.solve import Solver
from tests.solver.random_problems import enumerate_all, random_problem, with_regions

WIDE = replace(EXACT, proposal_window=100.0, largest_core=1.0)
BETA = 0.4


def hiding(seed: int) -> Problem:
    """A problem in which a part of what links carry runs ahead."""
    problem, draw = with_regions(random_problem(seed), seed), random.Random(seed)

    def ahead(load: Load) -> Load:
        share = draw.random()
        return Load(arcs={w: share * seconds for w, seconds in load.arcs.items()})

    regions = tuple(replace(region, ahead=ahead(region.links[0])) for region in problem.regions)
    return replace(problem, regions=regions)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(60))
def test_the_proposal_is_the_cheapest_by_sums(seed: int) -> None:
    problem = hiding(seed)
    best = enumerate_all(summed(problem, BETA))
    if best is None:
        return
    rows = LazyRows(lambda solution: (), lambda row: row, (), WIDE)
    found = by_sums(problem, dual_ascent(problem), 1e6, BETA, rows, WIDE)
    if found is None:  # none is near a relaxation that says much less
        assert best > 1.04 * dual_ascent(summed(problem, BETA)).bound
    else:
        assert price(summed(problem, BETA), found.picks, found.arcs) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("settings", [EXACT, WIDE])
def test_a_proposal_is_priced_by_the_law_and_keeps_the_bound_of_the_best(settings: SearchSettings) -> None:
    proposed = 0
    for seed in range(12):
        problem = hiding(seed)
        solver = Solver(problem, settings)
        best = solver.solve().solution
        found = best and solver.by_sums(best, BETA, lambda solution: ())
        if best is None or found is None:
            continue
        proposed += 1
        assert found.seconds == pytest.approx(price(problem, found.picks, found.arcs))
        assert found.bound <= best.seconds <= found.seconds * (1 + 1e-6)
        assert found.status == ("optimal" if found.seconds <= found.bound * (1 + 1e-6) else "feasible")
    assert proposed >= 4
