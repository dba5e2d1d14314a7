"""Rows that are exchanged between the ranks that have them and those that need them: distributed forms (`runtime.forms`).

    fetched     rows that are picked by an index lie on other ranks (tokens on their way to experts, and back)
    experts     products with one matrix for each group of rows, where every rank has some of the matrices

Who sends how much to whom depends on the data: every rank knows the whole index, or the ends of all groups, and so the sizes.
Gradients go back the way that the rows came.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from autopar.operators.families.contraction import astray
from autopar.runtime.world import Axis

Tensor = torch.Tensor


@torch.library.custom_op("autopar::exchange", mutates_args=())
def exchange(x: Tensor, since: list[int], to: list[int], rows: int, group: str) -> Tensor:
    """Rows for every rank, in their order, for those of every rank; `rows` are those that a rank has apart from this exchange.

    So many are counted as sent: what really is, or comes, is more on one rank and less on another.
    """
    issued = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), since, to, group)
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(issued)
    return arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """How many rows go to each rank, how many come from each, and how many a rank is counted to send."""

    axis: Axis
    to: Sequence[int]
    since: Sequence[int]
    rows: int

    def __call__(self, x: Tensor) -> Tensor:
        """What comes here."""
        found: Tensor = exchange(x, list(self.since), list(self.to), self.rows, self.axis.group)
        return found

    def back(self, x: Tensor) -> Tensor:
        """The same of rows that return."""
        found: Tensor = exchange(x, list(self.to), list(self.since), self.rows, self.axis.group)
        return found


# --- rows that are picked -------------------------------------------------------------------------------------------------


class _Picked(Protocol):
    axis: Axis
    count: int
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Fetched(torch.autograd.Function):
    """The index alone is kept, as aten does: plans go by it."""

    @staticmethod
    def forward(ctx: _Picked, axis: Axis, x: Tensor, index: Tensor) -> Tensor:
        ctx.axis, ctx.count = axis, len(x)
        ctx.save_for_backward(index)
        given, order, ways = _asked(axis, index, len(x))
        return ways(x[given])[order.argsort()]  # they come by owner

    @staticmethod
    def backward(ctx: _Picked, gradient: Tensor) -> tuple[None, Tensor, None]:
        (index,) = ctx.saved_tensors
        given, order, ways = _asked(ctx.axis, index, ctx.count)
        returned = ways.back(gradient[order])
        return None, returned.new_zeros(ctx.count, *returned.shape[1:]).index_add_(0, given, returned), None


def _asked(axis: Axis, index: Tensor, count: int) -> tuple[Tensor, Tensor, _Ways]:
    """The rows that lie here and go to others, in the order of these; the order in which own ones come, by owner; the ways."""
    wanted = (index % (axis.size * count)).view(axis.size, -1)  # of every rank; those below zero count from the end
    owners = wanted // count
    asked, own = owners == axis.index, owners[axis.index]
    to, since = torch.stack([asked.sum(1), own.bincount(minlength=axis.size)]).tolist()
    ways = _Ways(axis=axis, to=to, since=since, rows=len(own))
    return wanted[asked] - axis.index * count, own.argsort(stable=True), ways


def fetched(axis: Axis, x: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """`aten.index` of rows that are split by an index that is whole: this rank's part of what is picked."""
    (index,) = indices
    return _Fetched.apply(axis, x, index)  # type: ignore[no-any-return, no-untyped-call]


# --- groups of rows -------------------------------------------------------------------------------------------------------


class _Grouped(Protocol):
    axis: Axis
    stops: list[int]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Experts(torch.autograd.Function):
    """Rows are kept as they were given, and sent once more for the backward: few are."""

    @staticmethod
    def forward(ctx: _Grouped, axis: Axis, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.axis, ctx.stops = axis, ends.tolist()
        ctx.save_for_backward(rows, weight)
        ways, bounds = _regrouped(axis, len(rows), len(weight), ctx.stops)
        return ways.back(_products(ways(rows), weight, bounds))

    @staticmethod
    def backward(ctx: _Grouped, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        ways, bounds = _regrouped(ctx.axis, len(rows), len(weight), ctx.stops)
        came, gradient = ways(rows), ways(gradient)
        of_rows = ways.back(_products(gradient, weight.mT, bounds))
        pairs = zip(_groups(came, bounds), _groups(gradient, bounds), strict=True)
        return None, of_rows, torch.stack([one.mT @ other for one, other in pairs]), None


def _regrouped(axis: Axis, rows: int, matrices: int, stops: Sequence[int]) -> tuple[_Ways, list[int]]:
    """The ways of rows to the rank that has their matrix, and where its groups begin and end there."""
    chunks = [rank * rows for rank in range(axis.size + 1)]
    starts = [0, *(stops[matrices * rank - 1] for rank in range(1, axis.size)), chunks[-1]]
    to = [_overlap(chunks, axis.index, starts, rank) for rank in range(axis.size)]
    since = [_overlap(starts, axis.index, chunks, rank) for rank in range(axis.size)]
    first = starts[axis.index]
    bounds = [first, *stops[matrices * axis.index : matrices * (axis.index + 1)]]
    return _Ways(axis=axis, to=to, since=since, rows=astray(chunks[-1])), [bound - first for bound in bounds]


def _overlap(one: Sequence[int], here: int, other: Sequence[int], there: int) -> int:
    """How many numbers lie between two bounds of one list as well as between two of another."""
    return max(0, min(one[here + 1], other[there + 1]) - max(one[here], other[there]))


def _groups(rows: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    return [rows[start:stop] for start, stop in itertools.pairwise(bounds)]


def _products(rows: Tensor, weight: Tensor, bounds: Sequence[int]) -> Tensor:
    """Each group of rows times its matrix; zeros for rows after the last."""
    found = [group @ matrix for group, matrix in zip(_groups(rows, bounds), weight, strict=True)]
    return torch.cat([*found, rows.new_zeros(len(rows) - bounds[-1], weight.shape[-1])])


def experts(axis: Axis, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Groups of rows times a matrix each, as grouped products do; rows are split, and matrices, but not the groups' ends.

    If all groups are alike, every rank has the rows of its own: only those astray move.
    """
    return _Experts.apply(axis, rows, weight, ends)  # type: ignore[no-any-return, no-untyped-call]
