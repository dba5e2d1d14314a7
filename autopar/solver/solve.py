"""Solving: the relaxation first, then branching where it is fractional, then the routes read off as trees.

The answer is checked, not trusted: its price is summed from its own picks and arcs (`problem.price`), and the bound is HiGHS's.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import networkx as nx
import numpy as np
import numpy.typing as npt

from autopar.solver.model import MICROSECONDS, Model
from autopar.solver.problem import Problem, Row, Solution, Wire, paid, price, route_price, row_bytes
from autopar.solver.search import INTEGRAL, Found, Search

PROVEN = 1e-3  # the relative gap at which branching stops
FEW = 0.2  # the share of choices up to which those that the relaxation left open are settled by themselves first
SAME = 1e-6  # relative difference at which a price counts as equal to the bound


def solve(
    problem: Problem,
    judge: Callable[[Solution, bool], Iterable[Row]] = lambda solution, final: (),
    rows: Iterable[Row] = (),
    *,
    cutoff: float = float("inf"),
    time_limit: float = 300.0,
    gap: float = PROVEN,
    patience: float = math.inf,
) -> Solution | None:
    """The cheapest solution that every row allows; None if there is none, or none below `cutoff` seconds.

    `judge(solution, final)` looks at a solution and returns the rows that it breaks; they join the program and it is
    solved again
    until a final solution breaks none. What is not final is a rounded relaxation: it may bring rows, but need not.
    `time_limit` is in seconds, `gap` the relative gap at which branching stops. Raises SolverError after about `patience`
    seconds without an answer.
    """
    search = Search(Model(problem, tolls=False), time_limit=time_limit, gap=gap, patience=patience)
    search.levy()
    broken, known = list(rows), list[Row]()
    while True:
        if broken:
            search.bound(broken)
            known += broken
        relaxed = search.relax()
        if relaxed is None or relaxed.bound >= cutoff:
            return None
        broken = list(judge(_read(search.model, relaxed), False)) if search.fractional(relaxed) else []
        if broken:
            continue
        solution = _whole(search, relaxed, known, gap)
        if solution is None:
            return None
        broken = list(judge(solution, True))
        if not broken:
            better = together(problem, solution)
            fits = better is solution or (_kept(problem, better, known) and not list(judge(better, True)))
            return better if fits else solution


def _whole(search: Search, relaxed: Found, rows: Sequence[Row], gap: float) -> Solution | None:
    """An integer solution within the gap of the relaxation, found with as little branching as that takes."""
    model = search.model
    open_choices, settled = search.fractional(relaxed), None
    if not open_choices:
        solution = _read(model, relaxed)
        if solution.status == "optimal" and _kept(model.problem, solution, rows):
            return solution
    if open_choices <= FEW * len(model.problem.choices):
        settled = search.settle(relaxed)
    if settled is not None:
        solution = _read(model, settled)
        if solution.gap <= max(gap, SAME):
            return solution
    for uses in (False, True):
        found = search.branch(settled, uses=uses)
        if found is None:
            return None
        solution = _read(model, found)
        if _kept(model.problem, solution, rows) and solution.gap <= max(gap, SAME):
            break
    return solution


def together(problem: Problem, solution: Solution) -> Solution:
    """Every route that may pay tolls led anew at the tolls that are paid already, from the plainest start of equal price.

    Among routes and layouts of equal price the solver takes any, so that weights which could share a message may go in
    different orders. The solution itself if that costs more.
    """
    picks = list(solution.picks)
    extra = [np.zeros(len(wire.seconds)) for wire in problem.wires]
    for toll in problem.tolls:
        due = 0.0 if paid(problem, toll, solution.picks, solution.arcs) else toll.seconds
        for way in toll.ways:
            extra[way.wire] += way.arcs * due
    arcs = list(solution.arcs)
    for w in sorted({way.wire for toll in problem.tolls for way in toll.ways}):
        wire = replace(problem.wires[w], seconds=problem.wires[w].seconds + extra[w])
        found = []
        for start in _starts(problem, picks, arcs, wire.producer):
            route = tree(wire, start)
            if route is not None:
                found.append((route_price(wire, tuple(start), route), start, route))
        least = min(seconds for seconds, _, _ in found)
        _, picks, arcs[w] = next(one for one in found if one[0] <= least * (1 + SAME))
    seconds = price(problem, tuple(picks), tuple(arcs))
    if seconds > solution.seconds * (1 + SAME):
        return solution
    return replace(solution, picks=tuple(picks), arcs=tuple(arcs), seconds=seconds, bound=min(solution.bound, seconds))


def _starts(problem: Problem, picks: list[int], arcs: Sequence[tuple[int, ...]], choice: int) -> Iterator[list[int]]:
    """The picks with every other that a choice may take at the same price without changing more than what it alone reads.

    That is a parameter, or a copy of one that is cast as it is stored.
    """
    readers = Counter(wire.producer for wire in problem.wires)
    given = [w for w, wire in enumerate(problem.wires) if any(consumer.choice == choice for consumer in wire.consumers)]
    source = problem.wires[given[0]] if len(given) == 1 and not arcs[given[0]] else None
    if readers[choice] > 1 or (given and (source is None or not _alone(problem, source))):
        yield picks
        return
    for pick in _alike(problem, picks, choice):
        start = [*picks[:choice], pick, *picks[choice + 1 :]]
        if source is None:
            yield start
            continue
        for before in _alike(problem, picks, source.producer):
            if source.produced[before] == source.consumers[0].wants[pick]:
                yield [*start[: source.producer], before, *start[source.producer + 1 :]]


def _alone(problem: Problem, source: Wire) -> bool:
    """Whether a wire is the only one of its producer, which reads nothing, and has one consumer."""
    reads = any(consumer.choice == source.producer for wire in problem.wires for consumer in wire.consumers)
    return len(source.consumers) == 1 and not reads and sum(wire.producer == source.producer for wire in problem.wires) == 1


def _alike(problem: Problem, picks: Sequence[int], choice: int) -> list[int]:
    """The candidates that cost what the pick costs, the least `tie` first."""
    found = problem.choices[choice]
    same = np.flatnonzero(np.isclose(found.seconds, found.seconds[picks[choice]], rtol=SAME, atol=0.0))
    return [int(c) for c in same[np.argsort(found.tie[same], kind="stable")]]


def _kept(problem: Problem, solution: Solution, rows: Iterable[Row]) -> bool:
    """Whether a solution, as it was read off, keeps to the rows: of a mixture of routes one is taken, which may need more."""
    return all(row_bytes(problem, row, solution.picks, solution.arcs) <= row.limit * (1 + SAME) for row in rows)


def least_memory(
    problem: Problem,
    judge: Callable[[Solution, float], Iterable[Row]],
    scale: float,
    *,
    time_limit: float = 300.0,
    patience: float = math.inf,
) -> Solution | None:
    """A solution of least peak memory, whatever it costs; None if there is none at all.

    `judge(solution, peak)` returns rows for moments at which a solution takes more than `peak` bytes. `scale` is the size of a
    typical answer in bytes, `patience` as for `solve`.
    """
    model = Model(problem)
    model.minimise_peak(scale)
    search = Search(model, time_limit=time_limit, gap=PROVEN, patience=patience)
    while True:
        relaxed = search.relax()
        if relaxed is None:
            return None
        found = relaxed
        if search.fractional(relaxed):
            found = search.branch(search.settle(relaxed), uses=True) or relaxed
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
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(wire.nodes))
    for arc in range(len(wire.seconds)) if allowed is None else allowed.tolist():
        graph.add_edge(int(wire.source[arc]), int(wire.target[arc]), arc=arc)
    reached = {int(wire.produced[picks[wire.producer]]): None}
    chosen: list[int] = []
    for place, consumer in enumerate(wire.consumers):
        due = sum((s.seconds for s in wire.surcharges if place in s.consumers), wire.seconds).tolist()
        path = _shortest(graph, list(reached), int(consumer.wants[picks[consumer.choice]]), due)
        if path is None:
            return None
        chosen += [graph.edges[step]["arc"] for step in itertools.pairwise(path)]
        reached |= dict.fromkeys(path)
    return tuple(chosen)


def _shortest(graph: nx.DiGraph[int], sources: list[int], goal: int, seconds: list[float]) -> list[int] | None:
    """The nodes of the cheapest path from any source to the goal; None if there is none."""
    try:
        _, path = nx.multi_source_dijkstra(graph, sources, goal, weight=lambda u, v, arc: seconds[arc["arc"]])
    except nx.NetworkXNoPath:
        return None
    return list(path)
