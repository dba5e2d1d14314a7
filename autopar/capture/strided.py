"""Rewrites `as_strided`, which addresses memory, as an index into dims: programs have no memory layout.

    x: (8, 6), strides (6, 1)                         index = arange(4)[:, None] * 2 + arange(4)
    as_strided(x, (4, 4, 6), (12, 6, 1))       ->     index_select(x, 0, index.flatten()).reshape(4, 4, 6)

The strides are those of the user's tensors at trace time; tensors that a plan splits, sends or copies have other strides. Dims
that are read unchanged bypass the index, and may be split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from autopar.capture.nodes import source
from autopar.errors import CaptureError
from autopar.ir.program import Argument, Ref

LIMIT = 2**24  # elements of the part of a result that an index selects
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a result of `as_strided` is read from its operand.

    `order` lists the operand's dims: first those passed through, in the result's order, then the others in memory order. Among
    those others, an element of the result is at `first` plus the sum of its indices in the selected dims times their steps.
    """

    order: tuple[int, ...]
    kept: tuple[int, ...]  # dims of the result that are passed through
    selected: tuple[int, ...]  # the others
    first: int
    steps: tuple[int, ...]
    length: int  # elements of the operand's other dims


def reading(node: fx.Node) -> Reading:
    """How a traced `as_strided` reads its operand; raises CaptureError if it reads memory outside of it, or the operand is not
    one dense block, and for other forms of the operator."""
    if node.target is not torch.ops.aten.as_strided.default:
        raise CaptureError(f"{node.target} changes what lies in memory", at=source(node), fix="slices or an index instead")
    given = node.args[0]
    assert isinstance(given, fx.Node)
    tensor: torch.Tensor = given.meta["val"]
    named = dict(zip((one.name for one in node.target._schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    sizes, strides = (list(cast(Sequence[int], named[name])) for name in ("size", "stride"))
    offset = cast(int | None, named.get("storage_offset"))
    start = 0 if offset is None else offset - int(tensor.storage_offset())
    found = _reading(tensor.shape, tensor.stride(), sizes, strides, start)
    if found is None:
        raise CaptureError(
            "as_strided reads memory that does not lie as one block of its operand",
            at=source(node),
            fix="slices, unfold or an index instead",
        )
    return found


def _reading(
    shape: Sequence[int], held: Sequence[int], sizes: Sequence[int], strides: Sequence[int], start: int
) -> Reading | None:
    memory = sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -held[dim])
    dense = 1
    for dim in reversed(memory):
        if held[dim] != dense:
            return None
        dense *= shape[dim]
    for pairs in (_alike(shape, held, sizes, strides), {}):
        rest = [dim for dim in range(len(sizes)) if dim not in pairs]
        addresses = _addresses([sizes[dim] for dim in rest], [strides[dim] for dim in rest], start)
        if addresses is None or addresses.min() < 0 or addresses.max() >= dense:
            return None
        if any((addresses // held[dim] % shape[dim]).any() for dim in pairs.values()):
            continue
        others = [dim for dim in memory if dim not in pairs.values()]
        places = np.zeros_like(addresses)
        for dim in others:
            places = places * shape[dim] + addresses // held[dim] % shape[dim]
        first = int(places.flat[0])
        steps = [int(places[tuple(int(at == one) for at in range(len(rest)))] - first) if sizes[dim] > 1 else 0
                 for one, dim in enumerate(rest)]  # fmt: skip
        line = _addresses([sizes[dim] for dim in rest], steps, first)
        if line is None or not np.array_equal(line, places):
            continue
        single = [dim for dim in range(len(shape)) if dim not in memory]
        return Reading(
            order=(*pairs.values(), *others, *single),
            kept=tuple(pairs),
            selected=tuple(rest),
            first=first,
            steps=tuple(steps),
            length=math.prod(shape[dim] for dim in others),
        )
    return None


def _alike(shape: Sequence[int], held: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> dict[int, int]:
    """Dims of the result that may be dims of the operand, having equal size and stride."""
    known = {(shape[dim], held[dim]): dim for dim in range(len(shape)) if shape[dim] > 1}
    found: dict[int, int] = {}
    for at, kind in enumerate(zip(sizes, strides, strict=True)):
        if kind in known and known[kind] not in found.values():
            found[at] = known[kind]
    return found


def _addresses(sizes: Sequence[int], strides: Sequence[int], start: int) -> _Ints | None:
    """start + the sum of indices times strides, for every element; None if there are too many."""
    if math.prod(sizes) > LIMIT or not all(sizes):
        return None
    found: _Ints = np.full([1] * len(sizes), start, dtype=np.int64)
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        found = found + (np.arange(size, dtype=np.int64) * stride).reshape([-1 if at == dim else 1 for at in range(len(sizes))])
    return found


def taken(whole: Ref, reading: Reading, sizes: Sequence[int], emit: Callable[..., Ref]) -> Ref:
    """Emit the elements that a result of these sizes reads from its operand; `emit` appends an op."""
    kept, selected = ([sizes[dim] for dim in dims] for dims in (reading.kept, reading.selected))
    flat = emit("aten.reshape.default", emit("aten.permute.default", whole, reading.order), (*kept, reading.length))
    index: Argument = reading.first
    for dim, (size, step) in enumerate(zip(selected, reading.steps, strict=True)):
        line = emit("aten.arange.default", size, dtype=torch.int64, device=torch.device("meta"))
        column = emit("aten.reshape.default", line, tuple(-1 if at == dim else 1 for at in range(len(selected))))
        index = emit("aten.add.Tensor", emit("aten.mul.Tensor", column, step), index)
    if selected:
        index = emit("aten.reshape.default", index, (math.prod(selected),))
        flat = emit("aten.index_select.default", flat, len(kept), index)
    spread = emit("aten.reshape.default", flat, (*kept, *selected))
    order = (*reading.kept, *reading.selected)
    return emit("aten.permute.default", spread, tuple(order.index(dim) for dim in range(len(order))))


__all__ = ["Reading", "reading"]
