"""Norms over a dim that is split, with statistics combined over ranks (`autopar.runtime.parallel_ops`).

Ranks all-gather mean and variance of their part, and combine them as T. Chan, G. Golub, R. LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances", 1979: a difference of sums of squares would cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from autopar.runtime.collectives import all_gather_stack, all_reduce_sum, identity__all_reduce, identity__keep
from autopar.runtime.world import Axis


def global_statistics(x: torch.Tensor, dims: tuple[int, ...], axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance over these dims and over all ranks, whose parts have equal sizes; in float32 at least."""
    local = torch.var_mean(_upcast(x), dims, correction=0, keepdim=True)
    variances, means = all_gather_stack(torch.stack(local), axis).unbind(1)
    mean = means.mean(0)
    return mean, (variances + (means - mean).square_()).mean(0)


def _upcast(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Context(Protocol):
    axis: Axis
    dims: tuple[int, ...]
    weight_dims: tuple[int, ...]
    reduce_weight_gradients: bool
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


class _Norm(torch.autograd.Function):
    """`(x - mean) * scale * weight + bias`, where mean and scale are computed from x over `dims` and all ranks.

    Weight and bias have the dims `weight_dims`; their gradients are all-reduced if `reduce_weight_gradients`. Without a mean
    (RMS norm) nothing is subtracted.
    """

    @staticmethod
    def forward(
        ctx: _Context, axis: Axis, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
        mean: torch.Tensor | None, scale: torch.Tensor, dims: tuple[int, ...], weight_dims: tuple[int, ...],
        reduce_weight_gradients: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.axis, ctx.dims, ctx.weight_dims, ctx.reduce_weight_gradients = axis, dims, weight_dims, reduce_weight_gradients
        saved_bias = bias if weight_dims == dims else None  # aten's layer norm saves it, and plans count what aten saves
        ctx.save_for_backward(x, weight, mean, scale, saved_bias)
        result, shape = _normalized(x, mean, scale), _broadcast_shape(weight_dims, x)
        result = result if weight is None else result.mul_(weight.view(shape))
        return (result if bias is None else result.add_(bias.view(shape))).to(x.dtype)

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mean: torch.Tensor | None
        x, weight, mean, scale, _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            mean, scale = _differentiable_statistics(x, mean, scale, ctx.dims, ctx.axis)
            if weight is not None and ctx.reduce_weight_gradients:
                weight = identity__all_reduce(weight, ctx.axis)
        normalized, gradient, shape = _normalized(x, mean, scale), _upcast(gradient), _broadcast_shape(ctx.weight_dims, x)
        rest = [d for d in range(x.dim()) if d not in ctx.weight_dims]
        for_bias, for_weight = (one.sum(rest) if rest else one for one in (gradient, gradient * normalized))
        inner = gradient if weight is None else gradient * weight.view(shape)
        if ctx.reduce_weight_gradients:  # weight and bias have the dims of the statistics, so one all-reduce serves both
            for_bias, for_weight = all_reduce_sum(torch.stack([for_bias, for_weight]), ctx.axis).unbind(0)
            factor = 1 if weight is None else weight.view(shape)
            total, total_along = for_bias.view(shape) * factor, for_weight.view(shape) * factor
            for_bias, for_weight = identity__keep(for_bias, ctx.axis), identity__keep(for_weight, ctx.axis)
        else:
            sums = [inner.sum(ctx.dims, keepdim=True)] * (mean is not None)
            sums.append((inner * normalized).sum(ctx.dims, keepdim=True))
            *first, total_along = all_reduce_sum(torch.stack(sums), ctx.axis).unbind(0)
            total = first[0] if first else torch.zeros_like(total_along)
        count = ctx.axis.size * math.prod([x.shape[d] for d in ctx.dims])
        found = (inner - total / count - normalized * (total_along / count)) * scale
        flat = (one.flatten() if weight is None else one.view_as(weight) for one in (for_weight, for_bias))
        results = None, found.to(x.dtype), *(one.to(x.dtype) for one in flat), *[None] * 5
        return tuple(one if wanted else None for one, wanted in zip(results, ctx.needs_input_grad, strict=True))


def _differentiable_statistics(
    x: torch.Tensor, mean: torch.Tensor | None, scale: torch.Tensor, dims: tuple[int, ...], axis: Axis
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Mean and scale as functions of x, with the values that the forward computed: epsilon is in them."""
    wide = _upcast(x)
    mean = None if mean is None else all_reduce_sum(wide.mean(dims, keepdim=True), axis) / axis.size
    squares = (wide if mean is None else wide - mean).square()
    variance = all_reduce_sum(squares.mean(dims, keepdim=True), axis) / axis.size
    return mean, (variance - variance.detach() + scale.square().reciprocal()).rsqrt()


def _normalized(x: torch.Tensor, mean: torch.Tensor | None, scale: torch.Tensor) -> torch.Tensor:
    return (_upcast(x) if mean is None else x - mean) * scale


def _broadcast_shape(dims: tuple[int, ...], x: torch.Tensor) -> tuple[int, ...]:
    """The shape in which a tensor that has only some dims of x broadcasts with x."""
    return tuple(size if d in dims else 1 for d, size in enumerate(x.shape))


def layer_norm(
    axis: Axis, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> torch.Tensor:  # fmt: skip
    """`aten.layer_norm` over the last dims, the first of which is split, as are weight and bias."""
    dims = _last_dims(x, shape)
    with torch.no_grad():
        mean, variance = global_statistics(x, dims, axis)
        scale = variance.add_(eps).rsqrt_()
    return _Norm.apply(axis, x, weight, bias, mean, scale, dims, dims, False)  # type: ignore[no-any-return, no-untyped-call]


def rms_norm(
    axis: Axis, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """`aten.rms_norm` over the last dims, the first of which is split, as is the weight."""
    dims = _last_dims(x, shape)
    with torch.no_grad():
        squares = all_reduce_sum(_upcast(x).square().mean(dims, keepdim=True), axis) / axis.size
        scale = squares.add_(torch.finfo(x.dtype).eps if eps is None else eps).rsqrt_()
    return _Norm.apply(axis, x, weight, None, None, scale, dims, dims, False)  # type: ignore[no-any-return, no-untyped-call]


def _last_dims(x: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The trailing dims of x that a normalized shape covers."""
    return tuple(range(x.dim() - len(shape), x.dim()))


def group_norm(
    axis: Axis, x: torch.Tensor, groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """`aten.group_norm` with spatial dims split, or of a single group with channels split, as are weight and bias."""
    grouped = x.reshape(len(x), groups, x.shape[1] // groups, -1)
    with torch.no_grad():
        mean, variance = global_statistics(grouped, (2, 3), axis)
        scale = variance.add_(eps).rsqrt_()
    found = _Norm.apply(axis, grouped, weight, bias, mean, scale, (2, 3), (1, 2), False)  # type: ignore[no-untyped-call]
    return found.view(x.shape)  # type: ignore[no-any-return]


def instance_norm(
    axis: Axis, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: None,
    running_var: None, use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> torch.Tensor:  # fmt: skip
    """`aten.instance_norm` with spatial dims split: a group norm whose groups are the channels."""
    return group_norm(axis, x, x.shape[1], weight, bias, eps)


def sync_batch_norm(
    axis: Axis, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> torch.Tensor:  # fmt: skip
    """`aten.batch_norm` with batch or spatial dims split; statistics are those of the global batch, as in SyncBatchNorm."""
    if not training:
        weight, bias = (one if one is None else identity__all_reduce(one, axis) for one in (weight, bias))
        rest = running_mean, running_var, training, momentum, eps, cudnn_enabled
        return torch.ops.aten.batch_norm(x, weight, bias, *rest)  # type: ignore[no-any-return]
    dims = (0, *range(2, x.dim()))
    with torch.no_grad():
        mean, variance = global_statistics(x, dims, axis)
        if running_mean is not None and running_var is not None:
            count = axis.size * x.numel() // x.shape[1]
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
            running_var.lerp_((variance.flatten() * (count / (count - 1))).to(running_var.dtype), momentum)
        scale = variance.add_(eps).rsqrt_()
    return _Norm.apply(axis, x, weight, bias, mean, scale, dims, (1,), True)  # type: ignore[no-any-return, no-untyped-call]
