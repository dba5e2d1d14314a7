"""Conversions as functions that emitted code calls: one per (value, gradient) pair of `autopar.ir.conversion.CONVERSIONS`.

A function is named after what happens to the value and then to its gradient:

    y = all_gather__reduce_scatter(x, tp, 1)       S(1) to R on axis tp: all-gathered; its gradient is reduce-scattered
    y = slice__all_gather(x, dp, 0, 3)             I to S(0/3) on axis dp: sliced; its gradient is all-gathered

`axis` is a `runtime.world.Axis`; `dim` and `blocks` say how the tensor is split: the local dim consists of `blocks` equal
blocks, each cut or concatenated alike (`Conversion.place`). Conversions that do not move a split take neither; the all-to-all
takes two of each. An axis of one device communicates nothing. All-reduces are `in_place` if nothing else references their
operand (`autopar.memory.in_place_reductions`). These functions block; those of `async_collectives` do not.

The backward of a conversion is itself one of the thirteen, of which the forward is the backward: from X to Y on the way there,
from the dual of Y to the dual of X on the way back, where the dual of R is P, and I and S are their own. So they may be
differentiated any number of times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from autopar.errors import LayoutError
from autopar.ir.conversion import CONVERSIONS, Conversion
from autopar.ir.layout import take
from autopar.runtime.async_collectives import (
    all_gather_start,
    all_reduce_start,
    from_sendable,
    issue,
    reduce_scatter_start,
    to_sendable,
    wait,
)
from autopar.runtime.world import Axis


class SplitPosition(NamedTuple):
    """The split that a conversion cuts or concatenates, on the local tensor; an all-to-all has the new split in `to_*`."""

    dim: int = 0
    blocks: int = 1
    to_dim: int = 0
    to_blocks: int = 1

    def reversed(self) -> SplitPosition:
        """The position for the gradient of an all-to-all, which runs the other way."""
        return SplitPosition(self.to_dim, self.to_blocks, self.dim, self.blocks)


# --- primitives that communicate ---------------------------------------------------------------------------------------------


def _all_reduce(x: torch.Tensor, axis: Axis, position: SplitPosition) -> torch.Tensor:
    sent = issue("all_reduce", axis, torch.ops._c10d_functional.all_reduce, to_sendable(x.contiguous()), "sum")
    return from_sendable(wait(sent, "all_reduce", axis), x.dtype)


def all_reduce_in_place(x: torch.Tensor, axis: Axis, position: SplitPosition) -> torch.Tensor:
    """The sum over all ranks in the memory of `x`, where that is contiguous; autograd refuses what has saved it."""
    torch.autograd.graph.increment_version(x)
    return wait(all_reduce_start(x.detach().contiguous(), axis), "all_reduce", axis)


def _all_gather(x: torch.Tensor, axis: Axis, position: SplitPosition) -> torch.Tensor:
    return concat_blocks(
        wait(all_gather_start(x, axis), "all_gather", axis).view(axis.size, *x.shape), position.dim, position.blocks
    )


def _reduce_scatter(x: torch.Tensor, axis: Axis, position: SplitPosition) -> torch.Tensor:
    return wait(reduce_scatter_start(_chunks(x, position.dim, position.blocks, axis.size), axis), "reduce_scatter", axis)


def _all_to_all(x: torch.Tensor, axis: Axis, position: SplitPosition) -> torch.Tensor:
    dim, blocks, to_dim, to_blocks = _without_other_split(position, axis.size)
    sent = to_sendable(_chunks(x, to_dim, to_blocks, axis.size))
    ones = [1] * axis.size
    issued = issue("all_to_all", axis, torch.ops._c10d_functional.all_to_all_single, sent, ones, ones)
    return concat_blocks(from_sendable(wait(issued, "all_to_all", axis), x.dtype), dim, blocks)


def all_reduce_sum(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over all ranks, of which each rank uses its own copy: P to R."""
    return convert(x, axis, SplitPosition(), "all_reduce", "all_reduce")


