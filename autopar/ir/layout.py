"""Layouts: how a tensor lies on the mesh, and what that says about its gradient.

On each mesh axis a value is in one of four states; a layout is one state per axis.

    I       invariant    the same on all ranks of the axis         gradient complete, the same everywhere
    R       replicated   the same on all ranks of the axis         gradient partial: addends
    P       partial      addends of the value                      gradient complete, the same everywhere
    S(d/k)  split        a chunk of each of k blocks of dim d      gradient: the matching chunk
    O(d)    own order    a chunk of dim d, rows in another order   gradient: the matching chunk
    H       on the host  stored in the host's memory               gradient there, too
    D       on the disk  stored in a file of the disk              gradient there, too

H and D occur on one axis only, that of memories (`autopar.ir.mesh.MEMORY`), which has one device and is the last. On it, a
stored tensor is H, D, or I if it is in the device's own memory. Every other value is I there.

A split is kept as a *digit*: write the index of the dim in mixed radix; the axis of n devices owns the digit
`(index // stride) % n`, and a rank holds the elements whose digit is its coordinate, in their old order. A contiguous
split of a dim of size D over n devices is the digit of stride D/n; a split blocked k times has stride D/(k n); axes nested in
one dim own digits of falling stride, outer to inner. So a layout has one form only, whatever the order in which it was made.

O is a split of values that a sort has reordered: a rank holds the rows of its own chunk of the sorted tensor, in the order in
which a sort of these alone puts them. Counts of rows are then O without a dim: each rank counts its own. Neither is converted
to anything, since no rank knows where its rows are among all of them; restoring their former order gives S
(`autopar.operators.own_order`).

Values that a program computes are cut into equal parts. A tensor that is stored or returned may also be cut by one axis that
does not divide it, into *chunks*: of ceil(D/n) each but the last ones, which are shorter or empty, as in torch's own `Shard`.

Text (`text`, `parse`): one entry per axis, "I, S(1)". Blocks count what is left of the dim after the axes outside it; several
axes that share a dim nest in mesh order unless numbered outer to inner: "S(0)/2, S(0)/1".
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from autopar.errors import LayoutError

Shape = tuple[int, ...]


class State(NamedTuple):
    """The state of a value on one mesh axis; `dim` and `stride` describe a split, and are 0 otherwise.

    S and P in a rank's `own` order are written O.

    It is a tuple because tuples hash and compare in C: planning looks up layouts millions of times.
    """

    kind: str  # "I", "R", "P", "S", "H", "D"
    dim: int = 0
    stride: int = 0
    own: bool = False

    @property
    def letter(self) -> str:
        """The letter by which the kind is written."""
        return "O" if self.own else self.kind

    def __repr__(self) -> str:
        return f"{self.letter}({self.dim}@{self.stride})" if self.kind == "S" else self.letter


I, R, P, H, D = State("I"), State("R"), State("P"), State("H"), State("D")
OWN_ADDENDS = State("P", own=True)
AWAY = (H, D)  # not on the device
Layout = tuple[State, ...]  # one state per mesh axis


@functools.cache
def numbered_axes(count: int) -> tuple[tuple[int, ...], ...]:
    """The numbered axes of a mesh with `count` axes: those of the mesh, then all groups of several adjacent ones, *flattened*.

    A tensor split over several axes is gathered in one message over their flattened axis, whose ranks are in the mesh's order.

    >>> numbered_axes(3)
    ((0,), (1,), (2,), (0, 1), (0, 1, 2), (1, 2))
    """
    runs = (tuple(range(start, stop)) for start in range(count) for stop in range(start + 2, count + 1))
    return (*((axis,) for axis in range(count)), *runs)


def split(dim: int, stride: int) -> State:
    """The state of an axis that owns the digit of this stride in this dim."""
    return State("S", dim, stride)


def away(layout: Layout) -> bool:
    """Whether a tensor in this layout lies on the host or on the disk, and not in the device's memory."""
    return layout[-1:] == (H,) or layout[-1:] == (D,)


def place(layout: Layout) -> State:
    """Where a tensor in this layout lies: H, D, or I for the device's memory."""
    return layout[-1] if away(layout) else I


def digits(layout: Layout, dim: int) -> list[tuple[int, int]]:
    """`(axis, stride)` of every axis that splits `dim`, outermost first."""
    return sorted(((a, s.stride) for a, s in enumerate(layout) if s.kind == "S" and s.dim == dim), key=lambda x: -x[1])


