"""Attention whose queries, or queries, keys and values, are split along the sequence: distributed forms (`runtime.forms`).

    queries     keys and values are whole; a causal rank looks no further than its own last query
    ring        keys and values are split, too, and go round: every rank sees every chunk once
    grouped     heads are split, so far that several ranks read the same head of keys and values

What a rank finds in one chunk of keys is put together with what it has found in others by the logarithms of the sums over
exponential scores (M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018; H. Liu, M. Zaharia, P. Abbeel,
"Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023). A fused kernel whose backward is given the result
and the logarithm over all chunks gives the gradient through one of them, so that no scores are kept. A mask is whole along the
keys; with one the scores of a chunk are made, for want of a kernel whose backward takes both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch

from autopar.runtime.collectives import passed_on
from autopar.runtime.world import Axis

aten = torch.ops.aten
Tensor = torch.Tensor
HALF = (torch.bfloat16, torch.float16)


class _Context(Protocol):
    axis: Axis
    causal: bool
    scale: float
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


# --- one chunk ------------------------------------------------------------------------------------------------------------


def attend(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What queries find in a chunk of keys, and the logarithm of the sum of their exponential scores."""
    key, value = _for_all_heads(query, key), _for_all_heads(query, value)
    if mask is None and query.device.type == "cpu":
        out, logs = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    elif mask is None and _flash(query):
        out, logs, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    else:
        scores = _scores(query, key, causal, scale, mask)
        logs = scores.logsumexp(-1)
        out = (_shares(scores, logs) @ value.to(scores.dtype)).to(query.dtype)
    return out, logs


def attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor, causal: bool, scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values through one chunk; `out` and `logs` are those over all chunks."""
    heads = key.shape[1]
    key, value = _for_all_heads(query, key), _for_all_heads(query, value)
    given = gradient, query, key, value, out, logs
    if mask is None and query.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)
    elif mask is None and _flash(query):
        no_seed = query.new_empty((), dtype=torch.uint64)
        more = None, None, query.shape[-2], key.shape[-2], 0.0, causal, no_seed, no_seed
        found = aten._scaled_dot_product_flash_attention_backward(*given, *more, scale=scale)
    else:
        shares = _shares(_scores(query, key, causal, scale, mask), logs)
        gradient, query, key, value, out = (one.to(shares.dtype) for one in (gradient, query, key, value, out))
        inner = shares * (gradient @ value.mT - (gradient * out).sum(-1, keepdim=True)) * scale
        found = inner @ key, inner.mT @ query, shares.mT @ gradient
    of_query, *others = found
    of_key, of_value = (one.unflatten(1, (heads, -1)).sum(2) if one.shape[1] != heads else one for one in others)
    return of_query, of_key, of_value


def _flash(query: Tensor) -> bool:
    """Whether the GPU's fused kernel serves."""
    return query.dtype in HALF and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _for_all_heads(query: Tensor, held: Tensor) -> Tensor:
    """Keys or values of grouped queries, once for each head."""
    return held if held.shape[1] == query.shape[1] else held.repeat_interleave(query.shape[1] // held.shape[1], 1)


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float, mask: Tensor | None) -> Tensor:
    """Of float32 at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT * scale
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill_(unseen, -math.inf) if causal else scores


def _shares(scores: Tensor, logs: Tensor) -> Tensor:
    """The exponential scores, divided by their sum; none of a query that sees no key."""
    return (scores - _finite(logs).unsqueeze(-1)).exp_()


def _finite(logs: Tensor) -> Tensor:
    """The logarithms of sums, 0 for the sum of nothing."""
    return logs.masked_fill(logs == -math.inf, 0)


class _Found:
    """What queries have found so far."""

    def __init__(self) -> None:
        self.out: Tensor | None = None
        self.logs: Tensor | None = None

    def add(self, out: Tensor, logs: Tensor) -> None:
        """Put another chunk to it."""
        wide = torch.promote_types(out.dtype, torch.float32)
        if self.out is None or self.logs is None:
            self.out, self.logs = out.to(wide), logs
            return
        together = torch.logaddexp(self.logs, logs)
        old, new = ((part - _finite(together)).exp_().unsqueeze(-1) for part in (self.logs, logs))
        self.out, self.logs = (self.out * old).add_(new * out), together

    def whole(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The result for all keys that were put in, and its logarithms."""
        assert self.out is not None
        assert self.logs is not None
        return self.out.to(dtype), self.logs


