"""Distributed forms as functions that emitted code calls: an operator on one rank's part of what it otherwise needs whole.

    y = vocabulary(tp, weight, indices)       the embedding of the rows that lie here, zeros for the others

A function takes the axis, then the operator's own arguments on local shapes; it is named by its form (`rules.Distributed`),
which says what comes in and out in which state, and which messages are sent inside. Ranks hold contiguous chunks, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

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


def _within(indices: torch.Tensor, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices counted from the start of a chunk, 0 for those outside it; and which these are."""
    place = indices - start
    elsewhere = (place < 0) | (place >= count)
    return place.masked_fill_(elsewhere, 0), elsewhere


FORMS: dict[str, Callable[..., object]] = {function.__name__: function for function in (vocabulary,)}
