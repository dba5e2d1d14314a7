"""Deterministic replacements for operators that draw from several operands, or by weights, so that verification can compare.

autopar::certain_classes    aten.multinomial: classes that each row has weights of
autopar::certain_numbers    aten.normal, aten.binomial and aten.bernoulli of two tensors: one number everywhere
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

CLASSES, NUMBERS = "autopar.certain_classes.default", "autopar.certain_numbers.default"


@torch.library.custom_op("autopar::certain_classes", mutates_args=())
def certain_classes(weights: Tensor, number: int) -> Tensor:
    """The first classes of each row whose weight is positive, and these anew after the last: what a draw may give.

    [0, 2, 0, 1], 2    ->    [1, 3]
    [0, 2, 0, 1], 3    ->    [1, 3, 1]
    """
    positive = weights > 0
    order = positive.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(number, device=weights.device) % positive.sum(-1, keepdim=True).clamp(min=1)
    return order.gather(-1, places)


@certain_classes.register_fake
def _(weights: Tensor, number: int) -> Tensor:
    return weights.new_empty((*weights.shape[:-1], number), dtype=torch.long)


@torch.library.custom_op("autopar::certain_numbers", mutates_args=())
def certain_numbers(first: Tensor, second: Tensor, number: float) -> Tensor:
    """One number everywhere, in the shape to which two tensors broadcast; their gradients are zeros, as those of a draw."""
    return first.new_full(_shape(first, second), number)


@certain_numbers.register_fake
def _(first: Tensor, second: Tensor, number: float) -> Tensor:
    return first.new_empty(_shape(first, second))


def _shape(first: Tensor, second: Tensor) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(first.shape, second.shape))  # type: ignore[no-untyped-call]


class _Context(Protocol):
    saved_tensors: tuple[Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def _setup(ctx: _Context, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
    pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
    return *(torch.zeros_like(one) if needed else None for one, needed in pairs), None


certain_numbers.register_autograd(_backward, setup_context=_setup)


__all__ = ["CLASSES", "NUMBERS", "certain_classes", "certain_numbers"]
