"""Solving: the relaxation first, then branching where it is fractional, then the routes read off as trees.

The answer is checked, not trusted: its price is summed from its own picks and arcs (`problem.price`), and the bound is HiGHS's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import highspy
import numpy as np
import numpy.typing as npt

from autopar.errors import AutoparError
from autopar.solver.model import MICROSECONDS, Model
from autopar.solver.problem import Floats, Problem, Row, Solution, Wire, price

INTEGRAL = 1e-6  # how far from 0 or 1 a pick may be
PROVEN = 1e-3  # the relative gap at which branching stops

Infeasible = highspy.HighsModelStatus.kInfeasible


class SolverError(AutoparError):
    """HiGHS stopped without an answer."""


def solve(
    problem: Problem,
    judge: Callable[[Solution], Iterable[Row]] = lambda solution: (),
    rows: Sequence[Row] = (),
    *,
    time_limit: float = 300.0,
    gap: float = PROVEN,
) -> Solution | None:
    """The cheapest solution that every row allows; None if there is none.

    `judge` looks at a finished solution and returns the rows that it breaks (none: it is accepted); they join the program and
    it is solved again. `time_limit` is in seconds,
    `gap` the relative gap at which branching stops.
    """
    known = list(rows)
    while True:
        solution = _solve_once(problem, known, time_limit, gap)
        if solution is None:
            return None
        broken = list(judge(solution))
        if not broken:
            return solution
        known += broken


def least_memory(
    problem: Problem, judge: Callable[[Solution, float], Iterable[Row]], scale: float, *, time_limit: float = 300.0
) -> Solution:
    """A solution of least peak memory, in bytes, whatever it costs.

    `judge(solution, peak)` returns the rows of moments at which a solution takes more than `peak` bytes. `scale` is the size of
    a typical answer.
    """
    known: list[Row] = []
    while True:
        model = Model(problem)
        model.minimise_peak(scale)
        for row in known:
            model.bound(row)
        solver = model.highs()
        solver.run()
        values = _values(solver)
        if not _integral(model, values):
            _make_whole(model, solver, time_limit, PROVEN)
            values = _values(solver)
        solution = _read(model, values, 0.0)
        assert model.peak is not None
        more = list(judge(solution, float(values[model.peak[0]]) * scale * (1 + PROVEN)))
        if not more:
            return solution
        known += more


def _solve_once(problem: Problem, rows: Sequence[Row], time_limit: float, gap: float) -> Solution | None:
    model = Model(problem)
    for row in rows:
        model.bound(row)
    solver = model.highs()
    solver.run()
    if solver.getModelStatus() == Infeasible:
        return None
    relaxed = solver.getInfo().objective_function_value / MICROSECONDS
    values = _values(solver)
    if _integral(model, values):
        solution = _read(model, values, relaxed)
        if solution.status == "optimal":
            return solution
    return _branch(model, solver, time_limit, gap)


def _branch(model: Model, solver: highspy.Highs, time_limit: float, gap: float) -> Solution | None:
    """Solve on with whole picks, and whole uses where several consumers share a wire (there a tree may beat its relaxation)."""
    _make_whole(model, solver, time_limit, gap)
    if solver.getModelStatus() == Infeasible:
        return None
    info = solver.getInfo()
    if not np.isfinite(info.objective_function_value) or info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        raise SolverError(f"no plan was found in {time_limit:g} s", fix="give it more time, or fold more blocks")
    return _read(model, _values(solver), info.mip_dual_bound / MICROSECONDS)


def _make_whole(model: Model, solver: highspy.Highs, time_limit: float, gap: float) -> None:
    integer = np.flatnonzero(np.concatenate(model.integer)).astype(np.int32)
    solver.changeColsIntegrality(len(integer), integer, np.ones(len(integer), np.uint8))
    solver.setOptionValue("time_limit", time_limit)
    solver.setOptionValue("mip_rel_gap", gap)
    solver.run()


def _values(solver: highspy.Highs) -> Floats:
    return np.array(solver.getSolution().col_value)


def _integral(model: Model, values: Floats) -> bool:
    picks = np.concatenate(
        [values[first : first + len(c.seconds)] for first, c in zip(model.columns.pick, model.problem.choices, strict=True)]
    )
    return bool(np.all(np.abs(picks - np.round(picks)) < INTEGRAL))


def _read(model: Model, values: Floats, bound: float) -> Solution:
    """Picks by the largest value; routes as the cheapest trees, from the produced to the wanted layouts."""
    problem, columns = model.problem, model.columns
    picks = tuple(
        int(np.argmax(values[first : first + len(choice.seconds)]))
        for first, choice in zip(columns.pick, problem.choices, strict=True)
    )
    arcs: list[tuple[int, ...] | None] = []
    for wire, use in zip(problem.wires, columns.use, strict=True):
        used = np.flatnonzero(values[use : use + len(wire.seconds)] > INTEGRAL)
        found = tree(wire, picks, used)
        arcs.append(tree(wire, picks) if found is None else found)
    seconds = price(problem, picks, tuple(arcs))
    bound = min(bound, seconds)
    return Solution(
        picks=picks, arcs=tuple(arcs), seconds=seconds, bound=bound,
        status="optimal" if seconds - bound <= 1e-6 * seconds else "feasible",
    )  # fmt: skip


def tree(wire: Wire, picks: Sequence[int], allowed: npt.NDArray[np.int64] | None = None) -> tuple[int, ...] | None:
    """Arcs from the produced layout to every wanted one, each consumer joined to what is already reached at the least price.

    With `allowed`, only these arcs are used; None if they do not reach every consumer.
    """
    outgoing: dict[int, list[int]] = {}
    for arc in range(len(wire.seconds)) if allowed is None else allowed.tolist():
        outgoing.setdefault(int(wire.source[arc]), []).append(arc)
    reached = {int(wire.produced[picks[wire.producer]])}
    chosen: dict[int, None] = {}
    for place, consumer in enumerate(wire.consumers):
        due = sum((s.seconds for s in wire.surcharges if place in s.consumers), wire.seconds)
        path = _shortest(wire, outgoing, reached, int(consumer.wants[picks[consumer.choice]]), due)
        if path is None:
            return None
        for arc in path:
            chosen[arc] = None
            reached.add(int(wire.target[arc]))
    return tuple(chosen)


def _shortest(
    wire: Wire, outgoing: dict[int, list[int]], reached: set[int], goal: int, seconds: Floats
) -> list[int] | None:
    """Dijkstra's path from any reached node to the goal, as arcs."""
    queue = [(0.0, 0, node, -1) for node in sorted(reached)]
    parent: dict[int, int] = {}
    while queue:
        distance, hops, node, arc = heapq.heappop(queue)
        if node in parent:
            continue
        parent[node] = arc
        if node == goal:
            path = []
            while parent[node] >= 0:
                path.append(parent[node])
                node = int(wire.source[parent[node]])
            return path[::-1]
        for step in outgoing.get(node, ()):
            there = int(wire.target[step])
            if there not in parent and there not in reached:
                heapq.heappush(queue, (distance + float(seconds[step]), hops + 1, there, step))
    return None


