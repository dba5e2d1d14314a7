"""Rewrites `embedding_bag` with bags of equal length as embedding and reduction, which can be split over bags.

The operator itself takes one flat list of indices and the offsets of the bags: no slice of the list is a list of whole bags.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional


def spelt(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`F.embedding_bag` of a matrix of indices, as an embedding followed by a sum, mean or maximum.

    embedding_bag(x, w, mode="sum")    ->    embedding(x, w).sum(1)

    Uses the original for bags of unequal length, for gradients that are sparse or scaled by frequency, for renormalised
    rows, and for the maximum where some rows are padding.
    """

    def embedding_bag(
        input: torch.Tensor,
        weight: torch.Tensor,
        offsets: torch.Tensor | None = None,
        max_norm: float | None = None,
        norm_type: float = 2,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        per_sample_weights: torch.Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> torch.Tensor:
        special = max_norm is not None or scale_grad_by_freq or sparse or (padding_idx is not None and mode == "max")
        if input.dim() != 2 or not input.shape[1] or special or (per_sample_weights is not None and mode != "sum"):
            given = offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights
            return original(input, weight, *given, include_last_offset, padding_idx)
        found = functional.embedding(input, weight)
        if mode == "max":
            return found.max(1).values
        if per_sample_weights is not None:
            found = found * per_sample_weights[..., None]
        if padding_idx is None:
            return found.sum(1) if mode == "sum" else found.mean(1)
        there = (input != padding_idx % weight.shape[0]).to(weight.dtype)
        total = (found * there[..., None]).sum(1)
        return total if mode == "sum" else total / there.sum(1, keepdim=True).clamp(min=1)

    return embedding_bag
