"""Presolve aggregation: an op without a price of its own takes its producer's choice, where that is exact.

    a = linear(x)     pick[a, 8 ways]              a, b    pick[ab, 8 ways]
    b = reshape(a)    pick[b, 6 ways]    ->

It is exact if b, the follower, reads nothing else, is the only reader of a, its leader, and every conversion of a before b can
be made after b at no higher price or load on any region: b must have exactly one candidate for every layout in which a is
produced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.overlap import Load
from autopar.solver.problem import Choice, Consumer, Edge, Floats, Ints, Problem, RecomputeCounts, Row, Solution
from autopar.solver.settings import DEFAULTS, SearchSettings


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Aggregated:
    """A smaller problem and the mapping back.

    Candidate c of merged choice `leader[o]` stands for candidate `pick[o][c]` of the original choice o; `choice` and `edge`
    give the new places of what is left.
    """

    original: Problem
    problem: Problem
    leader: tuple[int, ...]
    pick: tuple[Ints, ...]
    choice: Mapping[int, int]
    edge: Mapping[int, int]

    def expand(self, solution: Solution) -> Solution:
        """The solution of the original problem: a merged edge needs no conversion."""
        picks = tuple(
            int(pick[solution.picks[self.choice[leader]]]) for leader, pick in zip(self.leader, self.pick, strict=True)
        )
        arcs = tuple(solution.arcs[self.edge[w]] if w in self.edge else () for w in range(len(self.original.edges)))
        back = {place: w for w, place in self.edge.items()}
        rerun = {o: solution.recompute.choices.get(self.choice[leader], 0) for o, leader in enumerate(self.leader)}
        recompute = RecomputeCounts(
            choices={o: members for o, members in rerun.items() if members},
            arcs={(back[w], arc): members for (w, arc), members in solution.recompute.arcs.items()},
            offload={(back[w], node): members for (w, node), members in solution.recompute.offload.items()},
        )
        return replace(solution, picks=picks, arcs=arcs, recompute=recompute)

    def row(self, row: Row) -> Row:
        """A row of the original problem as a row of the merged one."""
        picks: dict[int, Floats] = {}
        recompute: dict[int, Floats] = {}

        def add(found: dict[int, Floats], choice: int, bytes_of: Floats) -> None:
            place = self.choice[self.leader[choice]]
            found[place] = found.get(place, np.zeros(1)) + bytes_of[self.pick[choice]]

        for choice, bytes_of in row.picks.items():
            add(picks, choice, bytes_of)
        for choice, bytes_of in row.recompute.items():
            add(recompute, choice, bytes_of)
        kept = []
        for entry in row.retained:
            edge = self.original.edges[entry.edge]
            if entry.edge in self.edge:
                kept.append(replace(entry, edge=self.edge[entry.edge]))
            elif entry.read_by or entry.saved_by:  # a follower reruns with its leader
                if not entry.free_as_produced:
                    add(picks, edge.producer, entry.bytes[edge.produced])
                if not entry.free_as_produced and not entry.read_by and entry.droppable:
                    add(recompute, edge.producer, -entry.bytes[edge.produced])
        least = []
        for one in row.in_flight:
            if one.edge in self.edge:
                least.append(replace(one, edge=self.edge[one.edge]))
            else:
                producer = self.original.edges[one.edge]
                add(picks, producer.producer, one.bytes[producer.produced])
        uses = {self.edge[w]: bytes_of for w, bytes_of in row.uses.items() if w in self.edge}
        return replace(row, picks=picks, recompute=recompute, uses=uses, retained=tuple(kept), in_flight=tuple(least))


def merge_followers(problem: Problem, settings: SearchSettings = DEFAULTS) -> Aggregated:
    """Merge every follower into its leader, if `settings.presolve` is on."""
    leader = list(range(len(problem.choices)))
    pick: list[Ints] = [np.arange(len(c.seconds)) for c in problem.choices]
    outputs: dict[int, list[int]] = {}
    inputs: dict[int, list[int]] = {}
    for w, edge in enumerate(problem.edges):
        outputs.setdefault(edge.producer, []).append(w)
        for consumer in edge.consumers:
            inputs.setdefault(consumer.choice, []).append(w)
    merged: set[int] = set()
    for follower in range(len(problem.choices) if settings.presolve else 0):
        edges = inputs.get(follower, [])
        if len(edges) != 1 or len(problem.edges[edges[0]].consumers) != 1:
            continue
        edge = problem.edges[edges[0]]
        first = leader[edge.producer]
        produced = edge.produced[pick[edge.producer]]  # the layout before the follower, per candidate of the leader
        after = _follow(problem, edges[0], produced, outputs.get(follower, []), settings.equal_conversion)
        if after is None or outputs[edge.producer] != [edges[0]]:
            continue
        leader[follower], pick[follower] = first, after
        merged.add(edges[0])
    return _rebuild(problem, leader, pick, merged)


def _follow(problem: Problem, number: int, produced: Ints, results: list[int], equal: float) -> Ints | None:
    """The follower's candidate for each layout its operand may be produced in; None if merging would not be exact."""
    edge = problem.edges[number]
    consumer = edge.consumers[0]
    if problem.choices[consumer.choice].seconds.any() or len(np.unique(consumer.wants)) != len(consumer.wants):
        return None
    of = np.full(edge.nodes, -1)
    of[consumer.wants] = np.arange(len(consumer.wants))
    if not results or (of[produced] < 0).any():
        return None
    source, target = of[edge.source], of[edge.target]
    inside = np.flatnonzero((source >= 0) & (target >= 0))
    moved = [(w, _arcs_between(problem.edges[w], source[inside], target[inside])) for w in results]
    for load in (None, *(load for region in problem.regions for load in region.loads)):
        if load is not None and not any(_put(load, problem, w) for w in results):
            continue
        before = _due(problem, number, load)[inside]
        after = np.sum([np.append(_due(problem, w, load), np.inf)[arcs] for w, arcs in moved], axis=0)  # inf: no such arc
        if (after > before * (1 + equal)).any():
            return None
    return of[produced]


