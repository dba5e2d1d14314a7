"""The layouts that a value may take, and the conversions between them: the graph through which routes run.

shape (8, 6), axis of 2   ->   nodes I, R, P, S(0), S(1);  arcs: every conversion of one axis
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.analysis.block_counts import Blocks
from autopar.ir.conversion import FETCHES, FLATTENED, WAYS, flattens, scattered
from autopar.ir.layout import I, Layout, P, R, State, away, local_shape, numbered_axes, split, valid

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LayoutGraph:
    """The layout graph of all values of one shape: nodes are layouts, arcs change the state of one axis, or of a flattened one.

    `source`, `target` and `axis` (by `numbered_axes`) hold one entry per arc; `scattered` two, of whether parts lie apart
    before and after it (`conversion.scattered`); `elements` is the local size of each node on the device.
    """

    nodes: tuple[Layout, ...]
    index: dict[Layout, int]
    elements: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    axis: npt.NDArray[np.int64]
    pair: npt.NDArray[np.int64]  # place of (from kind, to kind) in WAYS
    scattered: Mask

    def part(self, *, nodes: Mask | None = None, arcs: Mask | None = None) -> LayoutGraph:
        """The subgraph of these nodes and arcs, by default all."""
        if nodes is None:
            nodes = np.ones(len(self.nodes), dtype=np.bool_)
        arcs = nodes[self.source] & nodes[self.target] & (True if arcs is None else arcs)
        place, kept = np.cumsum(nodes) - 1, tuple(itertools.compress(self.nodes, nodes.tolist()))
        return LayoutGraph(
            nodes=kept, index={layout: i for i, layout in enumerate(kept)}, elements=self.elements[nodes],
            source=place[self.source[arcs]], target=place[self.target[arcs]], axis=self.axis[arcs], pair=self.pair[arcs],
            scattered=self.scattered[arcs],
        )  # fmt: skip


PAIRS = {pair: i for i, pair in enumerate(WAYS)}


def states(shape: tuple[int, ...], sizes: tuple[int, ...], blocks: Blocks, differentiable: bool) -> list[list[State]]:
    """Per axis, every state that a value of this shape may have; an axis of one device has only I."""
    per_axis: list[list[State]] = []
    for axis, size in enumerate(sizes):
        plain = [I, R, P] if differentiable else [I, P]
        found = plain if size > 1 else [I]
        if size > 1:
            others = [s for a, s in enumerate(sizes) if a != axis]
            for dim, length in enumerate(shape):
                found += [split(dim, stride) for stride in _strides(length, size, others, blocks[dim])]
        per_axis.append(found)
    return per_axis


def _strides(length: int, size: int, others: list[int], blocks: tuple[int, ...]) -> list[int]:
    """Strides of a digit of `size` in a dim: whole blocks, and nested inside any choice of the other axes."""
    found: dict[int, None] = {}
    for count in blocks:
        for nest in range(len(others) + 1):
            for outer in itertools.combinations(others, nest):
                stride, rest = divmod(length, count * size * int(np.prod(outer, dtype=np.int64)))
                if not rest and stride:
                    found[stride] = None
    return list(found)


@functools.lru_cache(maxsize=1 << 18)
def placeable(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...], blocks: Blocks) -> bool:
    """Whether a layout is among those generated for a value of this shape."""
    return valid(layout, shape, sizes) and _nested_tightly(layout, shape, sizes, blocks)


def _nested_tightly(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...], blocks: Blocks) -> bool:
    """Whether the axes that share a dim nest without gaps inside its blocks: only such layouts are generated."""
    for dim in {s.dim for s in layout if s.kind == "S"}:
        owned = sorted(((s.stride, sizes[a]) for a, s in enumerate(layout) if s.kind == "S" and s.dim == dim), reverse=True)
        starts = {shape[dim] // count for count in blocks[dim]}  # where the digits of a block begin
        edge = 0
        for stride, size in owned:
            if stride * size != edge and stride * size not in starts:
                return False
            edge = stride
    return True


@functools.lru_cache(maxsize=4096)
def layout_graph(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    allowed: tuple[tuple[State, ...], ...],
    blocks: Blocks,
    flattened: tuple[tuple[int, ...], ...] = (),
) -> LayoutGraph:
    """The layout graph over the given states per axis, with arcs over these flattened axes, too."""
    nodes = tuple(
        layout
        for layout in itertools.product(*allowed)
        if placeable(layout, shape, sizes, blocks) and not (away(layout) and {R, P} & set(layout))
    )
    index = {layout: i for i, layout in enumerate(nodes)}
    found = [arc for i, layout in enumerate(nodes) for arc in _arcs(i, layout, index, allowed, sizes)]
    found += [arc for i, layout in enumerate(nodes) for arc in _flattened_arcs(i, layout, index, flattened, sizes)]
    source, target, axis, pair = np.array(found, dtype=np.int64).reshape(-1, 4).T
    sizes_of = np.array([0 if away(layout) else np.prod(local_shape(shape, layout, sizes), dtype=np.int64) for layout in nodes])
    first = [axes[0] for axes in numbered_axes(len(sizes))]
    apart = np.array([[scattered(layout, a, shape, sizes) for a in first] for layout in nodes], dtype=np.bool_)
    ends = np.stack([apart[source, axis], apart[target, axis]], axis=1)
    return LayoutGraph(
        nodes=nodes, index=index, elements=sizes_of, source=source, target=target, axis=axis, pair=pair, scattered=ends
    )


def _arcs(
    i: int, layout: Layout, index: dict[Layout, int], allowed: tuple[tuple[State, ...], ...], sizes: tuple[int, ...]
) -> Iterator[tuple[int, int, int, int]]:
    for axis, state in enumerate(layout):
        for other in allowed[axis]:
            kinds = state.kind, other.kind
            pair = PAIRS.get(kinds)
            if away(layout) and kinds not in FETCHES:  # it comes to the device as it is stored
                continue
            if state.own or other.own or other == state or pair is None or not _apart(state, other, sizes[axis]):
                continue
            there = index.get((*layout[:axis], other, *layout[axis + 1 :]))
            if there is not None:
                yield i, there, axis, pair


def _flattened_arcs(
    i: int, layout: Layout, index: dict[Layout, int], flattened: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]
) -> Iterator[tuple[int, int, int, int]]:
    for axes in flattened:
        for kinds in FLATTENED:
            target = tuple(State(kinds[1]) if axis in axes else state for axis, state in enumerate(layout))
            if layout[axes[0]].kind == kinds[0] and target in index and flattens(layout, target, axes, sizes):
                yield i, index[target], numbered_axes(len(sizes)).index(axes), PAIRS[kinds]


def _apart(state: State, other: State, size: int) -> bool:
    """Whether a split can move by one all-to-all: to another dim, or to a digit of the same dim that does not overlap."""
    if state.kind != other.kind or state.dim != other.dim:
        return True
    low, high = sorted((state.stride, other.stride))
    return high % (low * size) == 0
