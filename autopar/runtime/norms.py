"""Norms over a dim that is split: distributed forms whose ranks put their statistics together (`runtime.forms`).

Every rank sends its mean and variance, which are put together as by T. Chan, G. Golub, R. LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances", 1979: in sums of squares small differences of large numbers would get lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from autopar.runtime.collectives import gathered, identity__all_reduce, summed
from autopar.runtime.world import Axis


def statistics(x: torch.Tensor, dims: tuple[int, ...], axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance over these dims and over all ranks, which hold equally much; of float32 at least."""
    own = torch.var_mean(_wide(x), dims, correction=0, keepdim=True)
    variances, means = gathered(torch.stack(own), axis).unbind(1)
    mean = means.mean(0)
    return mean, (variances + (means - mean).square_()).mean(0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Context(Protocol):
    axis: Axis
    dims: tuple[int, ...]
    own: tuple[int, ...]
    complete: bool
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


class _Norm(torch.autograd.Function):
    """`(x - mean) * scale * weight + bias`, where mean and scale follow from x over some dims and all ranks.

    Weight and bias lie along dims of their `own`; their gradients are the sums over all ranks if `complete`. Without a mean
    nothing is subtracted.
    """

    @staticmethod
    def forward(
        ctx: _Context, axis: Axis, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
        mean: torch.Tensor | None, scale: torch.Tensor, dims: tuple[int, ...], own: tuple[int, ...], complete: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.axis, ctx.dims, ctx.own, ctx.complete = axis, dims, own, complete
        kept = bias if own == dims else None  # as aten's layer norm does: plans go by it
        ctx.save_for_backward(x, weight, mean, scale, kept)
        result, shape = _normal(x, mean, scale), _along(own, x)
        result = result if weight is None else result.mul_(weight.view(shape))
        return (result if bias is None else result.add_(bias.view(shape))).to(x.dtype)

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale, _ = ctx.saved_tensors
        normal, gradient, shape = _normal(x, mean, scale), _wide(gradient), _along(ctx.own, x)
        rest = [d for d in range(x.dim()) if d not in ctx.own]
        for_bias, for_weight = gradient.sum(rest), (gradient * normal).sum(rest)
        inner = gradient if weight is None else gradient * weight.view(shape)
        if ctx.complete:  # the same sums serve both: weight and bias have the dims that the statistics have
            sums = for_bias, for_weight = summed(torch.stack([for_bias, for_weight]), ctx.axis).unbind(0)
            plain, along = (one.view(shape) * (1 if weight is None else weight.view(shape)) for one in sums)
        else:
            shares = [inner.sum(ctx.dims, keepdim=True)] * (mean is not None)
            shares.append((inner * normal).sum(ctx.dims, keepdim=True))
            *first, along = summed(torch.stack(shares), ctx.axis).unbind(0)
            plain = first[0] if first else torch.zeros_like(along)
        count = ctx.axis.size * math.prod(x.shape[d] for d in ctx.dims)
        found = (inner - plain / count - normal * (along / count)) * scale
        flat = (one.flatten() if weight is None else one.view_as(weight) for one in (for_weight, for_bias))
        results = None, found.to(x.dtype), *(one.to(x.dtype) for one in flat), *[None] * 5
        return tuple(one if wanted else None for one, wanted in zip(results, ctx.needs_input_grad, strict=True))


def _normal(x: torch.Tensor, mean: torch.Tensor | None, scale: torch.Tensor) -> torch.Tensor:
    return (_wide(x) if mean is None else x - mean) * scale


def _along(dims: tuple[int, ...], x: torch.Tensor) -> tuple[int, ...]:
    """The shape of what lies along some dims of a tensor."""
    return tuple(size if d in dims else 1 for d, size in enumerate(x.shape))


def layer_norm(
    axis: Axis, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> torch.Tensor:  # fmt: skip
    """`aten.layer_norm` over the last dims, of which the first is split, like weight and bias."""
    dims = _last(x, shape)
    with torch.no_grad():
        mean, variance = statistics(x, dims, axis)
        scale = variance.add_(eps).rsqrt_()
    return _Norm.apply(axis, x, weight, bias, mean, scale, dims, dims, False)  # type: ignore[no-any-return, no-untyped-call]


def rms_norm(
    axis: Axis, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """`aten.rms_norm` over the last dims, of which the first is split, like the weight."""
    dims = _last(x, shape)
    with torch.no_grad():
        squares = summed(_wide(x).square().mean(dims, keepdim=True), axis) / axis.size
        scale = squares.add_(torch.finfo(x.dtype).eps if eps is None else eps).rsqrt_()
    return _Norm.apply(axis, x, weight, None, None, scale, dims, dims, False)  # type: ignore[no-any-return, no-untyped-call]


def _last(x: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """As many of the last dims as the shape has."""
    return tuple(range(x.dim() - len(shape), x.dim()))


def group_norm(
    axis: Axis, x: torch.Tensor, groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """`aten.group_norm` of planes that are split, or of one group whose channels are, like weight and bias."""
    apart = x.reshape(len(x), groups, x.shape[1] // groups, -1)
    with torch.no_grad():
        mean, variance = statistics(apart, (2, 3), axis)
        scale = variance.add_(eps).rsqrt_()
    found = _Norm.apply(axis, apart, weight, bias, mean, scale, (2, 3), (1, 2), False)  # type: ignore[no-untyped-call]
    return found.view(x.shape)  # type: ignore[no-any-return]


def instance_norm(
    axis: Axis, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: None,
    running_var: None, use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> torch.Tensor:  # fmt: skip
    """`aten.instance_norm` of planes that are split: every channel is a group."""
    return group_norm(axis, x, x.shape[1], weight, bias, eps)


def batch_norm(
    axis: Axis, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> torch.Tensor:  # fmt: skip
    """`aten.batch_norm` of a batch that is split, or of planes: statistics, running ones too, and gradients are the whole's."""
    if not training:
        weight, bias = (one if one is None else identity__all_reduce(one, axis) for one in (weight, bias))
        rest = running_mean, running_var, training, momentum, eps, cudnn_enabled
        return torch.ops.aten.batch_norm(x, weight, bias, *rest)  # type: ignore[no-any-return]
    dims = (0, *range(2, x.dim()))
    with torch.no_grad():
        mean, variance = statistics(x, dims, axis)
        if running_mean is not None and running_var is not None:
            count = axis.size * x.numel() // x.shape[1]
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
            running_var.lerp_((variance.flatten() * (count / (count - 1))).to(running_var.dtype), momentum)
        scale = variance.add_(eps).rsqrt_()
    return _Norm.apply(axis, x, weight, bias, mean, scale, dims, (1,), True)  # type: ignore[no-any-return, no-untyped-call]