def _arcs_between(edge: Edge, source: Ints, target: Ints) -> Ints:
    """The arcs of an edge that lead from one layout to another, given as candidates of its producer; -1 where there is none."""
    ends, wanted = edge.source * edge.nodes + edge.target, edge.produced[source] * edge.nodes + edge.produced[target]
    order = np.argsort(ends)
    places = np.append(order, -1)[np.searchsorted(ends, wanted, sorter=order)]
    return np.where(np.append(ends, -1)[places] == wanted, places, -1)


def _put(load: Load, problem: Problem, number: int) -> bool:
    """Whether an edge has a part in a load."""
    places = range(len(problem.edges[number].conditional_costs))
    return number in load.arcs or any((number, place) in load.conditional for place in places)


def _due(problem: Problem, number: int, load: Load | None) -> Floats:
    """What each arc of an edge costs, with everything that may be due on it; or its part in a load."""
    edge, total = problem.edges[number], problem.edges[number].seconds
    if load is not None:
        total = load.arcs.get(number, np.zeros(len(edge.seconds)))
    for place, cost in enumerate(edge.conditional_costs):
        if cost.consumers:
            total = total + (cost.seconds if load is None else load.conditional.get((number, place), 0.0))
    return total


def _moved(load: Load, choice: Mapping[int, int], leader: list[int], pick: list[Ints], edge: Mapping[int, int]) -> Load:
    """A load of the original problem as a load of the merged one."""

    def merged(seconds: Mapping[int, Floats]) -> dict[int, Floats]:
        found: dict[int, Floats] = {}
        for o, per_candidate in seconds.items():
            place = choice[leader[o]]
            found[place] = found.get(place, np.zeros(1)) + per_candidate[pick[o]]
        return found

    return replace(
        load,
        choices=merged(load.choices),
        reruns=merged(load.reruns),
        arcs={edge[w]: seconds for w, seconds in load.arcs.items() if w in edge},
        conditional={(edge[w], place): seconds for (w, place), seconds in load.conditional.items() if w in edge},
        reconverts={edge[w]: seconds for w, seconds in load.reconverts.items() if w in edge},
    )


def _rebuild(problem: Problem, leader: list[int], pick: list[Ints], merged: set[int]) -> Aggregated:
    kept = [o for o in range(len(problem.choices)) if leader[o] == o]
    choice = {o: i for i, o in enumerate(kept)}
    edges = [w for w in range(len(problem.edges)) if w not in merged]

    def consumer(old: Consumer) -> Consumer:
        return replace(old, choice=choice[leader[old.choice]], wants=old.wants[pick[old.choice]])

    new = [
        replace(
            edge, producer=choice[leader[edge.producer]], produced=edge.produced[pick[edge.producer]],
            consumers=tuple(map(consumer, edge.consumers)),
        )
        for edge in (problem.edges[w] for w in edges)
    ]  # fmt: skip
    choices: tuple[Choice, ...] = tuple(problem.choices[o] for o in kept)
    places = {w: i for i, w in enumerate(edges)}
    fixed_charges = tuple(
        replace(
            charge,
            triggers=tuple(replace(one, edge=places[one.edge]) for one in charge.triggers if one.edge in places),
        )
        for charge in problem.fixed_charges
    )
    regions = (region.mapped(lambda load: _moved(load, choice, leader, pick, places)) for region in problem.regions)
    return Aggregated(
        original=problem, leader=tuple(leader), pick=tuple(pick), choice=choice, edge=places,
        problem=Problem(choices=choices, edges=tuple(new), fixed_charges=fixed_charges, regions=tuple(regions)),
    )  # fmt: skip
