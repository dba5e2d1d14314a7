"""Indices where a mask is true, and the rows that are taken from there and put back.

A mixture of experts that is written as a loop looks up which tokens chose an expert, and puts its results back there:

    i, k = where(chosen == e)                       mask = chosen == e                                     (n, 2)
    r = expert(x[i])                          ->    r = expert(x at every place)                           (2 n, 8)
    y.index_add_(0, i, r * w[i, k, None])           y = y + sum(where(mask, r * w at every place, 0), 1)

The rows of such a selection are the places of its mask, flattened with the longest dim first: the tokens, so they can be split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.capture import equal_values
from autopar.capture.selection import Selection, Selections
from autopar.ir.layout import Shape
from autopar.ir.program import Argument, Ref, refs
from autopar.operators import row_of
from autopar.operators.facts import OpKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """An index made of a selection's indices: maps dims of the selection's mask to the indexed dims of a tensor.

    In the indexed result, `front` of the other dims come before the rows.
    """

    selection: Selection
    dims: dict[int, int]  # from dims of the mask to dims of the tensor
    front: int

    def rows_last(self, rank: int) -> tuple[list[int], list[int], list[int]]:
        """The dims of the tensor: those before the rows, the indexed ones in the selection's order, those after the rows."""
        others = [dim for dim in range(rank) if dim not in self.dims.values()]
        return others[: self.front], [self.dims[dim] for dim in self.selection.order if dim in self.dims], others[self.front :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Rows put into a tensor: `result` is `into` after `rows` were written at `places`, or added there `times` as often."""

    result: Ref
    into: Ref
    rows: Ref
    places: Places
    adds: bool
    times: Argument = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedPlaces:
    """Reads rows at the indices of selections, and writes them there; `one` emits an op with one result."""

    selections: Selections
    one: Callable[..., Ref]

    def of_mask(self, selection: Selection) -> tuple[Ref, ...]:
        """The indices of a selection, one tensor per dim of its mask."""
        found = list[Ref]()
        sizes = [selection.shape[dim] for dim in selection.order]
        for dim in range(len(selection.shape)):
            line = self.one("aten.arange.default", selection.shape[dim], dtype=torch.int64, device=torch.device("meta"))
            line = self.one(
                "aten.reshape.default", line, tuple(sizes[at] if of == dim else 1 for at, of in enumerate(selection.order))
            )
            line = self.one("aten.reshape.default", self.one("aten.expand.default", line, tuple(sizes)), (selection.rows,))
            self.selections.held[line.name] = {0: selection}
            self.selections.places[line.name] = (selection, dim)
            found.append(line)
        return tuple(found)

    def parts(self, named: Mapping[str, Argument]) -> tuple[Argument, ...]:
        """The index of each leading dim of a tensor, for an operator that takes a tuple of them, or one index and its dim."""
        if isinstance(parts := named.get("indices"), tuple):
            return parts
        x, dim = named["self"], named["dim"]
        assert isinstance(x, Ref)
        assert isinstance(dim, int)
        return (*(None,) * (dim % len(self.shape(x))), named["index"])

    def index(self, x: Ref, parts: Sequence[Argument]) -> Places | None:
        """An index that consists of a selection's indices; None for any other."""
        at = [dim for dim, one in enumerate(parts) if one is not None]
        found = [self.selections.places.get(one.name) if isinstance(one, Ref) else None for one in parts]
        known = [one for one in found if one is not None]
        if not known or len(known) < len(at) or x.name in self.selections.held:
            return None
        selection, dims = known[0][0], {dim: place for place, (_, dim) in zip(at, known, strict=True)}
        alone = len(dims) == len(at) and all(one is selection for one, _ in known)
        sizes = [self.shape(x)[place] == selection.shape[dim] for dim, place in dims.items()]
        if not alone or not all(sizes) or any(self.shape(one) != (selection.rows,) for one in refs(tuple(parts))):
            return None
        return Places(selection=selection, dims=dims, front=at[0] if at == list(range(at[0], at[-1] + 1)) else 0)

    def rows_shape(self, x: Ref, places: Places) -> Shape:
        """The shape of the rows read from a tensor."""
        before, _, after = places.rows_last(len(self.shape(x)))
        sizes = self.shape(x)
        return (*(sizes[dim] for dim in before), places.selection.rows, *(sizes[dim] for dim in after))

    def taken(self, x: Ref, places: Places) -> Ref:
        """The rows of a tensor at all places of a mask; they are equal along mask dims that do not index the tensor."""
        source, (before, indexed, after) = x, places.rows_last(len(self.shape(x)))
        sizes = self.shape(x)
        of_mask = tuple(places.selection.shape[dim] for dim in places.selection.order)
        single = tuple(size if dim in places.dims else 1 for dim, size in zip(places.selection.order, of_mask, strict=True))
        first, last = tuple(sizes[dim] for dim in before), tuple(sizes[dim] for dim in after)
        x = self.permuted(x, (*before, *indexed, *after))
        if single != of_mask:
            x = self.one(
                "aten.expand.default", self.one("aten.reshape.default", x, (*first, *single, *last)), (*first, *of_mask, *last)
            )
        rows = self.one("aten.reshape.default", x, (*first, places.selection.rows, *last))
        self.selections.held[rows.name] = {len(first): places.selection}
        self.selections.entrances[rows.name] = (source, places)
        return rows

    def back(self, rows: Ref, places: Places, rank: int) -> Ref:
        """The inverse of `taken`: rows of all places, put where they were taken from in a tensor with `rank` dims; sums over
        mask dims that do not index it."""
        before, indexed, after = places.rows_last(rank)
        selection, sizes = places.selection, self.shape(rows)
        front = len(before)
        of_mask = tuple(selection.shape[dim] for dim in selection.order)
        found = self.one("aten.reshape.default", rows, (*sizes[:front], *of_mask, *sizes[front + 1 :]))
        if others := tuple(front + at for at, dim in enumerate(selection.order) if dim not in places.dims):
            found = self.one("aten.sum.dim_IntList", found, others)
        stand = (*before, *indexed, *after)
        return self.permuted(found, tuple(stand.index(dim) for dim in range(rank)))

    def added(self, x: Ref, places: Places, rows: Ref) -> Ref | None:
        """The summand, if the rows only add to what a tensor has at these places: x[i] = x[i] + rows; else None."""
        builder = self.selections.builder
        made, dtype = {op.results[0].name: op for op in builder.ops[-8:]}, builder.values[rows.name].dtype  # close by
        while (op := made.get(rows.name)) and row_of(op).kind in (OpKind.SAME, OpKind.CAST, OpKind.EXPAND, OpKind.RESHAPE):
            rows = Ref(op.operands[0])
            if builder.values[rows.name].dtype != dtype:
                return None
        if op is None or op.target != "aten.add.Tensor" or op.kwargs:
            return None
        for own, more in (op.args[:2], op.args[1::-1]):
            if isinstance(own, Ref) and isinstance(more, Ref) and self.shape(more) == self.shape(rows):
                taken = self.selections.entrances.get(self.selections.unmasked(own).name)
                if taken is not None and taken[1] == places and equal_values.reshaped(builder, taken[0], x):
                    return more
        return None

    def mask(self, places: Places, rank: int) -> Ref:
        """A mask of where rows are put back, with the dims of the tensor; of size 1 where the tensor is not indexed."""
        selection, (before, indexed, after) = places.selection, places.rows_last(rank)
        found = self.one("aten.reshape.default", selection.mask, tuple(selection.shape[dim] for dim in selection.order))
        if others := tuple(at for at, dim in enumerate(selection.order) if dim not in places.dims):
            found = self.one("aten.any.dims", found, others)
        stand = (*before, *indexed, *after)
        found = self.one("aten.reshape.default", found, (*(1 for _ in before), *self.shape(found), *(1 for _ in after)))
        return self.permuted(found, tuple(stand.index(dim) for dim in range(rank)))

    def permuted(self, x: Ref, order: tuple[int, ...]) -> Ref:
        """A tensor with its dims in another order."""
        return x if order == tuple(range(len(order))) else self.one("aten.permute.default", x, order)

    def shape(self, ref: Ref) -> Shape:
        return self.selections.builder.values[ref.name].shape


def longest_first(shape: Shape) -> tuple[int, ...]:
    """The order of a mask's dims in which its places become rows."""
    return tuple(sorted(range(len(shape)), key=lambda dim: -shape[dim]))