# --- queries alone --------------------------------------------------------------------------------------------------------


class _Queries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, axis: Axis, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.axis, ctx.scale = axis, scale
        found = _Found()
        for part, causal in _seen(axis, query, key):
            found.add(*attend(query, key[..., part, :], value[..., part, :], causal, scale))
        out, logs = found.whole(query.dtype)
        ctx.save_for_backward(query, key, value, out, logs)
        return out

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logs = ctx.saved_tensors
        of_query, of_key, of_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for part, causal in _seen(ctx.axis, query, key):
            chunk = query, key[..., part, :], value[..., part, :]
            found = attend_backward(gradient, *chunk, out, logs, causal, ctx.scale)
            of_query += found[0]
            of_key[..., part, :] = found[1]
            of_value[..., part, :] = found[2]
        return None, of_query, of_key, of_value, None


def _seen(axis: Axis, query: Tensor, key: Tensor) -> Iterator[tuple[slice, bool]]:
    """The keys before this rank's queries, and those beside them, of which each query sees those before it."""
    start = axis.index * query.shape[-2]
    if start:
        yield slice(0, start), False
    yield slice(start, start + query.shape[-2]), True


def queries(
    axis: Axis, query: Tensor, key: Tensor, value: Tensor, attn_mask: None = None, dropout_p: float = 0.0,
    is_causal: bool = True, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Causal `aten.scaled_dot_product_attention` of a chunk of the queries, with all keys and values."""
    used = query.shape[-1] ** -0.5 if scale is None else scale
    return _Queries.apply(axis, query, key, value, used)  # type: ignore[no-any-return, no-untyped-call]


# --- all of them ----------------------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, axis: Axis, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        ctx.axis, ctx.causal, ctx.scale = axis, causal, scale
        found, held = _Found(), (key, value)
        for turn in range(axis.size):
            if turn:
                held = passed_on(held, axis)
            if (own := _own(axis, turn, causal)) is not None:
                found.add(*attend(query, *held, own, scale, _part(mask, axis, turn)))
        out, logs = found.whole(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, logs)
        return out

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, logs = ctx.saved_tensors
        axis, wide = ctx.axis, torch.promote_types(query.dtype, torch.float32)
        of_query = torch.zeros_like(query, dtype=wide)
        held, of_held = (key, value), (torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide))
        for turn in range(axis.size):  # the gradients go round with what they belong to, and once more to come home
            if turn:
                held, of_held = passed_on(held, axis), passed_on(of_held, axis)
            if (own := _own(axis, turn, ctx.causal)) is not None:
                found = attend_backward(gradient, query, *held, out, logs, own, ctx.scale, _part(mask, axis, turn))
                for total, part in zip((of_query, *of_held), found, strict=True):
                    total += part
        of_key, of_value = passed_on(of_held, axis)
        return None, of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def _own(axis: Axis, turn: int, causal: bool) -> bool | None:
    """Whether queries see in a chunk only what stands before them; None if they see nothing of it."""
    chunk = _chunk(axis, turn)
    return None if causal and chunk > axis.index else causal and chunk == axis.index


def _part(mask: Tensor | None, axis: Axis, turn: int) -> Tensor | None:
    """What a mask says of the chunk of keys that is here at this turn."""
    if mask is None or mask.shape[-1] == 1:
        return mask
    size = mask.shape[-1] // axis.size
    return mask.narrow(-1, _chunk(axis, turn) * size, size)


def _chunk(axis: Axis, turn: int) -> int:
    """The chunk of keys that is here at this turn: that of the rank so many places before."""
    return (axis.index - turn) % axis.size


def ring(
    axis: Axis, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`aten.scaled_dot_product_attention` of chunks of queries, keys and values; a mask is split along the queries."""
    used = query.shape[-1] ** -0.5 if scale is None else scale
    return _Ring.apply(axis, query, key, value, attn_mask, is_causal, used)  # type: ignore[no-any-return, no-untyped-call]


# --- heads that share keys and values ---------------------------------------------------------------------------------------


def grouped(
    axis: Axis, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = True,
) -> Tensor:  # fmt: skip
    """`aten.scaled_dot_product_attention` of a chunk of the heads, which reads one of the heads of keys and values."""
    held = axis.index * key.shape[-3] // axis.size
    key, value = key.narrow(-3, held, 1), value.narrow(-3, held, 1)
    given = query, key, value, attn_mask, dropout_p, is_causal
    return aten.scaled_dot_product_attention(*given, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]
