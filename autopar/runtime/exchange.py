"""Rows that are exchanged between the ranks that have them and those that need them: distributed forms (`runtime.forms`).

    fetched     rows that are picked by an index lie on other ranks (tokens on their way to experts, and back)
    experts     products with one matrix for each group of rows, where every rank has some of the matrices

Who sends how much to whom depends on the data: every rank knows the whole index, or the ends of all groups, and so the sizes.
Gradients go back the way that the rows came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from autopar.rules.contraction import astray
from autopar.runtime.world import Axis

aten = torch.ops.aten
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
    """How many rows go to each rank, how many come from each, and how many a rank has otherwise."""

    axis: Axis
    to: Sequence[int]
    since: Sequence[int]
    rows: int

    def back(self) -> _Ways:
        """The same for rows that return."""
        return _Ways(axis=self.axis, to=self.since, since=self.to, rows=self.rows)

    def send(self, x: Tensor) -> Tensor:
        """What comes here."""
        found: Tensor = exchange(x, list(self.since), list(self.to), self.rows, self.axis.group)
        return found

    def __call__(self, x: Tensor) -> Tensor:
        """The same, differentiated."""
        return _Exchange.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class _Context(Protocol):
    ways: _Ways


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, ways: _Ways) -> Tensor:
        ctx.ways = ways
        return ways.send(x)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ways.back().send(gradient), None


def fetched(axis: Axis, x: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """`aten.index` of rows that are split by an index that is whole: this rank's part of what is picked."""
    (index,) = indices
    wanted = (index % (axis.size * len(x))).view(axis.size, -1)  # of every rank; those below zero count from the end
    owners = wanted // len(x)
    asked, own = owners == axis.index, owners[axis.index]
    counts = torch.stack([asked.sum(1), own.bincount(minlength=axis.size)])
    to, since = counts.tolist()
    arrived = _Ways(axis=axis, to=to, since=since, rows=len(own))(x[wanted[asked] - axis.index * len(x)])
    return arrived[own.argsort(stable=True).argsort()]  # they come by owner


def experts(axis: Axis, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Groups of rows times a matrix each, as grouped products do; rows are split, and matrices, but not the groups' ends.

    If all groups are alike, every rank has the rows of its own: only those astray move. Rows after the last group give zeros.
    """
    count, total = len(weight), len(rows) * axis.size
    stops = ends.tolist()
    starts = [0, *(stops[count * rank - 1] for rank in range(1, axis.size)), total]
    chunks = [rank * len(rows) for rank in range(axis.size + 1)]
    to, since = ([_overlap(one, here, other, rank) for rank in range(axis.size)] for one, here, other in (
        (chunks, axis.index, starts), (starts, axis.index, chunks),
    ))  # fmt: skip
    ways = _Ways(axis=axis, to=to, since=since, rows=astray(total))
    first = starts[axis.index]
    bounds = [first, *stops[count * axis.index : count * (axis.index + 1)]]
    return ways.back()(_products(ways(rows), weight, [bound - first for bound in bounds]))


def _overlap(one: Sequence[int], here: int, other: Sequence[int], there: int) -> int:
    """How many numbers lie between two bounds of one list as well as between two of another."""
    return max(0, min(one[here + 1], other[there + 1]) - max(one[here], other[there]))


def _products(rows: Tensor, weight: Tensor, bounds: Sequence[int]) -> Tensor:
    """Each group of rows times its matrix."""
    if rows.is_cuda and rows.dtype is torch.bfloat16:
        ends = torch.tensor(bounds[1:], dtype=torch.int32, device=rows.device)
        return aten._grouped_mm(rows, weight, ends)  # type: ignore[no-any-return]
    groups = [rows[start:stop] @ one for start, stop, one in zip(bounds, bounds[1:], weight, strict=False)]
    return torch.cat([*groups, rows.new_zeros(len(rows) - bounds[-1], weight.shape[-1])])
