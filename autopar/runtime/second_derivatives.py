"""Refuses second derivatives of parallel operators whose hand-written backward cannot be differentiated.

torch's own `once_differentiable` raises nothing if only the saved tensors, not the incoming gradient, require grad.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from autopar.errors import DerivativeError

Found = TypeVar("Found")
Backward = Callable[..., Found]


def refuse_twice(operator: str) -> None:
    """Raise DerivativeError in a backward that runs under `create_graph=True`."""
    if torch.is_grad_enabled():
        raise DerivativeError(
            f"{operator} has no second derivative (create_graph=True)",
            fix="leave the dim that it splits whole, by constraints={...} or another strategy",
        )


def once_differentiable(operator: str) -> Callable[[Backward[Found]], Backward[Found]]:
    """A decorator for the backward of an operator that has no second derivative."""

    def decorate(backward: Backward[Found]) -> Backward[Found]:
        @functools.wraps(backward)
        def checked(ctx: object, *gradients: torch.Tensor) -> Found:
            refuse_twice(operator)
            return backward(ctx, *gradients)

        return checked

    return decorate
