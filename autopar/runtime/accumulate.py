"""Gradients of weights that micro-batches add up, and that are sent once, with the last of them.

    with sums.waiting():
        ...                     forward and backward of every micro-batch but the last: gradients end where they would be sent
    ...                         of the last one: its gradients are added to the sums, which are sent
    sums.drop()

Outside of a step weights are as always.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch


class Sums:
    """What was added up so far, by the number of the bundle."""

    def __init__(self) -> None:
        self._waits = False
        self._held: dict[int, list[torch.Tensor]] = {}  # leaves that lie in the memory of the weights

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a forward and backward of which no gradient is sent."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def drop(self) -> None:
        """Forget what was added up: it was sent, or its step was given up."""
        self._held.clear()

    def of(self, number: int, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The weights of a bundle as a micro-batch uses them."""
        if not torch.is_grad_enabled():
            return list(weights)
        if self._waits:
            if number not in self._held:
                self._held[number] = [weight.detach().requires_grad_(weight.requires_grad) for weight in weights]
            return self._held[number]
        held = self._held.get(number)
        return [_Added.apply(*pair) for pair in zip(weights, held, strict=True)] if held else list(weights)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, object]) -> Sums:
        return Sums()


def held(sums: Sums, number: int, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The weights of bundle `number`, whose gradients wait for those of the other micro-batches.

    The target of a `call_function` node.
    """
    return sums.of(number, weights)


class _Adding(Protocol):
    held: torch.Tensor

    def set_materialize_grads(self, value: bool) -> None: ...


class _Added(torch.autograd.Function):
    """The weight; its gradient is added to the sum, which goes on in its place."""

    @staticmethod
    def forward(ctx: _Adding, weight: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        ctx.held = held
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: _Adding, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        total, ctx.held.grad = ctx.held.grad, None
        if total is None or gradient is None:
            return (total if gradient is None else gradient), None
        return total.add_(gradient), None