def all_reduce_max(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The maximum over all ranks."""
    return wait(issue("all_reduce", axis, torch.ops._c10d_functional.all_reduce, x.contiguous(), "max"), "all_reduce", axis)


def all_gather_stack(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`(size, *x.shape)`: the tensors of all ranks, stacked by rank."""
    return wait(all_gather_start(x, axis), "all_gather", axis).view(axis.size, *x.shape)


def ring_step(pair: tuple[torch.Tensor, torch.Tensor], axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of a ring: send two tensors to the next rank, receive those of the previous rank."""
    flat = torch.cat([x.reshape(-1) for x in pair])
    output_splits, input_splits = [0] * axis.size, [0] * axis.size
    input_splits[(axis.index + 1) % axis.size] = output_splits[axis.index - 1] = flat.numel()
    exchange = torch.ops._c10d_functional.all_to_all_single
    received = wait(issue("ring_step", axis, exchange, flat, output_splits, input_splits), "ring_step", axis)
    first, second = torch.split(received, [x.numel() for x in pair])
    return first.view(pair[0].shape), second.view(pair[1].shape)


def _chunks(x: torch.Tensor, dim: int, blocks: int, parts: int) -> torch.Tensor:
    """`(parts, ...)`, contiguous: chunk i has part i of every block of the dim."""
    return unflatten(x, dim, blocks, parts, -1).movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous()


def concat_blocks(parts: torch.Tensor, dim: int, blocks: int) -> torch.Tensor:
    """The inverse of `_chunks`: `(parts, ...)` as one contiguous tensor; does not copy for a single block of dim 0."""
    return unflatten(parts, dim + 1, blocks, -1).movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()


def unflatten(x: torch.Tensor, dim: int, *sizes: int) -> torch.Tensor:
    """`torch.unflatten` with sizes as arguments; one may be -1, also for an empty tensor."""
    return torch.unflatten(x, dim, sizes)


def _without_other_split(position: SplitPosition, size: int) -> SplitPosition:
    """The position of an all-to-all within one dim, with the blocks of each split counted without the other split.

    Both splits of the dim are nested, the outer one left of the inner one. While the inner one is cut or concatenated, the
    tensor is not split by the outer one, so the outer one's blocks do not count.
    """
    dim, blocks, to_dim, to_blocks = position
    if dim != to_dim or blocks == to_blocks:
        return position
    inner = max(blocks, to_blocks)
    if inner % (min(blocks, to_blocks) * size):
        raise LayoutError(
            f"cannot go from {blocks} to {to_blocks} blocks of dim {dim} by one all-to-all over {size} devices",
            fix="gather the dim, then slice it",
        )
    return position._replace(**{"blocks" if blocks == inner else "to_blocks": inner // size})


# --- local primitives ----------------------------------------------------------------------------------------------------


def _identity(x: torch.Tensor, axis: Axis, position: SplitPosition) -> torch.Tensor:
    return x


def _keep(x: torch.Tensor, axis: Axis, position: SplitPosition) -> torch.Tensor:
    """Partial from replicated: rank 0 keeps the value, others have zeros.

    It copies on rank 0 too: recomputation depends on storages and must not depend on the rank. Neither must the compiled graph,
    whose collectives are ordered by what is around them.
    """
    if torch.compiler.is_compiling():
        return torch.where(x.new_full((), axis.index == 0, dtype=torch.bool), x, 0)
    return x.clone() if axis.index == 0 else torch.zeros_like(x)


def _slice(x: torch.Tensor, axis: Axis, position: SplitPosition) -> torch.Tensor:
    """A copy, because autograd may save the slice, and a view would keep the whole tensor alive."""
    return take(x, position.dim, position.blocks, axis.size, axis.index).clone(memory_format=torch.contiguous_format)


def _pad(x: torch.Tensor, axis: Axis, position: SplitPosition) -> torch.Tensor:
    cut = unflatten(x, position.dim, position.blocks, -1)
    whole = cut.new_zeros(*cut.shape[: position.dim + 1], axis.size, *cut.shape[position.dim + 1 :])
    whole.select(position.dim + 1, axis.index).copy_(cut)
    return whole.flatten(position.dim, position.dim + 2)


PRIMITIVES: dict[str, Callable[[torch.Tensor, Axis, SplitPosition], torch.Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "identity": _identity,
    "keep": _keep,
    "slice": _slice,
    "pad": _pad,
}


# --- functions that emitted code calls ------------------------------------------------------------------------------------


class _Context(Protocol):
    axis: Axis
    position: SplitPosition
    primitives: tuple[str, str]
    in_place: bool


class _Convert(torch.autograd.Function):
    """One primitive in the forward, another one in the backward, whose own backward is the first one again."""

    @staticmethod
    def forward(
        ctx: _Context, x: torch.Tensor, axis: Axis, position: SplitPosition, forward: str, backward: str, in_place: bool
    ) -> torch.Tensor:
        ctx.axis, ctx.position, ctx.primitives, ctx.in_place = axis, position, (forward, backward), in_place
        found = _primitive(forward, in_place)(x, axis, position)
        return found if found is x else found.detach()  # no view: what is returned to the user may be written to

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        in_place = ctx.in_place and not torch.is_grad_enabled()  # a gradient that is differentiated may have been saved
        return convert_back(gradient, ctx.axis, ctx.position, *ctx.primitives, in_place), None, None, None, None, None


def _primitive(name: str, in_place: bool) -> Callable[[torch.Tensor, Axis, SplitPosition], torch.Tensor]:
    """The function to run. When compiled, nothing is in place: torch.compile supports no collective that returns its
    operand.
    """
    return all_reduce_in_place if in_place and name == "all_reduce" and not torch.compiler.is_compiling() else PRIMITIVES[name]


def convert(
    x: torch.Tensor, axis: Axis, position: SplitPosition, forward: str, backward: str, in_place: bool = False
) -> torch.Tensor:
    """The conversion that applies one primitive to the value, and another one to its gradient; all-reduces are `in_place` where
    nothing else knows the tensor that is reduced."""
    if axis.size == 1:
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _primitive(forward, in_place)(x, axis, position)
    converted: torch.Tensor = _Convert.apply(x, axis, position, forward, backward, in_place)  # type: ignore[no-untyped-call]
    return converted


def convert_back(
    gradient: torch.Tensor, axis: Axis, position: SplitPosition, forward: str, backward: str, in_place: bool = False
) -> torch.Tensor:
    """Convert the gradient of a conversion: the dual conversion."""
    return convert(gradient, axis, position.reversed() if backward == "all_to_all" else position, backward, forward, in_place)


def identity__all_reduce(x: torch.Tensor, axis: Axis, in_place: bool = False) -> torch.Tensor:
    """I to R: the value is used on every rank, so its gradient is all-reduced."""
    return convert(x, axis, SplitPosition(), "identity", "all_reduce", in_place)


def keep__identity(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """I to P: rank 0 keeps the value, the others have zeros; the gradient is the same on every rank."""
    return convert(x, axis, SplitPosition(), "keep", "identity")


def identity__keep(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """R to I: nothing changes but the gradient, which only rank 0 passes on."""
    return convert(x, axis, SplitPosition(), "identity", "keep")


def keep__keep(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """R to P: rank 0 keeps the value, the others have zeros, and likewise for the gradient."""
    return convert(x, axis, SplitPosition(), "keep", "keep")


def all_reduce__all_reduce(x: torch.Tensor, axis: Axis, in_place: bool = False) -> torch.Tensor:
    """P to R: all-reduce of the value and of its gradient."""
    return convert(x, axis, SplitPosition(), "all_reduce", "all_reduce", in_place)


def all_reduce__identity(x: torch.Tensor, axis: Axis, in_place: bool = False) -> torch.Tensor:
    """P to I: all-reduce of the value; its gradient is complete on every rank."""
    return convert(x, axis, SplitPosition(), "all_reduce", "identity", in_place)


def slice__all_gather(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1) -> torch.Tensor:
    """I to S: every rank takes its chunk; the gradient is all-gathered."""
    return convert(x, axis, SplitPosition(dim, blocks), "slice", "all_gather")


def slice__pad(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1) -> torch.Tensor:
    """R to S: every rank takes its chunk; the gradient is padded with zeros, and partial."""
    return convert(x, axis, SplitPosition(dim, blocks), "slice", "pad")


def all_gather__reduce_scatter(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1) -> torch.Tensor:
    """S to R: all-gather; the gradient is reduce-scattered."""
    return convert(x, axis, SplitPosition(dim, blocks), "all_gather", "reduce_scatter")


def all_gather__slice(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1) -> torch.Tensor:
    """S to I: all-gather; every rank takes its chunk of the gradient."""
    return convert(x, axis, SplitPosition(dim, blocks), "all_gather", "slice")


def pad__slice(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1) -> torch.Tensor:
    """S to P: padded with zeros; every rank takes its chunk of the gradient."""
    return convert(x, axis, SplitPosition(dim, blocks), "pad", "slice")


def reduce_scatter__all_gather(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1) -> torch.Tensor:
    """P to S: reduce-scatter; the gradient is all-gathered."""
    return convert(x, axis, SplitPosition(dim, blocks), "reduce_scatter", "all_gather")


def all_to_all__all_to_all(
    x: torch.Tensor, axis: Axis, dim: int, to_dim: int, blocks: int = 1, to_blocks: int = 1
) -> torch.Tensor:
    """S(dim/blocks) to S(to_dim/to_blocks); each count as if the other split of this axis were whole (`Conversion.place`)."""
    return convert(x, axis, SplitPosition(dim, blocks, to_dim, to_blocks), "all_to_all", "all_to_all")


FUNCTIONS: dict[tuple[str, str], Callable[..., torch.Tensor]] = {
    ("I", "R"): identity__all_reduce,
    ("I", "S"): slice__all_gather,
    ("I", "P"): keep__identity,
    ("R", "S"): slice__pad,
    ("R", "I"): identity__keep,
    ("R", "P"): keep__keep,
    ("S", "R"): all_gather__reduce_scatter,
    ("S", "I"): all_gather__slice,
    ("S", "P"): pad__slice,
    ("S", "S"): all_to_all__all_to_all,
    ("P", "R"): all_reduce__all_reduce,
    ("P", "I"): all_reduce__identity,
    ("P", "S"): reduce_scatter__all_gather,
}
assert {pair: tuple(f.__name__.split("__")) for pair, f in FUNCTIONS.items()} == CONVERSIONS


def split_position(conversion: Conversion, shape: tuple[int, ...], sizes: tuple[int, ...]) -> SplitPosition:
    """Where a conversion of a tensor of this global shape cuts and concatenates the local tensor."""
    source, target = (layout[conversion.axes[0]] for layout in (conversion.source, conversion.target))
    left = conversion.place(source, conversion.source, shape, sizes) if source.kind == "S" else None
    right = conversion.place(target, conversion.target, shape, sizes) if target.kind == "S" else None
    return SplitPosition(*left, *right) if left and right else SplitPosition(*(left or right or ()))


def conversion_call(
    conversion: Conversion, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[Callable[..., torch.Tensor], tuple[int, ...]]:
    """The function that performs a conversion of a tensor of this global shape, and its arguments after `(x, axis)`."""
    kinds = conversion.kinds
    dim, blocks, to_dim, to_blocks = split_position(conversion, shape, sizes)
    if kinds == ("S", "S"):
        return FUNCTIONS[kinds], (dim, to_dim) if blocks == to_blocks == 1 else (dim, to_dim, blocks, to_blocks)
    if "S" not in kinds:
        return FUNCTIONS[kinds], ()
    return FUNCTIONS[kinds], (dim,) if blocks == 1 else (dim, blocks)
