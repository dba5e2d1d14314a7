"""Attention that is split along the sequence or over heads (`autopar.runtime.parallel_ops`).

    query_parallel_attention     queries are split, keys and values replicated; a rank skips keys that come after its queries
    ring_attention               queries, keys and values are split; keys and values are passed around the ring of ranks
    grouped_query_attention      more ranks than KV heads: query heads are split, several ranks read the same KV head

Results for several chunks of keys are merged by their log-sum-exp, `lse` (M. Milakov, N. Gimelshein, "Online normalizer
calculation for softmax", 2018; H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
Context", 2023). The backward of a fused kernel, given the result and the lse over all chunks, returns the gradients of one
chunk, so attention scores are never saved. A mask has all keys; with a mask the scores of one chunk are computed explicitly,
because no fused backward takes a mask and an external lse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from autopar.runtime.collectives import ring_step
from autopar.runtime.second_derivatives import once_differentiable
from autopar.runtime.world import Axis

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)


class _Context(Protocol):
    axis: Axis
    causal: bool
    scale: float
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


# --- one chunk ------------------------------------------------------------------------------------------------------------


def attend_chunk(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of the queries to one chunk of keys, and its log-sum-exp of scores."""
    key, value = _repeat_kv(query, key), _repeat_kv(query, value)
    if mask is None and query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    elif mask is None and _has_flash_kernel(query):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    else:
        scores = _attention_scores(query, key, causal, scale, mask)
        lse = scores.logsumexp(-1)
        out = (_probabilities(scores, lse) @ value.to(scores.dtype)).to(query.dtype)
    return out, lse


def attend_chunk_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values through one chunk; `out` and `lse` are those over all chunks."""
    heads = key.shape[1]
    key, value = _repeat_kv(query, key), _repeat_kv(query, value)
    given = gradient, query, key, value, out, lse
    if mask is None and query.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)
    elif mask is None and _has_flash_kernel(query):
        no_seed = query.new_empty((), dtype=torch.uint64)
        more = None, None, query.shape[-2], key.shape[-2], 0.0, causal, no_seed, no_seed
        found = aten._scaled_dot_product_flash_attention_backward(*given, *more, scale=scale)
    else:
        probabilities = _probabilities(_attention_scores(query, key, causal, scale, mask), lse)
        gradient, query, key, value, out = (one.to(probabilities.dtype) for one in (gradient, query, key, value, out))
        inner = probabilities * (gradient @ value.mT - (gradient * out).sum(-1, keepdim=True)) * scale
        found = inner @ key, inner.mT @ query, probabilities.mT @ gradient
    query_gradient, *others = found
    key_gradient, value_gradient = (one.unflatten(1, (heads, -1)).sum(2) if one.shape[1] != heads else one for one in others)
    return query_gradient, key_gradient, value_gradient


def _has_flash_kernel(query: Tensor) -> bool:
    """Whether the fused kernel on GPUs supports this dtype and head width."""
    return query.dtype in HALF and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _repeat_kv(query: Tensor, kv: Tensor) -> Tensor:
    """Keys or values repeated for every query head, as grouped-query attention needs."""
    return kv if kv.shape[1] == query.shape[1] else kv.repeat_interleave(query.shape[1] // kv.shape[1], 1)


def _attention_scores(query: Tensor, key: Tensor, causal: bool, scale: float, mask: Tensor | None) -> Tensor:
    """Masked attention scores, in float32 at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT * scale
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill_(unseen, -math.inf) if causal else scores


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """The softmax of the scores, given its lse; zeros for a query that sees no key."""
    return (scores - _finite_lse(lse).unsqueeze(-1)).exp_()


def _finite_lse(lse: Tensor) -> Tensor:
    """The lse with minus infinity (a query that sees no key) replaced by 0, so that differences are not NaN."""
    return lse.masked_fill(lse == -math.inf, 0)


class _OnlineSoftmax:
    """The attention result over the chunks of keys added so far, and its lse."""

    def __init__(self) -> None:
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Merge the result for another chunk."""
        wide = torch.promote_types(out.dtype, torch.float32)
        if self.out is None or self.lse is None:
            self.out, self.lse = out.to(wide), lse
            return
        total_lse = torch.logaddexp(self.lse, lse)
        old, new = ((part - _finite_lse(total_lse)).exp_().unsqueeze(-1) for part in (self.lse, lse))
        self.out, self.lse = (self.out * old).add_(new * out), total_lse

    def whole(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The result over all chunks that were added, and its lse."""
        assert self.out is not None
        assert self.lse is not None
        return self.out.to(dtype), self.lse


# --- split queries --------------------------------------------------------------------------------------------------------


