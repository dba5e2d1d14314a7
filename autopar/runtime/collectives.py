"""Conversions as functions that emitted code calls: one per (value, gradient) pair of `autopar.ir.conversion.CONVERSIONS`.

A function is named after what happens to the value and then to its gradient:

    y = all_gather__reduce_scatter(x, tp, 1)       S(1) to R on axis tp: gathered; its gradient is reduced and scattered
    y = slice__all_gather(x, dp, 0, 3)             I to S(0/3) on axis dp: cut; its gradient is gathered

`axis` is a `runtime.world.Axis`; `dim` and `blocks` say where the split lies: the local dim is `blocks` equal blocks, each cut
or joined alike (`Conversion.place`). Nothing is sent on an axis of one device. Conversions that do not move a split leave
`dim` and `blocks` out; the all-to-all has two of each. Every collective is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed  # registers the operators of `_c10d_functional`

from autopar.errors import LayoutError
from autopar.ir.conversion import CONVERSIONS, Conversion
from autopar.ir.layout import take
from autopar.runtime.world import Axis


class StoragePlace(NamedTuple):
    """Where a split lies on the local tensor, and for an all-to-all where it goes."""

    dim: int = 0
    blocks: int = 1
    to_dim: int = 0
    to_blocks: int = 1

    def back(self) -> StoragePlace:
        """The same for the gradient on its way back."""
        return StoragePlace(self.to_dim, self.to_blocks, self.dim, self.blocks)


# --- the four that send -------------------------------------------------------------------------------------------------


def _all_reduce(x: torch.Tensor, axis: Axis, place: StoragePlace) -> torch.Tensor:
    issued: torch.Tensor = torch.ops._c10d_functional.all_reduce(_plain(x.contiguous()), "sum", axis.group)
    return _again(wait(issued), x.dtype)


def _all_gather(x: torch.Tensor, axis: Axis, place: StoragePlace) -> torch.Tensor:
    return joined(wait(all_gathered(x, axis)).view(axis.size, *x.shape), place.dim, place.blocks)


def _reduce_scatter(x: torch.Tensor, axis: Axis, place: StoragePlace) -> torch.Tensor:
    return wait(reduce_scattered(_cut(x, place.dim, place.blocks, axis.size), axis))


def _all_to_all(x: torch.Tensor, axis: Axis, place: StoragePlace) -> torch.Tensor:
    dim, blocks, to_dim, to_blocks = _apart(place, axis.size)
    sent = _plain(_cut(x, to_dim, to_blocks, axis.size))
    ones = [1] * axis.size
    issued = torch.ops._c10d_functional.all_to_all_single(sent, ones, ones, axis.group)
    return joined(_again(wait(issued), x.dtype), dim, blocks)


def summed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over all ranks."""
    return _all_reduce(x, axis, StoragePlace())


