"""Where a problem without a solution has none: against enumeration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.solver.feasibility import _up_to, first_impossible
from autopar.solver.problem import Problem
from autopar.solver.settings import EXACT
from tests.solver.random_problems import enumerate_all, random_problem


def broken(seed: int) -> tuple[Problem, int]:
    """A problem in which one choice wants a layout that nothing leads to, and the place of that choice."""
    problem = random_problem(seed)
    w = seed % len(problem.edges)
    edge = problem.edges[w]
    end = edge.consumers[0]
    nowhere = replace(end, wants=np.full_like(end.wants, edge.nodes))
    changed = replace(edge, nodes=edge.nodes + 1, consumers=(nowhere, *edge.consumers[1:]), offload=None)
    return replace(problem, edges=(*problem.edges[:w], changed, *problem.edges[w + 1 :])), end.choice


@pytest.mark.parametrize("seed", range(30))
def test_all_before_the_first_impossible_choice_have_a_solution_together(seed: int) -> None:
    problem, wrong = broken(seed)
    first = first_impossible(problem, EXACT)
    assert first <= wrong
    assert enumerate_all(_up_to(problem, first), ()) is None
    assert not first or enumerate_all(_up_to(problem, first - 1), ()) is not None