class _QueryParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, axis: Axis, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.axis, ctx.scale = axis, scale
        found = _OnlineSoftmax()
        for part, causal in _visible_keys(axis, query, key):
            found.add(*attend_chunk(query, key[..., part, :], value[..., part, :], causal, scale))
        out, lse = found.whole(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable("attention of a split sequence")
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        query_gradient, key_gradient, value_gradient = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for part, causal in _visible_keys(ctx.axis, query, key):
            chunk = query, key[..., part, :], value[..., part, :]
            found = attend_chunk_backward(gradient, *chunk, out, lse, causal, ctx.scale)
            query_gradient += found[0]
            key_gradient[..., part, :] = found[1]
            value_gradient[..., part, :] = found[2]
        return None, query_gradient, key_gradient, value_gradient, None


def _visible_keys(axis: Axis, query: Tensor, key: Tensor) -> Iterator[tuple[slice, bool]]:
    """The slices of keys that this rank's queries see: all of those before them; those at their own positions, causally."""
    start = axis.index * query.shape[-2]
    if start:
        yield slice(0, start), False
    yield slice(start, start + query.shape[-2]), True


def query_parallel_attention(
    axis: Axis, query: Tensor, key: Tensor, value: Tensor, attn_mask: None = None, dropout_p: float = 0.0,
    is_causal: bool = True, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Causal `aten.scaled_dot_product_attention` of this rank's chunk of the queries, with all keys and values."""
    used = query.shape[-1] ** -0.5 if scale is None else scale
    return _QueryParallelAttention.apply(axis, query, key, value, used)  # type: ignore[no-any-return, no-untyped-call]


# --- ring attention -------------------------------------------------------------------------------------------------------


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        axis: Axis,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        ctx.axis, ctx.causal, ctx.scale = axis, causal, scale
        found, kv = _OnlineSoftmax(), (key, value)
        for step in range(axis.size):
            if step:
                kv = ring_step(kv, axis)
            if (own := _chunk_is_causal(axis, step, causal)) is not None:
                found.add(*attend_chunk(query, *kv, own, scale, _mask_chunk(mask, axis, step)))
        out, lse = found.whole(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        return out

    @staticmethod
    @once_differentiable("ring attention")
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        axis, wide = ctx.axis, torch.promote_types(query.dtype, torch.float32)
        query_gradient = torch.zeros_like(query, dtype=wide)
        kv, kv_gradient = (key, value), (torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide))
        for step in range(axis.size):  # gradients travel with their chunk, and one step more to its owner
            if step:
                kv, kv_gradient = ring_step(kv, axis), ring_step(kv_gradient, axis)
            if (own := _chunk_is_causal(axis, step, ctx.causal)) is not None:
                found = attend_chunk_backward(gradient, query, *kv, out, lse, own, ctx.scale, _mask_chunk(mask, axis, step))
                for total, part in zip((query_gradient, *kv_gradient), found, strict=True):
                    total += part
        key_gradient, value_gradient = ring_step(kv_gradient, axis)
        return (
            None,
            query_gradient.to(query.dtype),
            key_gradient.to(key.dtype),
            value_gradient.to(value.dtype),
            None,
            None,
            None,
        )


def _chunk_is_causal(axis: Axis, step: int, causal: bool) -> bool | None:
    """Whether attention to the chunk held at this ring step is causal; None if the queries see none of its keys."""
    chunk = _chunk_index(axis, step)
    return None if causal and chunk > axis.index else causal and chunk == axis.index


def _mask_chunk(mask: Tensor | None, axis: Axis, step: int) -> Tensor | None:
    """The columns of a mask for the chunk of keys held at this ring step."""
    if mask is None or mask.shape[-1] == 1:
        return mask
    size = mask.shape[-1] // axis.size
    return mask.narrow(-1, _chunk_index(axis, step) * size, size)


def _chunk_index(axis: Axis, step: int) -> int:
    """The index of the chunk of keys that this rank holds at this ring step."""
    return (axis.index - step) % axis.size


def ring_attention(
    axis: Axis, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`aten.scaled_dot_product_attention` of chunks of queries, keys and values; a mask has all keys."""
    used = query.shape[-1] ** -0.5 if scale is None else scale
    return _RingAttention.apply(axis, query, key, value, attn_mask, is_causal, used)  # type: ignore[no-any-return, no-untyped-call]


# --- grouped queries ------------------------------------------------------------------------------------------------------


def grouped_query_attention(
    axis: Axis, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = True,
) -> Tensor:  # fmt: skip
    """`aten.scaled_dot_product_attention` of this rank's query heads, all of which read the same head of keys and values."""
    head = axis.index * key.shape[-3] // axis.size
    key, value = key.narrow(-3, head, 1), value.narrow(-3, head, 1)
    given = query, key, value, attn_mask, dropout_p, is_causal
    return aten.scaled_dot_product_attention(*given, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]
