"""The part of a problem in which every solution lies that costs little more than the relaxation.

By the duals of a relaxation, a solution that takes a candidate or a conversion costs at least the relaxation and the reduced
cost of that. What is dearer than a width is left out. So a solution of what is left that costs no more than that width is as
good as if nothing had been left out; rows only make solutions dearer, so that this holds whatever rows are added later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.problem import Again, Bools, Floats, Ints, Kept, Problem, Row, Solution, Wire

MUCH = 0.5  # the share of columns from which on leaving out the others does not pay


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Window:
    """A smaller problem and the way back: what is left of each choice's candidates, and of each wire's arcs and layouts."""

    problem: Problem
    picks: Sequence[Ints]
    arcs: Sequence[Ints]
    nodes: Sequence[Ints]

    def expand(self, solution: Solution) -> Solution:
        """The solution of the original problem."""
        again = Again(
            choices=solution.again.choices,
            arcs={(w, int(self.arcs[w][arc])): members for (w, arc), members in solution.again.arcs.items()},
            away={(w, int(self.nodes[w][node])): members for (w, node), members in solution.again.away.items()},
        )
        return replace(
            solution,
            picks=tuple(int(left[pick]) for left, pick in zip(self.picks, solution.picks, strict=True)),
            arcs=tuple(tuple(left[list(used)].tolist()) for left, used in zip(self.arcs, solution.arcs, strict=True)),
            again=again,
        )

    def row(self, row: Row) -> Row:
        """A row of the original problem, said of the smaller one."""
        return replace(
            row,
            picks={choice: bytes_of[self.picks[choice]] for choice, bytes_of in row.picks.items()},
            uses={w: bytes_of[self.arcs[w]] for w, bytes_of in row.uses.items()},
            again={choice: bytes_of[self.picks[choice]] for choice, bytes_of in row.again.items()},
            kept=tuple(self._kept(kept) for kept in row.kept),
            least=tuple(replace(least, bytes=least.bytes[self.nodes[least.wire]]) for least in row.least),
        )

    def judge(
        self, judge: Callable[[Solution, bool], Iterable[Row]], asked: list[Row]
    ) -> Callable[[Solution, bool], Iterator[Row]]:
        """A judge of solutions of the original problem as one of those of the smaller; what it asks for is added to `asked`."""

        def rows(solution: Solution, final: bool) -> Iterator[Row]:
            for row in judge(self.expand(solution), final):
                asked.append(row)
                yield self.row(row)

        return rows

    def _kept(self, kept: Kept) -> Kept:
        nodes = self.nodes[kept.wire]
        return replace(kept, bytes=kept.bytes[nodes], homes=_first(kept.home(nodes)))


def whole(problem: Problem) -> Window:
    """All that there is."""
    return Window(
        problem=problem,
        picks=[np.arange(len(choice.seconds)) for choice in problem.choices],
        arcs=[np.arange(len(wire.seconds)) for wire in problem.wires],
        nodes=[np.arange(wire.nodes) for wire in problem.wires],
    )


def window(problem: Problem, candidates: Sequence[Floats], arcs: Sequence[Floats], width: float) -> Window | None:
    """What is left where reduced costs (of candidates by choice, of arcs by wire) are at most `width`; None if that is much."""
    total = sum(map(len, candidates)) + sum(map(len, arcs))
    picks = [np.flatnonzero(costs <= width) for costs in candidates]
    used = [costs <= width for costs in arcs]
    if sum(map(len, picks)) + sum(int(mask.sum()) for mask in used) > MUCH * total:
        return None
    parts = [_part(wire, picks, mask) for wire, mask in zip(problem.wires, used, strict=True)]
    left = [kept for _, kept, _ in parts]
    smaller = Problem(
        choices=tuple(
            replace(
                choice, seconds=choice.seconds[pick], tie=choice.tie[pick],
                again=None if choice.again is None else choice.again[pick],
            )
            for choice, pick in zip(problem.choices, picks, strict=True)
        ),
        wires=tuple(wire for wire, _, _ in parts),
        tolls=tuple(
            replace(toll, ways=tuple(replace(way, arcs=way.arcs[left[way.wire]]) for way in toll.ways))
            for toll in problem.tolls
        ),
    )  # fmt: skip
    return Window(problem=smaller, picks=picks, arcs=left, nodes=[nodes for _, _, nodes in parts])


def _part(wire: Wire, picks: Sequence[Ints], used: Bools) -> tuple[Wire, Ints, Ints]:
    """What is left of a wire, with the arcs and layouts that it had: what lies in what is left is left, too."""
    there = np.zeros(wire.nodes, dtype=bool)
    there[wire.produced[picks[wire.producer]]] = True
    for consumer in wire.consumers:
        there[consumer.wants[picks[consumer.choice]]] = True
    there[wire.source[used]] = there[wire.target[used]] = True
    while True:
        below = wire.source[wire.free & there[wire.target]]
        if there[below].all():
            break
        there[below] = True
    nodes = np.flatnonzero(there)
    arcs = np.flatnonzero(used | (wire.free & there[wire.source] & there[wire.target]))
    place = np.cumsum(there) - 1
    return replace(
        wire, nodes=len(nodes), produced=place[wire.produced[picks[wire.producer]]],
        consumers=tuple(replace(end, wants=place[end.wants[picks[end.choice]]]) for end in wire.consumers),
        source=place[wire.source[arcs]], target=place[wire.target[arcs]], seconds=wire.seconds[arcs], free=wire.free[arcs],
        surcharges=tuple(replace(one, seconds=one.seconds[arcs]) for one in wire.surcharges),
        again=None if wire.again is None else wire.again[arcs], away=None if wire.away is None else wire.away[nodes],
    ), arcs, nodes  # fmt: skip


def _first(names: Ints) -> Ints:
    """For each entry the place of the first that is equal."""
    _, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    return np.asarray(first[inverse])
