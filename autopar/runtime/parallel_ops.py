"""Parallel operators: one function per parallel form of an ATen operator, which computes on this rank's part of a split dim.

    y = vocab_parallel_embedding(tp, weight, indices)           rows of this rank's chunk of the vocabulary, zeros for others
    l = vocab_parallel_cross_entropy(tp, logits, target)        the loss over all classes from this rank's chunk of the logits

A function takes the mesh axis, then the operator's own arguments with local shapes. Its name is that of the `ParallelForm` in
the operator's row, which declares the states of operands and results and the collectives inside. Ranks hold contiguous chunks,
in rank order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol

import torch

from autopar.runtime.attention import grouped_query_attention, query_parallel_attention, ring_attention
from autopar.runtime.collectives import all_reduce_max, all_reduce_sum
from autopar.runtime.deferred_products import deferred_addmm, deferred_linear, deferred_mm
from autopar.runtime.losses import local_indices, vocab_parallel_cross_entropy, vocab_parallel_nll_loss
from autopar.runtime.norms import group_norm, instance_norm, layer_norm, rms_norm, sync_batch_norm
from autopar.runtime.recurrent import (
    gate_parallel_gru,
    gate_parallel_lstm,
    gate_parallel_rnn_relu,
    gate_parallel_rnn_tanh,
)
from autopar.runtime.row_dispatch import all_to_all_rows, expert_parallel_grouped_mm
from autopar.runtime.world import Axis

aten = torch.ops.aten


class _EmbeddingContext(Protocol):
    axis: Axis
    count: int  # rows in this rank's chunk
    padding_idx: int
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _VocabParallelEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _EmbeddingContext, axis: Axis, weight: torch.Tensor, indices: torch.Tensor, padding_idx: int
    ) -> torch.Tensor:
        ctx.axis, ctx.count, ctx.padding_idx = axis, len(weight), padding_idx
        ctx.save_for_backward(indices)
        rows, outside = local_indices(indices, axis, ctx.count)
        embedded: torch.Tensor = aten.embedding(weight, rows)
        return embedded.masked_fill_(outside.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: _EmbeddingContext, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        rows, outside = local_indices(indices, ctx.axis, ctx.count)
        hidden = outside | (indices == ctx.padding_idx)
        if torch.is_grad_enabled():  # only hidden gradients, not hidden rows, have a derivative
            gradient = gradient.masked_fill(hidden.unsqueeze(-1), 0)
        else:
            rows.masked_fill_(hidden, -1)
        return None, aten.embedding_dense_backward(gradient, rows, ctx.count, -1, False), None, None


def vocab_parallel_embedding(
    axis: Axis, weight: torch.Tensor, indices: torch.Tensor, padding_idx: int = -1, *_: bool
) -> torch.Tensor:
    """`aten.embedding` of a weight whose rows are split; partial, as one rank has the row of each index."""
    return _VocabParallelEmbedding.apply(axis, weight, indices, padding_idx)  # type: ignore[no-any-return, no-untyped-call]


# --- softmax over a split dim ----------------------------------------------------------------------------------------------


class _SoftmaxContext(Protocol):
    axis: Axis
    dim: int
    log: bool
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _SoftmaxContext, axis: Axis, x: torch.Tensor, dim: int, log: bool, safe: bool) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.log = axis, dim, log
        wide = torch.promote_types(x.dtype, torch.float32)
        top = all_reduce_max(x.amax(dim, keepdim=True).to(wide), axis)
        result = x - top
        total = all_reduce_sum(result.exp().sum(dim, keepdim=True), axis)
        result = (result.sub_(total.log()) if log else result.exp_().div_(total)).to(x.dtype)
        result = result.masked_fill_(top == -math.inf, 0) if safe else result
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: _SoftmaxContext, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        terms = gradient if ctx.log else gradient * result
        total = all_reduce_sum(terms.sum(ctx.dim, keepdim=True, dtype=wide), ctx.axis)
        found = gradient - result.exp() * total if ctx.log else result * (gradient - total)
        return None, found.to(gradient.dtype), None, None, None


SoftmaxDtype = torch.dtype | Literal[False] | None  # False (of `aten._softmax`) and None keep the input's dtype


def softmax(axis: Axis, x: torch.Tensor, dim: int, dtype: SoftmaxDtype = None) -> torch.Tensor:
    """`aten.softmax` and its aliases, over a split dim."""
    return _Softmax.apply(axis, x.to(dtype or x.dtype), dim, False, False)  # type: ignore[no-any-return, no-untyped-call]


def log_softmax(axis: Axis, x: torch.Tensor, dim: int, dtype: SoftmaxDtype = None) -> torch.Tensor:
    """`aten.log_softmax` and its aliases, over a split dim."""
    return _Softmax.apply(axis, x.to(dtype or x.dtype), dim, True, False)  # type: ignore[no-any-return, no-untyped-call]


def safe_softmax(axis: Axis, x: torch.Tensor, dim: int, dtype: SoftmaxDtype = None) -> torch.Tensor:
    """`aten._safe_softmax` over a split dim: zeros where every input is minus infinity."""
    return _Softmax.apply(axis, x.to(dtype or x.dtype), dim, False, True)  # type: ignore[no-any-return, no-untyped-call]


_FUNCTIONS = (
    vocab_parallel_embedding, vocab_parallel_cross_entropy, vocab_parallel_nll_loss, softmax, log_softmax, safe_softmax,
    layer_norm, rms_norm, group_norm, instance_norm, sync_batch_norm, grouped_query_attention, query_parallel_attention,
    ring_attention, all_to_all_rows, expert_parallel_grouped_mm, gate_parallel_lstm, gate_parallel_gru, gate_parallel_rnn_tanh,
    gate_parallel_rnn_relu,
)  # fmt: skip
# By the name of the form; two forms of one function differ in the dim that they split.
PARALLEL_OPS: dict[str, Callable[..., object]] = {
    **{function.__name__: function for function in _FUNCTIONS},
    "sync_batch_norm_spatial": sync_batch_norm,
    "group_norm_channels": group_norm,
}
# All functions that emitted code names in the place of an operator, the products of deferred gradients among them.
OPS = PARALLEL_OPS | {function.__name__: function for function in (deferred_linear, deferred_mm, deferred_addmm)}
