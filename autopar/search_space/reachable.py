"""Constraint propagation: what no plan can use is left out before it is priced.

    x  I  --slice-->  S(0)  [op]  S(0) | P | R          ddp: no gather of x, so no candidate that wants more than S(0) or I

A candidate stays if, by allowed conversions, each of its operands can come from a remaining candidate of its producer, and each
of its results can reach one of every consumer; a layout stays if it lies on such a path (arc consistency, A. K. Mackworth,
"Consistency in networks of relations", Artificial Intelligence 8, 1977). Named strategies forbid most
conversions: of the 59,134 candidates of a Qwen3-Next on (2, 4), `fsdp` can use 2,653, `megatron` 8,819.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.analysis.analysis import Analysis
from autopar.analysis.repeated_blocks import ValueClass
from autopar.ir.conversion import FETCHES, WAYS
from autopar.ir.layout import I, Layout, numbered_axes
from autopar.ir.program import Value
from autopar.search_space.candidates import Candidate
from autopar.search_space.layout_graph import LayoutGraph, Mask, layout_graph
from autopar.search_space.strategies import StrategyConstraints

TO_INVARIANT = np.array([target == "I" and (source, target) not in FETCHES for source, target in WAYS])
SUMMED = list(WAYS).index(("I", "R"))
Nodes = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Conversions:
    """How the values of a class may be converted: a layout graph with the allowed conversions.

    `produced` is the node of each candidate of the producer, `wanted` those of the candidates of each consumer.
    """

    values: ValueClass
    graph: LayoutGraph
    produced: Nodes
    wanted: tuple[Nodes, ...]

    def viable(self, kept: Mapping[str, Mask]) -> Iterator[tuple[str, Mask]]:
        """Which candidates at each end have a path to a remaining one at the other end."""
        graph, producer = self.graph, self.values.producer
        there = _reached(len(graph.nodes), self.produced[kept[producer]], graph.source, graph.target)
        for (name, _), wants in zip(self.values.consumers, self.wanted, strict=True):
            yield name, there[wants]
            yield producer, _reached(len(graph.nodes), wants[kept[name]], graph.target, graph.source)[self.produced]

    def within(self, kept: Mapping[str, Mask]) -> Conversions:
        """The conversions on paths between remaining candidates."""
        graph, produced = self.graph, self.produced[kept[self.values.producer]]
        wanted = tuple(wants[kept[name]] for (name, _), wants in zip(self.values.consumers, self.wanted, strict=True))
        there = _reached(len(graph.nodes), produced, graph.source, graph.target)
        back = _reached(len(graph.nodes), np.concatenate(wanted), graph.target, graph.source)
        used = there & back
        place = np.cumsum(used) - 1
        return replace(
            self,
            graph=graph if used.all() else graph.part(nodes=used),
            produced=place[produced],
            wanted=tuple(place[wants] for wants in wanted),
        )


def reachable(
    analysis: Analysis,
    lists: Mapping[str, list[Candidate]],
    constraints: StrategyConstraints,
    flattened: tuple[tuple[int, ...], ...] = (),
) -> tuple[Mapping[str, list[Candidate]], list[Conversions]]:
    """The candidates of each class, and the conversions of each class of values, also over `flattened` axes for weights, that
    some plan can use.

    If no plan is possible everything is returned: the solver finds that out.
    """
    spaces = [
        _conversions(analysis, values, lists, constraints, flattened) for values in analysis.classes.values if values.consumers
    ]
    kept = _propagated({name: np.ones(len(found), dtype=np.bool_) for name, found in lists.items()}, spaces)
    if not all(mask.any() for mask in kept.values()):
        return lists, spaces
    left = {name: list(itertools.compress(found, kept[name].tolist())) for name, found in lists.items()}
    return left, [space.within(kept) for space in spaces]


def _propagated(kept: dict[str, Mask], spaces: Sequence[Conversions]) -> dict[str, Mask]:
    """What remains of each class at the fixed point."""
    near: dict[str, list[int]] = {name: [] for name in kept}
    for number, space in enumerate(spaces):
        for name in {space.values.producer, *(name for name, _ in space.values.consumers)}:
            near[name].append(number)
    waiting = deque(range(len(spaces)))
    while waiting:
        number = waiting.popleft()
        for name, mask in spaces[number].viable(kept):
            left = kept[name] & mask
            if (left != kept[name]).any():
                kept[name] = left
                waiting.extend(set(near[name]).difference(waiting))
    return kept


def _reached(nodes: int, start: Nodes, source: Nodes, target: Nodes) -> Mask:
    """Which nodes the arcs lead to from these."""
    found = np.zeros(nodes, dtype=np.bool_)
    found[start] = True
    while True:
        further = target[found[source]]
        if found[further].all():
            return found
        found[further] = True


def _conversions(
    analysis: Analysis,
    values: ValueClass,
    lists: Mapping[str, list[Candidate]],
    constraints: StrategyConstraints,
    flattened: tuple[tuple[int, ...], ...],
) -> Conversions:
    """The conversions that a plan may use of a class of values."""
    value, sizes = analysis.program.values[values.example], analysis.sizes
    made = [c.results[values.result] for c in lists[values.producer]]
    wanted = [[c.operands[position] for c in lists[name]] for name, position in values.consumers]
    states = tuple(
        tuple(sorted({layout[axis] for layouts in (made, *wanted) for layout in layouts})) for axis in range(len(sizes))
    )
    over = flattened if value.name in analysis.bucketed else ()
    graph = layout_graph(value.shape, sizes, states, analysis.blocks[value.name], over)
    allowed = _allowed(analysis, value, graph, made, itertools.chain(*wanted), constraints)
    return Conversions(
        values=values,
        graph=graph if allowed.all() else graph.part(arcs=allowed),
        produced=np.array([graph.index[layout] for layout in made], dtype=np.int64),
        wanted=tuple(np.array([graph.index[layout] for layout in layouts], dtype=np.int64) for layouts in wanted),
    )


def _allowed(
    analysis: Analysis,
    value: Value,
    graph: LayoutGraph,
    made: Iterable[Layout],
    wanted: Iterable[Layout],
    constraints: StrategyConstraints,
) -> Mask:
    """The conversions of a value's layout graph that a plan may use, given how it may be made and wanted.

    A weight does not become I on its way to R on an axis, which would delay the sum of its gradient: it becomes I only if it is
    used as I, and goes from I to R only if it may be stored as I.
    """
    numbered = numbered_axes(len(analysis.sizes))
    allowed = np.full(len(graph.source), value.name not in analysis.written)  # what is written in place is used as it is stored
    if value.name in analysis.bucketed and value.requires_grad:
        stored, used = (
            np.array([all(any(layout[axis] == I for layout in found) for axis in axes) for axes in numbered])
            for found in map(list, (made, wanted))
        )
        used &= analysis.step.microbatches == 1  # else what is I is so because it is stored so: see `added_up`
        allowed &= used[graph.axis] | ~TO_INVARIANT[graph.pair]
        allowed &= stored[graph.axis] | (graph.pair != SUMMED)
    if constraints.weights:
        axes = range(len(analysis.sizes))
        ways = np.array([[constraints.allows_conversion(value.name, axis, *pair) for pair in WAYS] for axis in axes])
        ways = np.array([ways[list(over)].all(axis=0) for over in numbered])
        allowed &= ways[graph.axis, graph.pair]
    return allowed


__all__ = ["Conversions", "reachable"]
