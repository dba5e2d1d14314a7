"""Distributed forms as functions that emitted code calls: an operator on one rank's part of what it otherwise needs whole.

    y = vocabulary(tp, weight, indices)       the embedding of the rows that lie here, zeros for the others
    l = classes(tp, scores, target, None, 2)  the cross-entropy over all classes, of which a chunk lies here

A function takes the axis, then the operator's own arguments on local shapes; it is named by its form (`rules.Distributed`),
which says what comes in and out in which state, and which messages are sent inside. Ranks hold contiguous chunks, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from autopar.runtime.attention import queries, ring
from autopar.runtime.collectives import largest, summed
from autopar.runtime.norms import batch_norm, layer_norm, rms_norm
from autopar.runtime.world import Axis

aten = torch.ops.aten
NONE, MEAN = 0, 1  # the reductions of ATen's losses
IGNORED = -1  # a target that counts for nothing


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
        place, elsewhere = _within(indices, ctx.start, ctx.count)
        found: torch.Tensor = aten.embedding(weight, place)
        return found.masked_fill_(elsewhere.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: _Rows, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        place, elsewhere = _within(indices, ctx.start, ctx.count)
        place.masked_fill_(elsewhere | (indices == ctx.padding), -1)
        return None, aten.embedding_dense_backward(gradient, place, ctx.count, -1, False), None, None


def vocabulary(axis: Axis, weight: torch.Tensor, indices: torch.Tensor, padding_idx: int = -1, *_: bool) -> torch.Tensor:
    """`aten.embedding` of a weight whose rows are split: partial, as every row is found on one rank."""
    return _Vocabulary.apply(axis, weight, indices, padding_idx)  # type: ignore[no-any-return, no-untyped-call]


# --- losses over split classes --------------------------------------------------------------------------------------------


class _Scores(Protocol):
    """What the backward of a cross-entropy needs."""

    start: int
    dim: int
    ignored: int
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _Classes(torch.autograd.Function):
    """The probabilities are kept, the softmax of the chunk of classes that lies here."""

    @staticmethod
    def forward(
        ctx: _Scores, axis: Axis, scores: torch.Tensor, target: torch.Tensor, reduction: int, ignored: int
    ) -> torch.Tensor:
        ctx.dim = dim = min(1, scores.dim() - 1)
        ctx.start, ctx.ignored = axis.index * scores.shape[dim], ignored
        wide = torch.promote_types(scores.dtype, torch.float32)
        top = largest(scores.amax(dim, keepdim=True).to(wide), axis)
        odds = (scores - top).exp_()
        place, elsewhere = _within(target.unsqueeze(dim), ctx.start, scores.shape[dim])
        own = (scores.gather(dim, place) - top).masked_fill_(elsewhere, 0)
        total, own = summed(torch.stack([odds.sum(dim, keepdim=True), own]), axis)
        ctx.save_for_backward(odds.div_(total).to(scores.dtype), target)
        losses = (total.log() - own).squeeze(dim).masked_fill_(target == ignored, 0)
        result: torch.Tensor = losses if reduction == NONE else losses.sum()
        return result.to(scores.dtype)

    @staticmethod
    def backward(ctx: _Scores, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None, None, None]:
        odds, target = ctx.saved_tensors
        each = gradient.expand_as(target).masked_fill(target == ctx.ignored, 0).unsqueeze(ctx.dim)
        place, elsewhere = _within(target.unsqueeze(ctx.dim), ctx.start, odds.shape[ctx.dim])
        return None, (odds * each).scatter_add_(ctx.dim, place, -each.masked_fill(elsewhere, 0)), None, None, None


def classes(
    axis: Axis, scores: torch.Tensor, target: torch.Tensor, weight: None = None, reduction: int = MEAN,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """`aten.cross_entropy_loss` of scores whose classes are split, complete on every rank; not the mean."""
    return _Classes.apply(axis, scores, target, reduction, ignore_index)  # type: ignore[no-any-return, no-untyped-call]


def chosen(
    axis: Axis, scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = MEAN,
    ignore_index: int = -100,
) -> torch.Tensor:  # fmt: skip
    """`aten.nll_loss_nd` of log-probabilities whose classes are split: partial, as every target is found on one rank."""
    count = scores.shape[min(1, scores.dim() - 1)]
    place, elsewhere = _within(target, axis.index * count, count)
    place.masked_fill_(elsewhere | (target == ignore_index), IGNORED)
    return aten.nll_loss_nd(scores, place, weight, reduction, IGNORED)  # type: ignore[no-any-return]


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
    def forward(ctx: _Distribution, axis: Axis, x: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.log = axis, dim, log
        wide = torch.promote_types(x.dtype, torch.float32)
        result = x - largest(x.amax(dim, keepdim=True).to(wide), axis)
        total = summed(result.exp().sum(dim, keepdim=True), axis)
        result = (result.sub_(total.log()) if log else result.exp_().div_(total)).to(x.dtype)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: _Distribution, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
        (result,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        shares = gradient if ctx.log else gradient * result
        total = summed(shares.sum(ctx.dim, keepdim=True, dtype=wide), ctx.axis)
        found = gradient - result.exp() * total if ctx.log else result * (gradient - total)
        return None, found.to(gradient.dtype), None, None


def softmax(axis: Axis, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`aten.softmax` over a dim that is split."""
    return _Softmax.apply(axis, x.to(dtype or x.dtype), dim, False)  # type: ignore[no-any-return, no-untyped-call]


def log_softmax(axis: Axis, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`aten.log_softmax` over a dim that is split."""
    return _Softmax.apply(axis, x.to(dtype or x.dtype), dim, True)  # type: ignore[no-any-return, no-untyped-call]


def _within(indices: torch.Tensor, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices counted from the start of a chunk, 0 for those outside it; and which these are."""
    place = indices - start
    elsewhere = (place < 0) | (place >= count)
    return place.masked_fill_(elsewhere, 0), elsewhere


FORMS: dict[str, Callable[..., object]] = {
    function.__name__: function
    for function in (
        vocabulary, classes, chosen, softmax, log_softmax, layer_norm, rms_norm, batch_norm, queries, ring,
    )
}  # fmt: skip
