"""Followers are merged before the solver sees them: an op without a price takes its producer's choice, where that is exact.

    a = linear(x)     pick[a, 8 ways]              a, b    pick[ab, 8 ways]
    b = reshape(a)    pick[b, 6 ways]    ->

It is exact if b reads nothing else, alone reads a, and every conversion of a before b can be made after b instead at no
higher price:
b's candidates must then cover every layout in which a is produced, one each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.problem import Again, Choice, Consumer, Floats, Ints, Problem, Row, Solution, Wire

SAME = 1e-9  # relative difference at which two prices count as equal


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Merged:
    """A smaller problem and the way back.

    Candidate c of merged choice `leader[o]` stands for candidate `pick[o][c]` of the original choice o; `choice` and `wire`
    give the new places of what is left.
    """

    original: Problem
    problem: Problem
    leader: tuple[int, ...]
    pick: tuple[Ints, ...]
    choice: Mapping[int, int]
    wire: Mapping[int, int]

    def expand(self, solution: Solution) -> Solution:
        """The solution of the original problem: a merged wire needs no conversion."""
        picks = tuple(
            int(pick[solution.picks[self.choice[leader]]]) for leader, pick in zip(self.leader, self.pick, strict=True)
        )
        arcs = tuple(solution.arcs[self.wire[w]] if w in self.wire else () for w in range(len(self.original.wires)))
        back = {place: w for w, place in self.wire.items()}
        rerun = {o: solution.again.choices.get(self.choice[leader], 0) for o, leader in enumerate(self.leader)}
        again = Again(
            choices={o: members for o, members in rerun.items() if members},
            arcs={(back[w], arc): members for (w, arc), members in solution.again.arcs.items()},
            away={(back[w], node): members for (w, node), members in solution.again.away.items()},
        )
        return replace(solution, picks=picks, arcs=arcs, again=again)

    def row(self, row: Row) -> Row:
        """A row of the original problem, said of the merged one."""
        picks: dict[int, Floats] = {}
        again: dict[int, Floats] = {}

        def add(found: dict[int, Floats], choice: int, bytes_of: Floats) -> None:
            place = self.choice[self.leader[choice]]
            found[place] = found.get(place, np.zeros(1)) + bytes_of[self.pick[choice]]

        for choice, bytes_of in row.picks.items():
            add(picks, choice, bytes_of)
        for choice, bytes_of in row.again.items():
            add(again, choice, bytes_of)
        kept = []
        for entry in row.kept:
            wire = self.original.wires[entry.wire]
            if entry.wire in self.wire:
                kept.append(replace(entry, wire=self.wire[entry.wire]))
            elif entry.there or entry.keepers:  # a follower runs again with its leader: what is between them is made again
                if not entry.given:
                    add(picks, wire.producer, entry.bytes[wire.produced])
                if not entry.given and not entry.there and entry.gone:
                    add(again, wire.producer, -entry.bytes[wire.produced])
        least = []
        for one in row.least:
            if one.wire in self.wire:
                least.append(replace(one, wire=self.wire[one.wire]))
            else:
                producer = self.original.wires[one.wire]
                add(picks, producer.producer, one.bytes[producer.produced])
        uses = {self.wire[w]: bytes_of for w, bytes_of in row.uses.items() if w in self.wire}
        return replace(row, picks=picks, again=again, uses=uses, kept=tuple(kept), least=tuple(least))


def merge_followers(problem: Problem) -> Merged:
    """Merge every follower into its leader."""
    leader = list(range(len(problem.choices)))
    pick: list[Ints] = [np.arange(len(c.seconds)) for c in problem.choices]
    outputs: dict[int, list[int]] = {}
    inputs: dict[int, list[int]] = {}
    for w, wire in enumerate(problem.wires):
        outputs.setdefault(wire.producer, []).append(w)
        for consumer in wire.consumers:
            inputs.setdefault(consumer.choice, []).append(w)
    gone: set[int] = set()
    for follower in range(len(problem.choices)):
        wires = inputs.get(follower, [])
        if len(wires) != 1 or len(problem.wires[wires[0]].consumers) != 1:
            continue
        wire = problem.wires[wires[0]]
        first = leader[wire.producer]
        produced = wire.produced[pick[wire.producer]]  # the layout before the follower, per candidate of the leader
        after = _follow(problem, wire, produced, [problem.wires[w] for w in outputs.get(follower, [])])
        if after is None or outputs[wire.producer] != [wires[0]]:
            continue
        leader[follower], pick[follower] = first, after
        gone.add(wires[0])
    return _rebuild(problem, leader, pick, gone)


def _follow(problem: Problem, wire: Wire, produced: Ints, results: list[Wire]) -> Ints | None:
    """The follower's candidate for each layout its operand may be produced in; None if merging would not be exact."""
    consumer = wire.consumers[0]
    if problem.choices[consumer.choice].seconds.any() or len(set(consumer.wants.tolist())) != len(consumer.wants):
        return None
    of = {node: c for c, node in enumerate(consumer.wants.tolist())}
    if not results or any(node not in of for node in produced.tolist()):
        return None
    after = [dict(zip(zip(r.source.tolist(), r.target.tolist(), strict=True), _due(r).tolist(), strict=True)) for r in results]
    for s, t, seconds in zip(wire.source.tolist(), wire.target.tolist(), _due(wire), strict=True):
        if s in of and t in of:
            ends = ((int(r.produced[of[s]]), int(r.produced[of[t]])) for r in results)
            later = sum(arcs.get(end, np.inf) for arcs, end in zip(after, ends, strict=True))
            if later > seconds * (1 + SAME):
                return None
    return np.array([of[node] for node in produced.tolist()], dtype=np.int64)


def _due(wire: Wire) -> Floats:
    """Seconds of each arc with everything that may be due on it."""
    surcharges = (s.seconds for s in wire.surcharges if s.consumers)
    return np.asarray(wire.seconds + sum(surcharges, np.zeros(len(wire.seconds))))


def _rebuild(problem: Problem, leader: list[int], pick: list[Ints], gone: set[int]) -> Merged:
    kept = [o for o in range(len(problem.choices)) if leader[o] == o]
    choice = {o: i for i, o in enumerate(kept)}
    wires = [w for w in range(len(problem.wires)) if w not in gone]

    def consumer(old: Consumer) -> Consumer:
        return replace(old, choice=choice[leader[old.choice]], wants=old.wants[pick[old.choice]])

    new = [
        replace(
            wire, producer=choice[leader[wire.producer]], produced=wire.produced[pick[wire.producer]],
            consumers=tuple(map(consumer, wire.consumers)),
        )
        for wire in (problem.wires[w] for w in wires)
    ]  # fmt: skip
    choices: tuple[Choice, ...] = tuple(problem.choices[o] for o in kept)
    places = {w: i for i, w in enumerate(wires)}
    tolls = tuple(
        replace(toll, ways=tuple(replace(way, wire=places[way.wire]) for way in toll.ways if way.wire in places))
        for toll in problem.tolls
    )
    return Merged(
        original=problem, problem=Problem(choices=choices, wires=tuple(new), tolls=tolls), leader=tuple(leader),
        pick=tuple(pick), choice=choice, wire=places,
    )  # fmt: skip