@functools.lru_cache(maxsize=1 << 18)
def valid(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether every split falls on whole elements and no two axes own the same digit."""
    return all(dim < len(shape) and _even(layout, dim, shape[dim], sizes) for dim in {s.dim for s in layout if s.kind == "S"})


def _even(layout: Layout, dim: int, size: int, sizes: tuple[int, ...]) -> bool:
    for axis, stride in digits(layout, dim):
        if stride < 1 or size % (stride * sizes[axis]):
            return False
        size = stride
    return True


def one_digit(layout: Layout, axes: Sequence[int], sizes: tuple[int, ...]) -> bool:
    """Whether the splits of adjacent axes form one split by their flattened axis: of one dim, each nested in the one before."""
    states = [layout[axis] for axis in axes]
    nested = all(
        outer.stride == inner.stride * sizes[axis]
        for (outer, inner), axis in zip(itertools.pairwise(states), axes[1:], strict=True)
    )
    return nested and len({state.dim for state in states}) == 1


def chunk(size: int, parts: int) -> int:
    """The length of the first chunk when a dim is cut into `parts`."""
    return -(-size // parts)


def _chunked(layout: Layout, dim: int, size: int, sizes: tuple[int, ...]) -> bool:
    """Whether a dim is split by a single axis, in chunks."""
    return [stride == chunk(size, sizes[axis]) > 0 for axis, stride in digits(layout, dim)] == [True]


@functools.lru_cache(maxsize=1 << 18)
def local_shape(shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one rank's part."""
    local = list(shape)
    for axis, state in enumerate(layout):
        if state.kind == "S":
            local[state.dim] //= sizes[axis]
    return tuple(local)


def blocks(layout: Layout, axis: int, shape: tuple[int, ...], sizes: tuple[int, ...], *, present: Sequence[int] = ()) -> int:
    """The number of blocks left of the digit of a split axis, in a local tensor from which the other digits are gone.

    Axes in `present` count as not yet removed (they are whole in the tensor at hand).
    """
    state = layout[axis]
    count = chunk(shape[state.dim], state.stride * sizes[axis])
    for other, stride in digits(layout, state.dim):
        if stride > state.stride and other not in present:
            count //= sizes[other]
    return count


def storable(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether a parameter may be stored so: states I, S, H and D, even parts or chunks, and splits that torch can join again.

    torch 2.13 joins a tensor wrongly (`full_tensor`) when a dim is both split by several axes and blocked, or when one dim is
    blocked and another one is split by several axes in an order that is not the mesh's.
    """
    dims = {state.dim for state in layout if state.kind == "S"}
    ways = (_even, _chunked)
    if not all(dim < len(shape) and any(way(layout, dim, shape[dim], sizes) for way in ways) for dim in dims):
        return False
    if any(state.own or state.kind not in "ISHD" for state in layout):
        return False
    nests = [[axis for axis, _ in digits(layout, dim)] for dim in range(len(shape))]
    blocked = [any(blocks(layout, axis, shape, sizes) > 1 for axis in nest) for nest in nests]
    ordered = all(nest == sorted(nest) for nest in nests)
    return not any(blocked) or (ordered and all(len(nest) == 1 for nest, cut in zip(nests, blocked, strict=True) if cut))


def take(tensor: torch.Tensor, dim: int, blocks: int, parts: int, index: int) -> torch.Tensor:
    """Part `index` of each of `blocks` equal blocks of a dim, every block cut into `parts`; a view if possible.

    A single block may be cut into chunks.
    """
    if blocks == 1:
        size, step = tensor.shape[dim], chunk(tensor.shape[dim], parts)
        start = min(index * step, size)
        return tensor.narrow(dim, start, min(step, size - start))
    cut = torch.unflatten(tensor, dim, (blocks, parts, -1)).select(dim + 1, index)
    return cut.flatten(dim, dim + 1)


def shard(tensor: torch.Tensor, layout: Layout, sizes: tuple[int, ...], coordinates: tuple[int, ...]) -> torch.Tensor:
    """One rank's part of a whole tensor: its I, R and S states; a P state keeps the tensor on coordinate 0, zeros elsewhere."""
    shape = tuple(tensor.shape)
    for dim in range(len(shape)):
        for axis, _ in digits(layout, dim):
            tensor = take(tensor, dim, blocks(layout, axis, shape, sizes), sizes[axis], coordinates[axis])
    if any(s.kind == "P" and coordinates[a] for a, s in enumerate(layout)):
        return torch.zeros_like(tensor)
    return tensor


def join(parts: Sequence[torch.Tensor], shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor from the parts of all ranks in row-major order: the inverse of `shard`; partial parts are added."""
    for axis in reversed(range(len(sizes))):
        groups = [parts[i : i + sizes[axis]] for i in range(0, len(parts), sizes[axis])]
        parts = [_join_axis(group, shape, layout, axis, sizes) for group in groups]
    return parts[0]


def _join_axis(
    group: Sequence[torch.Tensor], shape: tuple[int, ...], layout: Layout, axis: int, sizes: tuple[int, ...]
) -> torch.Tensor:
    state = layout[axis]
    if state.kind == "P":
        return functools.reduce(torch.add, group)
    if state.kind != "S":
        return group[0]
    left = blocks(layout, axis, shape, sizes, present=range(axis + 1, len(sizes)))
    cut = [torch.unflatten(part, state.dim, (left, -1)) for part in group]
    return torch.stack(cut, state.dim + 1).flatten(state.dim, state.dim + 2)


def text(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    """The layout as a person reads it: `"I, S(1)"`.

    >>> text((split(0, 2), split(0, 4)), (16,), (2, 4))
    'S(0)/2, S(0)/1'
    """
    entries = [s.letter for s in layout]
    for dim in sorted({s.dim for s in layout if s.kind == "S"}):
        axes = [axis for axis, _ in digits(layout, dim)]
        for place, axis in enumerate(axes):
            count = blocks(layout, axis, shape, sizes)
            number = "" if axes == sorted(axes) else f"/{place + 1}"
            entries[axis] += f"({dim}{f'/{count}' if count > 1 else ''}){number}"
    return ", ".join(entries)


ENTRY = re.compile(r"(?P<kind>[IRPOHD*])|[SO]\((?P<dim>-?\d+)(/(?P<blocks>0*[1-9]\d*))?\)(/(?P<place>\d+))?")


def parse(line: str, shape: tuple[int, ...], sizes: tuple[int, ...], name: str = "a tensor") -> tuple[State | None, ...]:
    """The layout that a text denotes, with None where it leaves an axis free (`*`).

    A nest that contains a free axis is read as if that axis did not split the dim. Raises LayoutError for text that is not a
    layout, or one that does not fit the shape.

    >>> parse("S(0)/2, S(0)/1", (16,), (2, 4))
    (S(0@2), S(0@4))
    """
    entries = [entry.strip() for entry in line.split(",")]
    found = [ENTRY.fullmatch(entry) for entry in entries]
    if len(entries) != len(sizes) or not all(found):
        raise LayoutError(
            f"{line!r} is not a layout of {name} on a mesh of {len(sizes)} axes",
            fix='one entry per axis, outermost first, each I, R, P, S(dim), S(dim/blocks) or *: "I, S(1)"',
        )
    states: list[State | None] = []
    nests: dict[int, list[tuple[int, int, int]]] = {}
    for axis, match in enumerate(m for m in found if m):
        if match["kind"]:
            states.append({"*": None, "O": OWN_ADDENDS}.get(match["kind"], State(match["kind"])))
            continue
        dim = int(match["dim"]) + (len(shape) if match["dim"].startswith("-") else 0)
        if not 0 <= dim < len(shape):
            what = f"{line!r} splits dim {match['dim']}, but {name} has {len(shape)} dims"
            raise LayoutError(what, shape=shape, fix="a dim that it has")
        nests.setdefault(dim, []).append((int(match["place"] or axis + 1), axis, int(match["blocks"] or 1)))
        states.append(None)
    for dim, nest in nests.items():
        index = torch.arange(shape[dim] if dim < len(shape) else 0)  # elements that rank 0 still holds
        for _, axis, count in sorted(nest):
            parts = sizes[axis]
            held = take(index, 0, count, parts, 0) if len(index) and len(index) % (count * parts) == 0 else index[:0]
            step = len(index) // (count * parts)
            stride = int(index[step] - index[0]) if len(held) and parts > 1 else step
            if not len(held) or not torch.equal(held, index[index // stride % parts == 0]):
                raise LayoutError(
                    f"cannot split dim {dim} of {name} over mesh axis {axis} as {line!r} says",
                    shape=f"{shape}: {len(index)} "
                    + (
                        f"is not a multiple of {parts}"
                        if count == 1
                        else f"elements are not {count} blocks of {parts} equal parts"
                    ),
                    fix="leave the dim whole on this axis",
                )
            index, states[axis] = held, State("S", dim, stride, entries[axis].startswith("O"))
    return tuple(states)


def each_split(layout: Layout) -> Iterator[tuple[int, State]]:
    """`(axis, state)` of every split axis."""
    return ((axis, state) for axis, state in enumerate(layout) if state.kind == "S")
