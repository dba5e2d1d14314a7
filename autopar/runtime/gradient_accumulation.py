"""Gradients of weights that micro-batches add up, and that are sent once, with the last of them.

    with sums.step():
        with sums.waiting():
            ...                 forward and backward of every micro-batch but the last: gradients end where they would be sent
        ...                     of the last one: its gradients are added to the sums, which are sent

Weights that are gathered once for all micro-batches are so in the first of a step; the gradients of all end there, and are sent
after the last.

Outside of a step weights are as always.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from autopar.runtime import bucketed_collectives
from autopar.runtime.rematerialize.manager import Rematerializer
from autopar.runtime.world import Axis


class GradientAccumulator:
    """What was added up so far, by the number of the bundle."""

    def __init__(self) -> None:
        self._waits = False
        self._shares = False
        self._whole: dict[int, Sequence[torch.Tensor]] = {}  # what was gathered for all micro-batches
        self._held: dict[int, list[torch.Tensor]] = {}  # leaves that lie in the memory of the weights

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a forward and backward of which no gradient is sent."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around all micro-batches of a step; what was added up is forgotten after it, even if it was given up."""
        self._shares = True
        try:
            yield
            self._send()
        finally:
            self._shares = False
            self._held.clear()
            self._whole.clear()

    def _send(self) -> None:
        """Send the gradients of what was gathered for all micro-batches."""
        while self._whole:
            number, weights = self._whole.popitem()
            gradients = [held.grad for held in self._held.pop(number)]
            trained = [weight for weight, gradient in zip(weights, gradients, strict=True) if gradient is not None]
            if trained:
                torch.autograd.backward(trained, [gradient for gradient in gradients if gradient is not None])

    def held(self, number: int) -> list[torch.Tensor]:
        """The weights of a bundle that has come."""
        return self._held[number]

    def came(self, number: int) -> bool:
        """Whether a bundle has come for all micro-batches."""
        return number in self._whole

    def shared(self, number: int, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The weights of a bundle that has come, as every micro-batch uses them."""
        if not self._shares or not torch.is_grad_enabled():
            return list(weights)
        self._whole[number] = weights
        self._held[number] = _leaves(weights)
        return self._held[number]

    def of(self, number: int, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The weights of a bundle as a micro-batch uses them."""
        if not torch.is_grad_enabled():
            return list(weights)
        if self._waits:
            if number not in self._held:
                self._held[number] = _leaves(weights)
            return self._held[number]
        held = self._held.get(number)
        return [_Added.apply(*pair) for pair in zip(weights, held, strict=True)] if held else list(weights)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, object]) -> GradientAccumulator:
        return GradientAccumulator()


def _leaves(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The weights as leaves, in the same memory."""
    return [weight.detach().requires_grad_(weight.requires_grad) for weight in weights]


def begin(
    sums: GradientAccumulator,
    number: int,
    conversion: str,
    weights: bucketed_collectives.Tensors,
    axis: Axis,
    summed: torch.dtype | None = None,
) -> bucketed_collectives.PendingBucket | None:
    """`bucketed_collectives.begin`, unless the bundle has come for all micro-batches. The target of a `call_function` node,
    like `finish`."""
    return None if sums.came(number) else bucketed_collectives.begin(conversion, weights, axis, summed)


def finish(
    sums: GradientAccumulator,
    number: int,
    anew: Rematerializer | None,
    conversion: str,
    begun: bucketed_collectives.PendingBucket | None,
    axis: Axis,
    places: bucketed_collectives.Places | None = None,
) -> list[torch.Tensor]:
    """`bucketed_collectives.finish`; in a step what has come serves all micro-batches."""
    return (
        sums.held(number)
        if begun is None
        else sums.shared(number, bucketed_collectives.finish(anew, conversion, begun, axis, places))
    )


def held(sums: GradientAccumulator, number: int, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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