def largest(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The maximum over all ranks."""
    return wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "max", axis.group))


def gathered(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`(size, *x.shape)`: what all ranks give."""
    return wait(all_gathered(x, axis)).view(axis.size, *x.shape)


def passed_on(held: tuple[torch.Tensor, torch.Tensor], axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """What the rank before this one holds; this one's goes to the next."""
    flat = torch.cat([x.reshape(-1) for x in held])
    shares = [0] * axis.size
    to, since = list(shares), list(shares)
    to[(axis.index + 1) % axis.size] = since[axis.index - 1] = flat.numel()
    came = wait(torch.ops._c10d_functional.all_to_all_single(flat, since, to, axis.group))
    first, second = torch.split(came, [x.numel() for x in held])
    return first.view(held[0].shape), second.view(held[1].shape)


def reduced(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`x` itself, in which the sum over all ranks will be once `wait` returns."""
    issued: torch.Tensor = torch.ops._c10d_functional.all_reduce_(_plain(x), "sum", axis.group)
    return _again(issued, x.dtype)


def all_gathered(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`(size, *x.shape)`, where what all ranks give will be once `wait` returns."""
    sent = _plain(x.contiguous().reshape(1, *x.shape))
    issued: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor(sent, axis.size, axis.group)
    return _again(issued, x.dtype)


def reduce_scattered(rows: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`rows.shape[1:]`, where the sum of this rank's row over all ranks will be once `wait` returns; `rows` is contiguous."""
    issued: torch.Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(_plain(rows), "sum", axis.size, axis.group)
    return _again(issued[0], rows.dtype)


def wait(issued: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a view of it, once it has arrived."""
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(issued)
    return waited


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Booleans as bytes, complex numbers as pairs: not every backend sends them."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.view(torch.uint8) if x.dtype is torch.bool else x


def _again(plain: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What was sent as `_plain` has it, in its own dtype."""
    return torch.view_as_complex(plain) if dtype.is_complex else plain.view(dtype)


def _cut(x: torch.Tensor, dim: int, blocks: int, parts: int) -> torch.Tensor:
    """`(parts, ...)`, contiguous: part i of every block of the dim."""
    return unfolded(x, dim, blocks, parts, -1).movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous()


def joined(parts: torch.Tensor, dim: int, blocks: int) -> torch.Tensor:
    """The inverse of cutting a dim: `(parts, ...)` as one tensor, contiguous; no copy for a single block of dim 0."""
    return unfolded(parts, dim + 1, blocks, -1).movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()


def unfolded(x: torch.Tensor, dim: int, *sizes: int) -> torch.Tensor:
    """One dim seen as several; the size of one may be -1, also of a tensor without elements."""
    return torch.unflatten(x, dim, sizes)


def _apart(place: StoragePlace, size: int) -> StoragePlace:
    """The place of an all-to-all where each count sees the tensor without the other digit.

    Within one dim the outer digit of the two stands left of the inner one: it is missing while the inner one is cut or joined.
    """
    dim, blocks, to_dim, to_blocks = place
    if dim != to_dim or blocks == to_blocks:
        return place
    inner = max(blocks, to_blocks)
    if inner % (min(blocks, to_blocks) * size):
        raise LayoutError(
            f"cannot go from {blocks} to {to_blocks} blocks of dim {dim} by one all-to-all over {size} devices",
            fix="gather the dim, then slice it",
        )
    return place._replace(**{"blocks" if blocks == inner else "to_blocks": inner // size})


# --- the four that do not ----------------------------------------------------------------------------------------------


def _identity(x: torch.Tensor, axis: Axis, place: StoragePlace) -> torch.Tensor:
    return x


def _keep(x: torch.Tensor, axis: Axis, place: StoragePlace) -> torch.Tensor:
    """Memory of its own on every rank: what is gathered again, and when, must not depend on the rank."""
    return x.clone() if axis.index == 0 else torch.zeros_like(x)


def _slice(x: torch.Tensor, axis: Axis, place: StoragePlace) -> torch.Tensor:
    """A copy: autograd may save the part, which must not keep the whole alive."""
    return take(x, place.dim, place.blocks, axis.size, axis.index).clone(memory_format=torch.contiguous_format)


def _pad(x: torch.Tensor, axis: Axis, place: StoragePlace) -> torch.Tensor:
    cut = unfolded(x, place.dim, place.blocks, -1)
    whole = cut.new_zeros(*cut.shape[: place.dim + 1], axis.size, *cut.shape[place.dim + 1 :])
    whole.select(place.dim + 1, axis.index).copy_(cut)
    return whole.flatten(place.dim, place.dim + 2)


PRIMITIVES: dict[str, Callable[[torch.Tensor, Axis, StoragePlace], torch.Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "identity": _identity,
    "keep": _keep,
    "slice": _slice,
    "pad": _pad,
}


# --- the functions of emitted code ---------------------------------------------------------------------------------------


class _Context(Protocol):
    axis: Axis
    place: StoragePlace
    backward: str


class _Convert(torch.autograd.Function):
    """One primitive for the value, another for its gradient."""

    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, axis: Axis, place: StoragePlace, forward: str, backward: str) -> torch.Tensor:
        ctx.axis, ctx.place, ctx.backward = axis, place, backward
        return PRIMITIVES[forward](x, axis, place)

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        back = ctx.place.back() if ctx.backward == "all_to_all" else ctx.place
        return PRIMITIVES[ctx.backward](gradient, ctx.axis, back), None, None, None, None


def _convert(x: torch.Tensor, axis: Axis, place: StoragePlace, forward: str, backward: str) -> torch.Tensor:
    if axis.size == 1:
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):
        return PRIMITIVES[forward](x, axis, place)
    converted: torch.Tensor = _Convert.apply(x, axis, place, forward, backward)  # type: ignore[no-untyped-call]
    return converted


def identity__all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """I to R."""
    return _convert(x, axis, StoragePlace(), "identity", "all_reduce")


def keep__identity(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """I to P."""
    return _convert(x, axis, StoragePlace(), "keep", "identity")


def identity__keep(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """R to I."""
    return _convert(x, axis, StoragePlace(), "identity", "keep")


def keep__keep(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """R to P."""
    return _convert(x, axis, StoragePlace(), "keep", "keep")


def all_reduce__all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """P to R."""
    return _convert(x, axis, StoragePlace(), "all_reduce", "all_reduce")


def all_reduce__identity(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """P to I."""
    return _convert(x, axis, StoragePlace(), "all_reduce", "identity")


def slice__all_gather(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1) -> torch.Tensor:
    """I to S."""
    return _convert(x, axis, StoragePlace(dim, blocks), "slice", "all_gather")


def slice__pad(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1) -> torch.Tensor:
    """R to S."""
    return _convert(x, axis, StoragePlace(dim, blocks), "slice", "pad")


def all_gather__reduce_scatter(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1) -> torch.Tensor:
    """S to R."""
    return _convert(x, axis, StoragePlace(dim, blocks), "all_gather", "reduce_scatter")


def all_gather__slice(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1) -> torch.Tensor:
    """S to I."""
    return _convert(x, axis, StoragePlace(dim, blocks), "all_gather", "slice")


def pad__slice(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1) -> torch.Tensor:
    """S to P."""
    return _convert(x, axis, StoragePlace(dim, blocks), "pad", "slice")


def reduce_scatter__all_gather(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1) -> torch.Tensor:
    """P to S."""
    return _convert(x, axis, StoragePlace(dim, blocks), "reduce_scatter", "all_gather")


def all_to_all__all_to_all(
    x: torch.Tensor, axis: Axis, dim: int, to_dim: int, blocks: int = 1, to_blocks: int = 1
) -> torch.Tensor:
    """S(dim/blocks) to S(to_dim/to_blocks); each count as if the other split of this axis were whole (`Conversion.place`)."""
    return _convert(x, axis, StoragePlace(dim, blocks, to_dim, to_blocks), "all_to_all", "all_to_all")


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


def place_of(conversion: Conversion, shape: tuple[int, ...], sizes: tuple[int, ...]) -> StoragePlace:
    """Where a conversion of a tensor of this whole shape cuts and joins the local tensor."""
    source, target = conversion.source[conversion.axis], conversion.target[conversion.axis]
    left = conversion.place(source, conversion.source, shape, sizes) if source.kind == "S" else None
    right = conversion.place(target, conversion.target, shape, sizes) if target.kind == "S" else None
    return StoragePlace(*left, *right) if left and right else StoragePlace(*(left or right or ()))


def call(
    conversion: Conversion, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[Callable[..., torch.Tensor], tuple[int, ...]]:
    """The function that carries out a conversion of a tensor of this whole shape, and its arguments after `(x, axis)`."""
    kinds = conversion.source[conversion.axis].kind, conversion.target[conversion.axis].kind
    dim, blocks, to_dim, to_blocks = place_of(conversion, shape, sizes)
    if kinds == ("S", "S"):
        return FUNCTIONS[kinds], (dim, to_dim) if blocks == to_blocks == 1 else (dim, to_dim, blocks, to_blocks)
    return FUNCTIONS[kinds], () if "S" not in kinds else (dim,) if blocks == 1 else (dim, blocks)
