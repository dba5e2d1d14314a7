"""Conversions of a bucket of weights in one collective, which overlaps with computation: the functions that emitted code calls.

    bucket = all_gather__reduce_scatter_start([w, v], dp)                            issue the all-gather of h.1's weights,
    ...                                                                              compute h.0,
    w, v = all_gather__reduce_scatter_wait(bucket, dp, splits=[(0,), (0,)])          wait for h.1's weights

Every conversion of `autopar.runtime.collectives` has such a pair of functions, named `forward__backward`, and so have those
between the memories of a device (`autopar.runtime.host_memory`, `autopar.runtime.disk`). `_start` takes the
dtype in which gradients are reduced, by default the weights' own. `_wait` takes where each weight is split, for conversions
that move a split, and a rematerializer if the weights are dropped after their use and gathered again in the backward.

Autograd runs what is ready in reverse order of the forward, so gradients of whatever was called between the two are computed
while those of the bucket are sent. See `autopar.runtime.bucket_autograd`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.runtime.bucket_autograd import PendingBucket, Splits, start_bucket, wait_bucket
from autopar.runtime.rematerialize.manager import Rematerializer
from autopar.runtime.rematerialize.recompute import Tensors
from autopar.runtime.world import Axis


def identity__all_reduce_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """I to R: nothing moves; gradients are all-reduced."""
    return start_bucket("identity__all_reduce", weights, axis, reduce_dtype)


def identity__all_reduce_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The converted weights of `identity__all_reduce_start`."""
    return wait_bucket("identity__all_reduce", bucket, axis, splits, rematerializer)


def slice__all_gather_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """I to S: slices; gradients are all-gathered."""
    return start_bucket("slice__all_gather", weights, axis, reduce_dtype)


def slice__all_gather_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The converted weights of `slice__all_gather_start`."""
    return wait_bucket("slice__all_gather", bucket, axis, splits, rematerializer)


def keep__identity_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """I to P: rank 0 keeps the values; gradients are the same on every rank."""
    return start_bucket("keep__identity", weights, axis, reduce_dtype)


def keep__identity_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The converted weights of `keep__identity_start`."""
    return wait_bucket("keep__identity", bucket, axis, splits, rematerializer)


def slice__pad_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """R to S: slices; gradients are padded with zeros."""
    return start_bucket("slice__pad", weights, axis, reduce_dtype)


def slice__pad_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The converted weights of `slice__pad_start`."""
    return wait_bucket("slice__pad", bucket, axis, splits, rematerializer)


def identity__keep_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """R to I: nothing moves; only rank 0 passes gradients on."""
    return start_bucket("identity__keep", weights, axis, reduce_dtype)


def identity__keep_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The converted weights of `identity__keep_start`."""
    return wait_bucket("identity__keep", bucket, axis, splits, rematerializer)


def keep__keep_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """R to P: rank 0 keeps the values, and likewise the gradients."""
    return start_bucket("keep__keep", weights, axis, reduce_dtype)


def keep__keep_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The converted weights of `keep__keep_start`."""
    return wait_bucket("keep__keep", bucket, axis, splits, rematerializer)


def all_gather__reduce_scatter_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """S to R: one all-gather; gradients are reduce-scattered."""
    return start_bucket("all_gather__reduce_scatter", weights, axis, reduce_dtype)


def all_gather__reduce_scatter_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The converted weights of `all_gather__reduce_scatter_start`."""
    return wait_bucket("all_gather__reduce_scatter", bucket, axis, splits, rematerializer)


def all_gather__slice_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """S to I: one all-gather; gradients are sliced."""
    return start_bucket("all_gather__slice", weights, axis, reduce_dtype)


def all_gather__slice_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The converted weights of `all_gather__slice_start`."""
    return wait_bucket("all_gather__slice", bucket, axis, splits, rematerializer)


def pad__slice_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """S to P: padded with zeros; gradients are sliced."""
    return start_bucket("pad__slice", weights, axis, reduce_dtype)


def pad__slice_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The converted weights of `pad__slice_start`."""
    return wait_bucket("pad__slice", bucket, axis, splits, rematerializer)


def all_to_all__all_to_all_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """S to S: all-to-all, there and back."""
    return start_bucket("all_to_all__all_to_all", weights, axis, reduce_dtype)


def all_to_all__all_to_all_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The converted weights of `all_to_all__all_to_all_start`."""
    return wait_bucket("all_to_all__all_to_all", bucket, axis, splits, rematerializer)


def all_reduce__all_reduce_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """P to R: all-reduce, there and back."""
    return start_bucket("all_reduce__all_reduce", weights, axis, reduce_dtype)


def all_reduce__all_reduce_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The converted weights of `all_reduce__all_reduce_start`."""
    return wait_bucket("all_reduce__all_reduce", bucket, axis, splits, rematerializer)


def all_reduce__identity_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """P to I: all-reduce; gradients are complete on every rank."""
    return start_bucket("all_reduce__identity", weights, axis, reduce_dtype)


def all_reduce__identity_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The converted weights of `all_reduce__identity_start`."""
    return wait_bucket("all_reduce__identity", bucket, axis, splits, rematerializer)


def reduce_scatter__all_gather_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """P to S: reduce-scatter; gradients are all-gathered."""
    return start_bucket("reduce_scatter__all_gather", weights, axis, reduce_dtype)


def reduce_scatter__all_gather_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The converted weights of `reduce_scatter__all_gather_start`."""
    return wait_bucket("reduce_scatter__all_gather", bucket, axis, splits, rematerializer)


def fetch__stow_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """H to I: copied from the host; gradients are copied to it."""
    return start_bucket("fetch__stow", weights, axis, reduce_dtype)


def fetch__stow_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The fetched weights of `fetch__stow_start`."""
    return wait_bucket("fetch__stow", bucket, axis, splits, rematerializer)


def read__write_start(weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """D to I: read from the disk; gradients are written to it."""
    return start_bucket("read__write", weights, axis, reduce_dtype)


def read__write_wait(
    bucket: PendingBucket, axis: Axis, splits: Splits | None = None, rematerializer: Rematerializer | None = None
) -> list[torch.Tensor]:
    """The weights of `read__write_start`."""
    return wait_bucket("read__write", bucket, axis, splits, rematerializer)


PAIRS: dict[str, tuple[Callable[..., PendingBucket], Callable[..., list[torch.Tensor]]]] = {
    "identity__all_reduce": (identity__all_reduce_start, identity__all_reduce_wait),
    "slice__all_gather": (slice__all_gather_start, slice__all_gather_wait),
    "keep__identity": (keep__identity_start, keep__identity_wait),
    "slice__pad": (slice__pad_start, slice__pad_wait),
    "identity__keep": (identity__keep_start, identity__keep_wait),
    "keep__keep": (keep__keep_start, keep__keep_wait),
    "all_gather__reduce_scatter": (all_gather__reduce_scatter_start, all_gather__reduce_scatter_wait),
    "all_gather__slice": (all_gather__slice_start, all_gather__slice_wait),
    "pad__slice": (pad__slice_start, pad__slice_wait),
    "all_to_all__all_to_all": (all_to_all__all_to_all_start, all_to_all__all_to_all_wait),
    "all_reduce__all_reduce": (all_reduce__all_reduce_start, all_reduce__all_reduce_wait),
    "all_reduce__identity": (all_reduce__identity_start, all_reduce__identity_wait),
    "reduce_scatter__all_gather": (reduce_scatter__all_gather_start, reduce_scatter__all_gather_wait),
    "fetch__stow": (fetch__stow_start, fetch__stow_wait),
    "read__write": (read__write_start, read__write_wait),
}
