"""Solving: the relaxation first, then branching where it is fractional, then the routes read off as trees.

The answer is checked, not trusted: its price is summed from its own picks and arcs (`problem.price`), and the bound is HiGHS's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from autopar.solver.model import MICROSECONDS, Model
from autopar.solver.problem import Floats, Problem, Row, Solution, Wire, price
from autopar.solver.search import INTEGRAL, Found, Search

PROVEN = 1e-3  # the relative gap at which branching stops
SAME = 1e-6  # relative difference at which a price counts as equal to the bound


def solve(
    problem: Problem,
    judge: Callable[[Solution], Iterable[Row]] = lambda solution: (),
    rows: Iterable[Row] = (),
    *,
    cutoff: float = float("inf"),
    time_limit: float = 300.0,
    gap: float = PROVEN,
) -> Solution | None:
    """The cheapest solution that every row allows; None if there is none, or none below `cutoff` seconds.

    `judge` looks at a finished solution and returns the rows that it breaks (none: it is accepted); they join the program and
    it is solved again. `time_limit` is in seconds, `gap` the relative gap at which branching stops.
    """
    search = Search(Model(problem), time_limit=time_limit, gap=gap)
    broken = list(rows)
    while True:
        if broken:
            search.bound(broken)
        relaxed = search.relax()
        if relaxed is None or relaxed.bound >= cutoff:
            return None
        solution = _whole(search, relaxed, gap)
        if solution is None:
            return None
        broken = list(judge(solution))
        if not broken:
            return solution


def _whole(search: Search, relaxed: Found, gap: float) -> Solution | None:
    """An integer solution within the gap of the relaxation, found with as little branching as that takes."""
    model = search.model
    if not search.fractional(relaxed):
        solution = _read(model, relaxed)
        if solution.status == "optimal":
            return solution
    settled = search.settle(relaxed)
    if settled is not None:
        solution = _read(model, settled)
        if solution.gap <= max(gap, SAME):
            return solution
    found = search.branch(settled)
    return None if found is None else _read(model, found)


def least_memory(
    problem: Problem, judge: Callable[[Solution, float], Iterable[Row]], scale: float, *, time_limit: float = 300.0
) -> Solution | None:
    """A solution of least peak memory, whatever it costs; None if there is none at all.

    `judge(solution, peak)` returns rows for moments at which a solution takes more than `peak` bytes. `scale` is the size of a
    typical answer in bytes.
    """
    model = Model(problem)
    model.minimise_peak(scale)
    search = Search(model, time_limit=time_limit, gap=PROVEN)
    while True:
        relaxed = search.relax()
        if relaxed is None:
            return None
        found = relaxed
        if search.fractional(relaxed):
            found = search.branch(search.settle(relaxed)) or relaxed
        solution = _read(model, found)
        more = list(judge(solution, found.objective * MICROSECONDS * scale * (1 + PROVEN)))
        if not more:
            return solution
        search.bound(more)


def _read(model: Model, answer: Found) -> Solution:
    """Picks by the largest value; routes as the cheapest trees, from the produced to the wanted layouts."""
    problem, columns, values = model.problem, model.columns, answer.values
    picks = tuple(
        int(np.argmax(values[first : first + len(choice.seconds)]))
        for first, choice in zip(columns.pick, problem.choices, strict=True)
    )
    arcs: list[tuple[int, ...]] = []
    for wire, use in zip(problem.wires, columns.use, strict=True):
        used = np.flatnonzero(values[use : use + len(wire.seconds)] > INTEGRAL)
        found = tree(wire, picks, used)
        if found is None:
            found = tree(wire, picks)
        assert found is not None, f"{wire.name}: no route to the layouts that were picked"
        arcs.append(found)
    seconds = price(problem, picks, tuple(arcs))
    bound = min(answer.bound, seconds)
    return Solution(
        picks=picks, arcs=tuple(arcs), seconds=seconds, bound=bound,
        status="optimal" if seconds - bound <= SAME * seconds else "feasible",
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


def _shortest(wire: Wire, outgoing: dict[int, list[int]], reached: set[int], goal: int, seconds: Floats) -> list[int] | None:
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
