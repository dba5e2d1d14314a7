"""Rounding: the solution that the values of a program's columns stand for, priced by itself and not by the solver."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.solver.highs import SolverResult
from autopar.solver.integer_program import IntegerProgram
from autopar.solver.problem import Floats, RecomputeCounts, Solution, price, storages
from autopar.solver.routes import joined, tree
from autopar.solver.settings import SearchSettings


class NoRouteError(Exception):
    """No route joins the rounded picks: the conversions of this problem allow only some pairs of candidates."""


def rounded(program: IntegerProgram, result: SolverResult, settings: SearchSettings) -> Solution:
    """The largest pick of each choice, the cheapest trees of the arcs that are used, members rounded up.

    Picks that no conversions connect are made again, the surest first. Raises NoRouteError if nothing is left.
    """
    problem, columns, values, tolerance = program.problem, program.columns, result.values, settings.integrality
    shares = [values[first : first + len(choice.seconds)] for first, choice in zip(columns.pick, problem.choices, strict=True)]
    picks = [int(np.argmax(share)) for share in shares]
    try:
        arcs = _trees(program, values, picks, tolerance)
    except NoRouteError:
        surest = np.argsort([-float(share.max()) for share in shares], kind="stable").tolist()
        again = joined(problem, picks, surest, lambda choice, left: int(np.where(left, shares[choice], -1.0).argmax()))
        if again is None:
            raise
        picks, arcs = again, _trees(program, values, again, tolerance)
    rerun = {choice: _members(values[first + picks[choice]], tolerance) for choice, first in columns.rerun.items()}
    reconverted = {
        (w, arc): _members(values[first + arc], tolerance) for w, first in columns.reconvert.items() for arc in arcs[w]
    }
    recompute = RecomputeCounts(
        choices={choice: members for choice, members in rerun.items() if members},
        arcs={end: members for end, members in reconverted.items() if members},
        offload=_offloaded(program, result, picks, arcs, tolerance),
    )
    made = tuple(picks)
    seconds = price(problem, made, tuple(arcs), recompute)
    solution = Solution(picks=made, arcs=tuple(arcs), seconds=seconds, bound=0.0, recompute=recompute, status="feasible")
    return solution.bounded(result.bound, settings.equal_price)


def _trees(program: IntegerProgram, values: Floats, picks: Sequence[int], tolerance: float) -> list[tuple[int, ...]]:
    """The cheapest trees of the arcs that are used, or of all; raises NoRouteError."""
    arcs = []
    for edge, use in zip(program.problem.edges, program.columns.use, strict=True):
        used = np.flatnonzero(values[use : use + len(edge.seconds)] > tolerance)
        route = tree(edge, picks, used)
        if route is None:
            route = tree(edge, picks)
        if route is None:
            raise NoRouteError(f"{edge.name}: no route to the layouts that were picked")
        arcs.append(route)
    return arcs


def _offloaded(
    program: IntegerProgram, result: SolverResult, picks: Sequence[int], arcs: Sequence[tuple[int, ...]], tolerance: float
) -> dict[tuple[int, int], int]:
    """How many members of each edge are fetched from the host, by layout, among the layouts that the value has."""
    found: dict[tuple[int, int], int] = {}
    for w, (first, layouts) in program.columns.offload.items():
        edge, storage = program.problem.edges[w], storages(program.problem.edges[w])
        available = {int(storage[edge.produced[picks[edge.producer]]]), *(int(storage[edge.target[arc]]) for arc in arcs[w])}
        for place, layout in enumerate(layouts.tolist()):
            members = min(edge.count, _members(result.values[first + place], tolerance))
            if members and layout in available:
                found[w, layout] = members
    return found


def _members(value: float, tolerance: float) -> int:
    """A number of members, the last of them wholly."""
    return math.ceil(value - tolerance)
