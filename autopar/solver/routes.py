"""Routes: the cheapest trees from the layout in which a value is produced to the layouts that are wanted."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import networkx as nx
import numpy as np
import numpy.typing as npt

from autopar.solver.problem import Bools, Edge, Problem, Solution, charge_share, price, route_price


def tree(edge: Edge, picks: Sequence[int], allowed: npt.NDArray[np.int64] | None = None) -> tuple[int, ...] | None:
    """Arcs from the produced layout to every wanted one; each consumer is joined to the tree so far at least price.

    With `allowed`, only these arcs are used; None if they do not reach every consumer.
    """
    return _Trees(edge, allowed).tree(picks)


def joined(problem: Problem, picks: Sequence[int], order: Iterable[int], pick: Callable[[int, Bools], int]) -> list[int] | None:
    """Repair picks without conversions from the produced to the wanted layout; None if nothing is left.

    Layouts without conversions between them, such as rows in a rank's own order and all others, are in different components of
    a layout graph; all ends of a value must be in one. In this `order` each choice keeps its pick if that remains, or takes
    `pick(choice, left)`.
    """
    parts = {edge: _parts(edge) for edge in problem.edges}
    ends = {
        edge: [(edge.producer, edge.produced), *((one.choice, one.wants) for one in edge.consumers)]
        for edge, found in parts.items()
        if found.any()
    }
    at: dict[int, list[Edge]] = {}
    for edge, found in ends.items():
        for choice in {choice for choice, _ in found}:
            at.setdefault(choice, []).append(edge)
    made, left = list(picks), {choice: np.ones(len(problem.choices[choice].seconds), dtype=np.bool_) for choice in at}
    for choice in filter(at.__contains__, order):
        mask = left[choice]
        if not mask.any():
            return None
        if not mask[made[choice]]:
            made[choice] = pick(choice, mask)
        mask &= np.arange(len(mask)) == made[choice]
        waiting = list(at[choice])
        while waiting:
            edge = waiting.pop()
            common = functools.reduce(np.intersect1d, (parts[edge][layouts[left[other]]] for other, layouts in ends[edge]))
            for other, layouts in ends[edge]:
                kept = left[other] & np.isin(parts[edge][layouts], common)
                if (kept != left[other]).any():
                    left[other] = kept
                    waiting += at[other]
    return made


def _parts(edge: Edge) -> npt.NDArray[np.int64]:
    """For each layout the least one of its part: conversions lead between layouts of one part only."""
    numbers = np.arange(edge.nodes)
    while True:
        least = numbers.copy()
        np.minimum.at(least, edge.source, numbers[edge.target])
        np.minimum.at(least, edge.target, numbers[edge.source])
        if (least == numbers).all():
            return numbers
        numbers = least


class _Trees:
    """The trees of one edge, by different picks."""

    def __init__(self, edge: Edge, allowed: npt.NDArray[np.int64] | None = None) -> None:
        self._edge, self._allowed = edge, allowed

    def tree(self, picks: Sequence[int]) -> tuple[int, ...] | None:
        """See `tree`."""
        edge = self._edge
        reached = {int(edge.produced[picks[edge.producer]]): None}
        chosen: list[int] = []
        for place, consumer in enumerate(edge.consumers):
            goal = int(consumer.wants[picks[consumer.choice]])
            if goal in reached:
                continue
            due = sum((s.seconds for s in edge.conditional_costs if place in s.consumers), edge.seconds).tolist()
            path = _shortest(self._graph, list(reached), goal, due)
            if path is None:
                return None
            chosen += [self._graph.edges[step]["arc"] for step in itertools.pairwise(path)]
            reached |= dict.fromkeys(path)
        return tuple(chosen)

    @functools.cached_property
    def _graph(self) -> nx.DiGraph[int]:
        """The layouts and the arcs between them; made where a layout is not reached without."""
        edge, allowed = self._edge, np.arange(len(self._edge.seconds)) if self._allowed is None else self._allowed
        return _graph_of(edge.nodes, *(numbers.astype(np.int64).tobytes() for numbers in (edge.source, edge.target, allowed)))


@functools.lru_cache(maxsize=32)
def _graph_of(nodes: int, source: bytes, target: bytes, allowed: bytes) -> nx.DiGraph[int]:
    """The graph of `allowed` arcs, which is not to be changed: edges of one topology, and other picks of one edge, share it."""
    arcs = np.frombuffer(allowed, np.int64)
    ends = (np.frombuffer(numbers, np.int64)[arcs].tolist() for numbers in (source, target))
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from((*pair, {"arc": arc}) for *pair, arc in zip(*ends, arcs.tolist(), strict=True))
    return graph


def _shortest(graph: nx.DiGraph[int], sources: list[int], goal: int, seconds: list[float]) -> list[int] | None:
    """The nodes of the cheapest path from any source to the goal; None if there is none."""
    try:
        _, path = nx.multi_source_dijkstra(graph, sources, goal, weight=lambda u, v, arc: seconds[arc["arc"]])
    except nx.NetworkXNoPath:
        return None
    return list(path)


def reroute(problem: Problem, solution: Solution, equal: float) -> Solution:
    """Reroute every route with a fixed charge, treating charges already paid as free, from the start of least `tie`.

    The solver takes any of several routes and layouts of equal price, so weights that could share a message may be converted in
    different orders. Prices are equal up to the relative difference `equal`. Returns the solution unchanged if rerouting costs
    more.
    """
    picks, arcs, sent = list(solution.picks), list(solution.arcs), dict(solution.recompute.arcs)
    recompute = {w: members for (w, _), members in sent.items()}
    uneven = {w for (w, _), members in sent.items() if members != recompute[w]}
    ends = _Ends(problem)
    extra = [np.zeros(len(edge.seconds)) for edge in problem.edges]
    for fixed_charge in problem.fixed_charges:
        due = fixed_charge.seconds * (
            1.0 - charge_share(problem, fixed_charge, solution.picks, solution.arcs, solution.recompute)
        )
        for trigger in fixed_charge.triggers:
            share = 1.0 if trigger.consumers is not None else recompute.get(trigger.edge, 0) / problem.edges[trigger.edge].count
            extra[trigger.edge] += trigger.arcs * due * share
    for w in sorted({trigger.edge for fixed_charge in problem.fixed_charges for trigger in fixed_charge.triggers} - uneven):
        edge, members = problem.edges[w], recompute.get(w, 0)
        dues = edge.recompute if edge.recompute is not None and members else np.full(len(edge.seconds), np.inf)
        may = np.isfinite(dues)
        twice = np.where(may, dues, 0.0) * (members / edge.count)
        edge = replace(edge, seconds=edge.seconds + extra[w] + twice)
        found, trees = [], _Trees(edge)
        for start in _starts(problem, picks, arcs, edge.producer, ends, equal):
            route = trees.tree(start)
            if route is not None:
                found.append((route_price(edge, tuple(start), route), start, route))
        least = min(seconds for seconds, _, _ in found)
        for arc in arcs[w]:
            sent.pop((w, arc), None)
        _, picks, arcs[w] = next(one for one in found if one[0] <= least * (1 + equal))
        sent |= {(w, arc): members for arc in arcs[w] if may[arc]}
    resent = replace(solution.recompute, arcs=sent)
    seconds = price(problem, tuple(picks), tuple(arcs), resent)
    if seconds > solution.seconds * (1 + equal):
        return solution
    return replace(
        solution, picks=tuple(picks), arcs=tuple(arcs), recompute=resent, seconds=seconds, bound=min(solution.bound, seconds)
    )


def _starts(
    problem: Problem, picks: Sequence[int], arcs: Sequence[tuple[int, ...]], choice: int, ends: _Ends, equal: float
) -> Iterator[list[int]]:
    """The picks with each candidate of equal price of a choice, where no other edge depends on it.

    That holds for a parameter, and for a cast of one that nothing else reads: then both change.
    """

    def changed(*others: tuple[int, int]) -> list[int]:
        now = list(picks)
        for place, pick in others:
            now[place] = pick
        return now

    if ends.made[choice] == 1 and not ends.read[choice]:
        yield from (changed((choice, pick)) for pick in _alike(problem, picks, choice, equal))
        return
    source = problem.edges[ends.read[choice][0]] if ends.read[choice] else None
    if source is None or not ends.only(choice, source) or arcs[ends.read[choice][0]]:
        yield list(picks)
        return
    before = _alike(problem, picks, source.producer, equal)
    for pick, given in itertools.product(_alike(problem, picks, choice, equal), before):
        if source.produced[given] == source.consumers[0].wants[pick]:
            yield changed((choice, pick), (source.producer, given))


class _Ends:
    """How many edges each choice produces, and which it reads."""

    def __init__(self, problem: Problem) -> None:
        self.made = Counter(edge.producer for edge in problem.edges)
        self.read: dict[int, list[int]] = {choice: [] for choice in range(len(problem.choices))}
        for w, edge in enumerate(problem.edges):
            for consumer in edge.consumers:
                self.read[consumer.choice].append(w)

    def only(self, choice: int, source: Edge) -> bool:
        """Whether a choice produces one edge and is the only reader of one, whose producer has no other and reads nothing."""
        given = source.producer
        alone = len(self.read[choice]) == len(source.consumers) == 1
        return alone and self.made[choice] == self.made[given] == 1 and not self.read[given]


def _alike(problem: Problem, picks: Sequence[int], choice: int, equal: float) -> list[int]:
    """The candidates of the price of the pick, the least `tie` first."""
    found = problem.choices[choice]
    same = np.flatnonzero(np.isclose(found.seconds, found.seconds[picks[choice]], rtol=equal, atol=0.0))
    return [int(c) for c in same[np.argsort(found.tie[same], kind="stable")]]
