"""Distributed forms as functions that emitted code calls: an operator on one rank's part of what it otherwise needs whole.

    y = vocabulary(tp, weight, indices)       the embedding of the rows that lie here, zeros for the others
    l = classes(tp, scores, target, None, 2)  the cross-entropy over all classes, of which a chunk lies here

A function takes the axis, then the operator's own arguments on local shapes; it is named by its form (`rules.Distributed`),
which says what comes in and out in which state, and which messages are sent inside. Ranks hold contiguous chunks, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol

import torch

from autopar.runtime.attention import grouped, queries, ring
from autopar.runtime.collectives import largest, summed
from autopar.runtime.losses import chosen, classes, within
from autopar.runtime.norms import batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from autopar.runtime.recurrent import gru_gates, lstm_gates, rnn_relu_gates, rnn_tanh_gates
from autopar.runtime.row_dispatch import experts, fetched
from autopar.runtime.world import Axis

aten = torch.ops.aten


class _Rows(Protocol):
    """What the backward of an embedding needs."""

    start: int
    count: int
    padding: int
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _Vocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Rows, axis: Axis, weight: torch.Tensor, indices: torch.Tensor, padding: int) -> torch.Tensor:
        ctx.count, ctx.start, ctx.padding = len(weight), axis.index * len(weight), padding
        ctx.save_for_backward(indices)
        place, elsewhere = within(indices, ctx.start, ctx.count)
        found: torch.Tensor = aten.embedding(weight, place)
        return found.masked_fill_(elsewhere.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: _Rows, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        place, elsewhere = within(indices, ctx.start, ctx.count)
        place.masked_fill_(elsewhere | (indices == ctx.padding), -1)
        return None, aten.embedding_dense_backward(gradient, place, ctx.count, -1, False), None, None


def vocabulary(axis: Axis, weight: torch.Tensor, indices: torch.Tensor, padding_idx: int = -1, *_: bool) -> torch.Tensor:
    """`aten.embedding` of a weight whose rows are split: partial, as every row is found on one rank."""
    return _Vocabulary.apply(axis, weight, indices, padding_idx)  # type: ignore[no-any-return, no-untyped-call]


# --- distributions over a split dim ---------------------------------------------------------------------------------------


class _Distribution(Protocol):
    """What the backward of a softmax needs."""

    axis: Axis
    dim: int
    log: bool
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Distribution, axis: Axis, x: torch.Tensor, dim: int, log: bool, safe: bool) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.log = axis, dim, log
        wide = torch.promote_types(x.dtype, torch.float32)
        top = largest(x.amax(dim, keepdim=True).to(wide), axis)
        result = x - top
        total = summed(result.exp().sum(dim, keepdim=True), axis)
        result = (result.sub_(total.log()) if log else result.exp_().div_(total)).to(x.dtype)
        result = result.masked_fill_(top == -math.inf, 0) if safe else result
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: _Distribution, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        shares = gradient if ctx.log else gradient * result
        total = summed(shares.sum(ctx.dim, keepdim=True, dtype=wide), ctx.axis)
        found = gradient - result.exp() * total if ctx.log else result * (gradient - total)
        return None, found.to(gradient.dtype), None, None, None


Wanted = torch.dtype | Literal[False] | None  # the dtype of a distribution; neither False nor None asks for one


def softmax(axis: Axis, x: torch.Tensor, dim: int, dtype: Wanted = None) -> torch.Tensor:
    """`aten.softmax` over a dim that is split, in any spelling."""
    return _Softmax.apply(axis, x.to(dtype or x.dtype), dim, False, False)  # type: ignore[no-any-return, no-untyped-call]


def log_softmax(axis: Axis, x: torch.Tensor, dim: int, dtype: Wanted = None) -> torch.Tensor:
    """`aten.log_softmax` over a dim that is split, in any spelling."""
    return _Softmax.apply(axis, x.to(dtype or x.dtype), dim, True, False)  # type: ignore[no-any-return, no-untyped-call]


def safe_softmax(axis: Axis, x: torch.Tensor, dim: int, dtype: Wanted = None) -> torch.Tensor:
    """`aten._safe_softmax` over a dim that is split: zeros where every number is minus infinity."""
    return _Softmax.apply(axis, x.to(dtype or x.dtype), dim, False, True)  # type: ignore[no-any-return, no-untyped-call]


_FUNCTIONS = (
    vocabulary, classes, chosen, softmax, log_softmax, safe_softmax, layer_norm, rms_norm, group_norm, instance_norm,
    batch_norm, grouped, queries, ring, fetched, experts, lstm_gates, gru_gates, rnn_tanh_gates, rnn_relu_gates,
)  # fmt: skip
FORMS: dict[str, Callable[..., object]] = {
    **{function.__name__: function for function in _FUNCTIONS},
    "batch_norm_planes": batch_norm,
    "group_norm_channels": group_norm,
}
