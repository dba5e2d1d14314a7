"""The part of a problem in which every solution lies that costs little more than the relaxation.

By the duals of a relaxation, a solution that takes a candidate or a conversion costs at least the relaxation and the reduced
cost of that. What is dearer than a width is left out. So a solution of what is left that costs no more than that width is as
good as if nothing had been left out; rows only make solutions dearer, so that this holds whatever rows are added later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.problem import Bools, Edge, Floats, Ints, Problem, RecomputeCounts, RetainedTerm, Row, Solution


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Window:
    """A smaller problem and the way back: what is left of each choice's candidates, and of each wire's arcs and layouts."""

    problem: Problem
    picks: Sequence[Ints]
    arcs: Sequence[Ints]
    nodes: Sequence[Ints]

    def expand(self, solution: Solution) -> Solution:
        """The solution of the original problem."""
        recompute = RecomputeCounts(
            choices=solution.recompute.choices,
            arcs={(w, int(self.arcs[w][arc])): members for (w, arc), members in solution.recompute.arcs.items()},
            offload={(w, int(self.nodes[w][node])): members for (w, node), members in solution.recompute.offload.items()},
        )
        return replace(
            solution,
            picks=tuple(int(left[pick]) for left, pick in zip(self.picks, solution.picks, strict=True)),
            arcs=tuple(tuple(left[list(used)].tolist()) for left, used in zip(self.arcs, solution.arcs, strict=True)),
            recompute=recompute,
        )

    def row(self, row: Row) -> Row:
        """A row of the original problem, said of the smaller one."""
        return replace(
            row,
            picks={choice: bytes_of[self.picks[choice]] for choice, bytes_of in row.picks.items()},
            uses={w: bytes_of[self.arcs[w]] for w, bytes_of in row.uses.items()},
            recompute={choice: bytes_of[self.picks[choice]] for choice, bytes_of in row.recompute.items()},
            kept=tuple(self._kept(kept) for kept in row.kept),
            least=tuple(replace(least, bytes=least.bytes[self.nodes[least.edge]]) for least in row.least),
        )

    def _kept(self, kept: RetainedTerm) -> RetainedTerm:
        nodes = self.nodes[kept.edge]
        return replace(kept, bytes=kept.bytes[nodes], homes=_first(kept.home(nodes)))


def whole_problem(problem: Problem) -> Window:
    """The window that leaves nothing out."""
    return Window(
        problem=problem,
        picks=[np.arange(len(choice.seconds)) for choice in problem.choices],
        arcs=[np.arange(len(edge.seconds)) for edge in problem.edges],
        nodes=[np.arange(edge.nodes) for edge in problem.edges],
    )


def window(
    problem: Problem, candidates: Sequence[Floats], arcs: Sequence[Floats], width: float, largest: float
) -> Window | None:
    """The part of a problem in which reduced costs (candidates by choice, arcs by edge) are at most `width` seconds.

    None if that is more than the share `largest` of all columns.
    """
    total = sum(map(len, candidates)) + sum(map(len, arcs))
    picks = [np.flatnonzero(costs <= width) for costs in candidates]
    used = [costs <= width for costs in arcs]
    if sum(map(len, picks)) + sum(int(mask.sum()) for mask in used) > largest * total:
        return None
    parts = [_part(edge, picks, mask) for edge, mask in zip(problem.edges, used, strict=True)]
    left = [kept for _, kept, _ in parts]
    smaller = Problem(
        choices=tuple(
            replace(
                choice, seconds=choice.seconds[pick], tie=choice.tie[pick],
                recompute=None if choice.recompute is None else choice.recompute[pick],
            )
            for choice, pick in zip(problem.choices, picks, strict=True)
        ),
        edges=tuple(edge for edge, _, _ in parts),
        fixed_charges=tuple(
            replace(fixed_charge, ways=tuple(replace(way, arcs=way.arcs[left[way.edge]]) for way in fixed_charge.ways))
            for fixed_charge in problem.fixed_charges
        ),
    )  # fmt: skip
    return Window(problem=smaller, picks=picks, arcs=left, nodes=[nodes for _, _, nodes in parts])


def _part(edge: Edge, picks: Sequence[Ints], used: Bools) -> tuple[Edge, Ints, Ints]:
    """What is left of a wire, with the arcs and layouts that it had: what lies in what is left is left, too."""
    there = np.zeros(edge.nodes, dtype=bool)
    there[edge.produced[picks[edge.producer]]] = True
    for consumer in edge.consumers:
        there[consumer.wants[picks[consumer.choice]]] = True
    there[edge.source[used]] = there[edge.target[used]] = True
    while True:
        below = edge.source[edge.free & there[edge.target]]
        if there[below].all():
            break
        there[below] = True
    nodes = np.flatnonzero(there)
    arcs = np.flatnonzero(used | (edge.free & there[edge.source] & there[edge.target]))
    place = np.cumsum(there) - 1
    return (
        replace(
            edge,
            nodes=len(nodes),
            produced=place[edge.produced[picks[edge.producer]]],
            consumers=tuple(replace(end, wants=place[end.wants[picks[end.choice]]]) for end in edge.consumers),
            source=place[edge.source[arcs]],
            target=place[edge.target[arcs]],
            seconds=edge.seconds[arcs],
            free=edge.free[arcs],
            conditional_costs=tuple(replace(one, seconds=one.seconds[arcs]) for one in edge.conditional_costs),
            recompute=None if edge.recompute is None else edge.recompute[arcs],
            offload=None if edge.offload is None else edge.offload[nodes],
        ),
        arcs,
        nodes,
    )


def _first(names: Ints) -> Ints:
    """For each entry the place of the first that is equal."""
    _, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    return np.asarray(first[inverse])
