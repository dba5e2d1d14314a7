"""Reduced-cost fixing: the part of a problem in which every solution lies that costs little more than the relaxation.

By the duals of a relaxation, a solution that uses a candidate or an arc costs at least the relaxation plus its reduced cost.
Columns with a reduced cost above `width` are fixed to zero, that is, left out. So if the rest has a solution that costs at most
`width` more than the relaxation, nothing better was left out; rows only make solutions more expensive, so this holds whatever
rows are added later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.overlap import Load
from autopar.solver.problem import Bools, Edge, Floats, Ints, Problem, RecomputeCounts, RetainedTerm, Row, Solution


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Window:
    """A smaller problem and the mapping back: the remaining candidates of each choice, arcs and layouts of each edge."""

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
        """A row of the original problem as a row of the smaller one."""
        return replace(
            row,
            picks={choice: bytes_of[self.picks[choice]] for choice, bytes_of in row.picks.items()},
            uses={w: bytes_of[self.arcs[w]] for w, bytes_of in row.uses.items()},
            recompute={choice: bytes_of[self.picks[choice]] for choice, bytes_of in row.recompute.items()},
            retained=tuple(self._kept(kept) for kept in row.retained),
            in_flight=tuple(replace(least, bytes=least.bytes[self.nodes[least.edge]]) for least in row.in_flight),
        )

    def _kept(self, kept: RetainedTerm) -> RetainedTerm:
        nodes = self.nodes[kept.edge]
        return replace(kept, bytes=kept.bytes[nodes], storages=_first(kept.storage(nodes)))


def only(problem: Problem, solution: Solution) -> Window:
    """What a solution uses: one candidate of each choice, and its routes."""
    used = [np.isin(np.arange(len(edge.seconds)), arcs) for edge, arcs in zip(problem.edges, solution.arcs, strict=True)]
    return selected(problem, [np.array([pick]) for pick in solution.picks], used)


def whole_problem(problem: Problem) -> Window:
    """The window with the whole problem."""
    return Window(
        problem=problem,
        picks=[np.arange(len(choice.seconds)) for choice in problem.choices],
        arcs=[np.arange(len(edge.seconds)) for edge in problem.edges],
        nodes=[np.arange(edge.nodes) for edge in problem.edges],
    )


def window(outer: Window, candidates: Sequence[Floats], arcs: Sequence[Floats], width: float, largest: float) -> Window | None:
    """The part of a window in which reduced costs (candidates by choice, arcs by edge) are at most `width` seconds.

    None if that is more than the share `largest` of all columns.
    """
    total = sum(map(len, candidates)) + sum(map(len, arcs))
    picks = [np.flatnonzero(costs <= width) for costs in candidates]
    used = [costs <= width for costs in arcs]
    if sum(map(len, picks)) + sum(int(mask.sum()) for mask in used) > largest * total:
        return None
    inner = selected(outer.problem, picks, used)
    return Window(
        problem=inner.problem,
        picks=[before[left] for before, left in zip(outer.picks, inner.picks, strict=True)],
        arcs=[before[left] for before, left in zip(outer.arcs, inner.arcs, strict=True)],
        nodes=[before[left] for before, left in zip(outer.nodes, inner.nodes, strict=True)],
    )


def selected(problem: Problem, picks: Sequence[Ints], used: Sequence[Bools]) -> Window:
    """The part of a problem with these candidates and arcs, and the layouts at their ends."""
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
            replace(charge, triggers=tuple(replace(one, arcs=one.arcs[left[one.edge]]) for one in charge.triggers))
            for charge in problem.fixed_charges
        ),
        regions=tuple(replace(one, ahead=Load()).mapped(lambda load: load.within(picks, left)) for one in problem.regions),
    )  # fmt: skip
    return Window(problem=smaller, picks=picks, arcs=left, nodes=[nodes for _, _, nodes in parts])


def _part(edge: Edge, picks: Sequence[Ints], used: Bools) -> tuple[Edge, Ints, Ints]:
    """The remaining part of an edge, with its arcs and layouts: aliases of a remaining layout remain too."""
    present = np.zeros(edge.nodes, dtype=bool)
    present[edge.produced[picks[edge.producer]]] = True
    for consumer in edge.consumers:
        present[consumer.wants[picks[consumer.choice]]] = True
    present[edge.source[used]] = present[edge.target[used]] = True
    while True:
        below = edge.source[edge.free & present[edge.target]]
        if present[below].all():
            break
        present[below] = True
    nodes = np.flatnonzero(present)
    arcs = np.flatnonzero(used | (edge.free & present[edge.source] & present[edge.target]))
    place = np.cumsum(present) - 1
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
    """For each entry the place of the first one that is equal."""
    _, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    return np.asarray(first[inverse])
