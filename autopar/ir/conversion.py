"""Conversions: how a value goes from one layout to another, one mesh axis at a time, and what its gradient does then.

Weights and their gradients may also cross several adjacent axes in one message, as if these were a single axis.

A conversion is a pair of primitives, one for the value and one for the gradient on its way back. Four primitives are
collectives, four are local:

    all_reduce      add the addends of all ranks                     identity   nothing
    all_gather      join the chunks of all ranks                     keep       keep on coordinate 0, zeros elsewhere
    reduce_scatter  add, and keep one's own chunk                    slice      keep one's own chunk
    all_to_all      cut along one dim, join along another            pad        own chunk in its place, zeros around it

A value on the host is brought to the device by one more conversion, on the axis of memories: it is *fetched* over the host's
bus, and its gradient is *stowed*, that is, copied to the host. A value on the disk is *read*, and its gradient is *written*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.ir.device import Bytes
from autopar.ir.layout import I, Layout, State, blocks, each_split, local_shape, numbered_axes, one_digit
from autopar.ir.program import Value, elements

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
TO_DEVICE, FROM_DEVICE = ("fetch", "read"), ("stow", "write")
COPIES = (*TO_DEVICE, *FROM_DEVICE)  # copies between the memories of one device
CARRIED = (*COLLECTIVES, *COPIES)  # messages: primitives that use a link
SUMS = ("all_reduce", "reduce_scatter")  # primitives that add

# (from, to) -> (forward, backward)
CONVERSIONS: dict[tuple[str, str], tuple[str, str]] = {
    ("I", "R"): ("identity", "all_reduce"),
    ("I", "S"): ("slice", "all_gather"),
    ("I", "P"): ("keep", "identity"),
    ("R", "S"): ("slice", "pad"),
    ("R", "I"): ("identity", "keep"),
    ("R", "P"): ("keep", "keep"),
    ("S", "R"): ("all_gather", "reduce_scatter"),
    ("S", "I"): ("all_gather", "slice"),
    ("S", "P"): ("pad", "slice"),
    ("S", "S"): ("all_to_all", "all_to_all"),
    ("P", "R"): ("all_reduce", "all_reduce"),
    ("P", "I"): ("all_reduce", "identity"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
}
FLATTENED = (("S", "R"), ("S", "I"), ("I", "R"))  # for weights: over several axes at once
FETCHES: dict[tuple[str, str], tuple[str, str]] = {("H", "I"): ("fetch", "stow"), ("D", "I"): ("read", "write")}
WAYS = {**CONVERSIONS, **FETCHES}  # conversions between ranks, and between memories


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Changes the state of a value on one axis, which belongs to the mesh or is flattened (`layout.numbered_axes`).

    `source` and `target` are whole layouts, which differ on that axis only.
    """

    axis: int
    source: Layout
    target: Layout

    @staticmethod
    def between(source: Layout, target: Layout, sizes: tuple[int, ...]) -> Conversion | None:
        """The conversion from one layout to another; None if that takes more than one."""
        changed = tuple(axis for axis, (before, after) in enumerate(zip(source, target, strict=True)) if before != after)
        numbered = numbered_axes(len(source))
        if changed not in numbered or (len(changed) > 1 and not flattens(source, target, changed, sizes)):
            return None
        step = Conversion(axis=numbered.index(changed), source=source, target=target)
        return None if source[changed[0]].own or target[changed[0]].own or step.kinds not in WAYS else step

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the mesh on which the state changes, outermost first."""
        return numbered_axes(len(self.source))[self.axis]

    @property
    def kinds(self) -> tuple[str, str]:
        """The kinds of state before and after, the same on all of its axes."""
        first = self.axes[0]
        return self.source[first].kind, self.target[first].kind

    @property
    def primitives(self) -> tuple[str, str]:
        """What happens to the value, and to the gradient on its way back."""
        return WAYS[self.kinds]

    def collective_bytes(self, shape: tuple[int, ...], itemsize: int, sizes: tuple[int, ...]) -> int:
        """Bytes of the largest buffer of this conversion's collectives on one rank (the gathered side of a gather)."""
        layouts = (self.source, self.target)
        local = (local_shape(shape, layout, sizes) for layout in layouts)
        return max(elements(s) for s in local) * itemsize

    def place(self, state: State, layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, int]:
        """`(dim, blocks)` of this axis's split on the local tensor: where to gather, slice, pad or scatter it.

        The other axes' digits are gone from the local tensor on both sides, so the count is the same before and after.
        """
        return state.dim, blocks(layout, self.axes[0], shape, sizes)

    def possible(self, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
        """Whether collectives support it: an all-to-all within a dim needs blocks whose cuts line up on both sides."""
        if self.kinds != ("S", "S") or self.source[self.axis].dim != self.target[self.axis].dim:
            return True
        outer, inner = sorted(blocks(layout, self.axis, shape, sizes) for layout in (self.source, self.target))
        return inner == outer or inner % (outer * sizes[self.axis]) == 0


def flattens(source: Layout, target: Layout, axes: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether one message can cross several adjacent axes: their states change alike, and their splits form a single one."""
    kinds = {(source[axis].kind, target[axis].kind) for axis in axes}
    own = any(layout[axis].own for layout in (source, target) for axis in axes)
    alike = len(kinds) == 1 and kinds <= set(FLATTENED) and not own
    return alike and (source[axes[0]].kind != "S" or one_digit(source, axes, sizes))


def scattered(layout: Layout, axis: int, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether the parts into which an axis splits a tensor are not contiguous in it: collectives send and receive contiguous
    parts, so these are copied before sending, or when they are joined."""
    state = layout[axis]
    if state.kind != "S":
        return False
    return math.prod(local_shape(shape, layout, sizes)[: state.dim]) * blocks(layout, axis, shape, sizes) > 1


def copies(primitive: str, *, before: bool, after: bool) -> int:
    """How often a primitive copies the larger of its tensors on the device; `before` and `after` say whether the parts of its
    operand and of its result are `scattered`."""
    return {"all_gather": before, "reduce_scatter": after, "all_to_all": before + after}.get(primitive, 0)


def beside(step: Conversion, value: Value, sizes: tuple[int, ...], *, back: bool = False) -> Bytes:
    """The memory that a primitive takes while it runs, besides its operand and its result.

    `back` asks for the gradient's primitive.
    """
    ends = (step.target, step.source) if back else (step.source, step.target)
    before, after = (scattered(layout, step.axes[0], value.shape, sizes) for layout in ends)
    largest = max(value.local_bytes(layout, sizes) for layout in ends)
    return largest * copies(step.primitives[back], before=before, after=after)


def arrival(layout: Layout, given: Layout | None = None) -> tuple[Conversion, ...]:
    """The slices that bring an input to a layout of I and S, axis by axis; it arrives laid out as `given`, by default whole."""
    steps, before = [], given or (I,) * len(layout)
    for axis, state in each_split(layout):
        if before[axis] == state:
            continue
        after = (*before[:axis], state, *before[axis + 1 :])
        steps.append(Conversion(axis=axis, source=before, target=after))
        before = after
    return tuple(steps)
