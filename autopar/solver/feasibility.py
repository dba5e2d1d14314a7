"""Where a problem without a solution has none."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from autopar.solver.problem import Problem
from autopar.solver.settings import DEFAULTS, SearchSettings
from autopar.solver.solve import solve


def first_impossible(problem: Problem, settings: SearchSettings = DEFAULTS) -> int:
    """The first choice with which a problem without a solution has none, by bisection: all before it have one together.

    Raises SolverError where HiGHS fails.
    """
    last = len(problem.choices) - 1
    return bisect_left(range(last), True, key=lambda choice: solve(_up_to(problem, choice), settings=settings).solution is None)


def _up_to(problem: Problem, last: int) -> Problem:
    """The problem of all choices up to one, without what only makes solutions more expensive."""
    edges = (replace(edge, conditional_costs=()) for edge in problem.edges if edge.producer <= last)
    return Problem(
        choices=problem.choices[: last + 1],
        edges=tuple(
            replace(edge, consumers=tuple(consumer for consumer in edge.consumers if consumer.choice <= last)) for edge in edges
        ),
    )


__all__ = ["first_impossible"]
