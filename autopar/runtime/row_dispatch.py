"""Rows dispatched between ranks by all-to-all, as in mixture of experts (`autopar.runtime.parallel_ops`).

    all_to_all_rows                rows selected by an index from the chunks of all ranks (tokens to experts, and back)
    expert_parallel_grouped_mm     grouped matrix products, where every rank has some of the matrices

How many rows go to which rank depends on the data. Every rank has the whole index, or the ends of all groups, so it computes
the sizes without communication. Gradients take the same paths back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from autopar.operators.families.contraction import misplaced
from autopar.runtime.first_message import before_message
from autopar.runtime.lost_ranks import lost
from autopar.runtime.second_derivatives import once_differentiable
from autopar.runtime.world import Axis


@torch.library.custom_op("autopar::dispatch_rows", mutates_args=())
def dispatch_rows(x: Tensor, output_splits: list[int], input_splits: list[int], rows: int, group: str) -> Tensor:
    """An all-to-all of rows with data-dependent sizes; rows are sorted by the rank that they go to or come from.

    `rows` is the number of rows that the plan counts for this collective; the actual number differs between ranks.
    """
    before_message()
    issued = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), output_splits, input_splits, group)
    try:
        received: Tensor = torch.ops._c10d_functional.wait_tensor(issued)
    except RuntimeError as error:
        raise lost(error, "the all_to_all of rows") from error
    return received


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dispatch:
    """How many rows this rank sends to and receives from each rank, and how many rows the plan counts."""

    axis: Axis
    send: Sequence[int]
    receive: Sequence[int]
    rows: int

    def __call__(self, x: Tensor) -> Tensor:
        """The rows that other ranks send here, in exchange for those of `x`."""
        found: Tensor = dispatch_rows(x, list(self.receive), list(self.send), self.rows, self.axis.group)
        return found

    def inverse(self, x: Tensor) -> Tensor:
        """Return rows to the ranks that they came from."""
        found: Tensor = dispatch_rows(x, list(self.send), list(self.receive), self.rows, self.axis.group)
        return found


# --- rows selected by an index --------------------------------------------------------------------------------------------


class _RowsContext(Protocol):
    axis: Axis
    count: int
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _AllToAllRows(torch.autograd.Function):
    """Saves the index only, as `aten.index` does: plans count what aten saves."""

    @staticmethod
    def forward(ctx: _RowsContext, axis: Axis, x: Tensor, index: Tensor) -> Tensor:
        ctx.axis, ctx.count = axis, len(x)
        ctx.save_for_backward(index)
        sent, order, dispatch = _dispatch_by_index(axis, index, len(x))
        return dispatch(x[sent])[order.argsort()]  # rows arrive sorted by owner

    @staticmethod
    @once_differentiable("a selection of rows from all ranks")
    def backward(ctx: _RowsContext, gradient: Tensor) -> tuple[None, Tensor, None]:
        (index,) = ctx.saved_tensors
        sent, order, dispatch = _dispatch_by_index(ctx.axis, index, ctx.count)
        returned = dispatch.inverse(gradient[order])
        return None, returned.new_zeros(ctx.count, *returned.shape[1:]).index_add_(0, sent, returned), None


def _dispatch_by_index(axis: Axis, index: Tensor, count: int) -> tuple[Tensor, Tensor, _Dispatch]:
    """The local rows to send, sorted by receiver; the order that sorts this rank's part of the index by owner; the dispatch."""
    wanted = (index % (axis.size * count)).view(axis.size, -1)  # by every rank; negative indices count from the end
    owners = wanted // count
    local, own = owners == axis.index, owners[axis.index]
    send, receive = torch.stack([local.sum(1), own.bincount(minlength=axis.size)]).tolist()
    dispatch = _Dispatch(axis=axis, send=send, receive=receive, rows=len(own))
    return wanted[local] - axis.index * count, own.argsort(stable=True), dispatch


def all_to_all_rows(axis: Axis, x: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """`aten.index` of split rows by a replicated index: this rank's part of the selected rows."""
    (index,) = indices
    return _AllToAllRows.apply(axis, x, index)  # type: ignore[no-any-return, no-untyped-call]


# --- grouped products -----------------------------------------------------------------------------------------------------


class _GroupedContext(Protocol):
    axis: Axis
    ends: list[int]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _ExpertParallelGroupedMM(torch.autograd.Function):
    """Saves the rows before dispatch and dispatches them again in the backward, since few rows change ranks."""

    @staticmethod
    def forward(ctx: _GroupedContext, axis: Axis, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.axis, ctx.ends = axis, ends.tolist()
        ctx.save_for_backward(rows, weight)
        dispatch, bounds = _dispatch_by_group(axis, len(rows), len(weight), ctx.ends)
        return dispatch.inverse(_products(dispatch(rows), weight, bounds))

    @staticmethod
    @once_differentiable("a grouped product over split experts")
    def backward(ctx: _GroupedContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        dispatch, bounds = _dispatch_by_group(ctx.axis, len(rows), len(weight), ctx.ends)
        received, gradient = dispatch(rows), dispatch(gradient)
        rows_gradient = dispatch.inverse(_products(gradient, weight.mT, bounds))
        pairs = zip(_groups(received, bounds), _groups(gradient, bounds), strict=True)
        return None, rows_gradient, torch.stack([group.mT @ other for group, other in pairs]), None


def _dispatch_by_group(axis: Axis, rows: int, matrices: int, ends: Sequence[int]) -> tuple[_Dispatch, list[int]]:
    """The dispatch of rows to the ranks that hold their matrix, and the bounds of this rank's groups among received rows."""
    chunks = [rank * rows for rank in range(axis.size + 1)]
    starts = [0, *(ends[matrices * rank - 1] for rank in range(1, axis.size)), chunks[-1]]
    send = [_overlap(chunks, axis.index, starts, rank) for rank in range(axis.size)]
    receive = [_overlap(starts, axis.index, chunks, rank) for rank in range(axis.size)]
    first = starts[axis.index]
    bounds = [first, *ends[matrices * axis.index : matrices * (axis.index + 1)]]
    planned = misplaced(chunks[-1], matrices * axis.size)
    return _Dispatch(axis=axis, send=send, receive=receive, rows=planned), [bound - first for bound in bounds]


def _overlap(first: Sequence[int], i: int, second: Sequence[int], j: int) -> int:
    """The length of the overlap of interval i of one sorted list of bounds with interval j of another."""
    return max(0, min(first[i + 1], second[j + 1]) - max(first[i], second[j]))


def _groups(rows: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    return [rows[start:stop] for start, stop in itertools.pairwise(bounds)]


def _products(rows: Tensor, weight: Tensor, bounds: Sequence[int]) -> Tensor:
    """Each group of rows times its matrix; zeros for rows after the last group."""
    found = [group @ matrix for group, matrix in zip(_groups(rows, bounds), weight, strict=True)]
    return torch.cat([*found, rows.new_zeros(len(rows) - bounds[-1], weight.shape[-1])])


def expert_parallel_grouped_mm(
    axis: Axis, rows: Tensor, weight: Tensor, offs: Tensor, bias: None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Groups of rows times one matrix each (`_grouped_mm`); rows and matrices are split, the ends of groups are replicated.

    With groups of equal size every rank already has the rows of its own matrices, and no row changes ranks.
    """
    return _ExpertParallelGroupedMM.apply(axis, rows, weight, offs)  # type: ignore[no-any-return, no-untyped-call]
