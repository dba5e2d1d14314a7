"""Accumulation of weight gradients over micro-batches, with one gradient collective per step.

    with accumulator.step():
        with accumulator.no_sync():
            ...                 forward and backward of every micro-batch but the last: gradients are kept on this rank
        ...                     the last one: its gradients are added, and the totals are reduced

`no_sync` is that of torch's DistributedDataParallel, at the level of a bucket: in place of a bucket's weights the forward uses
leaves that share their memory, whose `.grad` accumulates. Plans may also gather a bucket once per step (`start_once`,
`wait_once`): then all micro-batches use the gathered weights, and their gradients are reduced after the last one.

Compiled, the leaves are made before the first micro-batch (`codegen.compiled.shared_weights`), so that the program of a
micro-batch only reads them: as a whole graph, in which the last one adds what they have accumulated to its gradients.

Outside of `step` every forward and backward communicates. With `defer_all` all micro-batches use the leaves, and what is
accumulated is reduced when the step ends: their backwards may come in halves, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.runtime import bucket_autograd
from autopar.runtime.bucket_autograd import PendingBucket, Splits
from autopar.runtime.rematerialize.manager import Rematerializer
from autopar.runtime.rematerialize.recompute import Tensors
from autopar.runtime.world import Axis


class GradientAccumulator:
    """The gradients accumulated in the current step, by bucket number."""

    def __init__(self) -> None:
        self._no_sync = False
        self._in_step = False
        self._gathered: dict[int, Tensors] = {}  # buckets gathered once, which all micro-batches use
        self._leaves: dict[int, list[torch.Tensor]] = {}  # leaves over the memory of each bucket's weights
        self._ends: dict[int, list[GradientEdge | None]] = {}  # where the gradients of these go when the step ends
        self.defer_all = False

    @property
    def more(self) -> bool:
        """Whether gradients of further micro-batches of the step are to come."""
        return self._no_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around a forward and backward after which no gradient is reduced."""
        self._no_sync = True
        try:
            yield
        finally:
            self._no_sync = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around all micro-batches of a step; afterwards nothing is kept, even if the step raised."""
        self._in_step = True
        try:
            yield
            self._reduce_gathered()
        finally:
            self._in_step = False
            self._leaves.clear()
            self._gathered.clear()
            self._ends.clear()

    def _reduce_gathered(self) -> None:
        """Run the backward of the buckets that were gathered once, or deferred, from the accumulated gradients."""
        while self._ends:
            number, ends = self._ends.popitem()
            pairs = [(end, leaf.grad) for end, leaf in zip(ends, self._leaves.pop(number), strict=True)]
            edges: Any = [end for end, gradient in pairs if end and gradient is not None]
            if edges:
                torch.autograd.backward(edges, [gradient for end, gradient in pairs if end and gradient is not None])
        while self._gathered:
            number, weights = self._gathered.popitem()
            gradients = [leaf.grad for leaf in self._leaves.pop(number)]
            trained = [weight for weight, gradient in zip(weights, gradients, strict=True) if gradient is not None]
            if trained:
                torch.autograd.backward(trained, [gradient for gradient in gradients if gradient is not None])

    def leaves(self, number: int) -> list[torch.Tensor]:
        """The leaves that stand for the weights of a bucket gathered before."""
        return self._leaves[number]

    def is_gathered(self, number: int) -> bool:
        """Whether a bucket was gathered by an earlier micro-batch of this step."""
        return number in self._gathered

    def share(self, number: int, weights: Tensors) -> list[torch.Tensor]:
        """Keep a gathered bucket for all micro-batches of the step; returns what they use in place of its weights."""
        if not self._in_step or not torch.is_grad_enabled():
            return list(weights)
        self._gathered[number] = weights
        self._leaves[number] = _leaves(weights)
        return self._leaves[number]

    def accumulate(self, number: int, weights: Tensors) -> list[torch.Tensor]:
        """The leaves that one micro-batch uses instead of a bucket's weights, so that their gradients accumulate."""
        if not torch.is_grad_enabled():
            return list(weights)
        if (self.defer_all and self._in_step) or self._no_sync:
            if number not in self._leaves:
                self._leaves[number] = _leaves(weights)
                if self.defer_all:
                    self._ends[number] = [get_gradient_edge(w) if w.requires_grad else None for w in weights]
            return self._leaves[number]
        leaves = self._leaves.get(number)
        if not leaves:
            return list(weights)
        if torch.compiler.is_compiling():
            return [_traced(*pair) for pair in zip(weights, leaves, strict=True)]
        return [_AddAccumulated.apply(*pair) for pair in zip(weights, leaves, strict=True)]  # type: ignore[no-untyped-call]

    def hand_over(self) -> None:
        """After a forward: what was accumulated is held only by its backward, if that adds it."""
        if not (self._no_sync or self.defer_all or self._gathered):
            self._leaves.clear()

    def __deepcopy__(self, memo: dict[int, object]) -> GradientAccumulator:
        return GradientAccumulator()


def _leaves(weights: Tensors) -> list[torch.Tensor]:
    """Leaves of the autograd graph over the memory of these weights."""
    return [weight.detach().requires_grad_(weight.requires_grad) for weight in weights]


def start_once(
    accumulator: GradientAccumulator,
    number: int,
    conversion: str,
    weights: Tensors,
    axis: Axis,
    reduce_dtype: torch.dtype | None = None,
) -> PendingBucket | None:
    """`bucket_autograd.start_bucket`; None if an earlier micro-batch of the step gathered the bucket.

    The target of a `call_function` node of emitted code.
    """
    return None if accumulator.is_gathered(number) else bucket_autograd.start_bucket(conversion, weights, axis, reduce_dtype)


def wait_once(
    accumulator: GradientAccumulator,
    number: int,
    conversion: str,
    bucket: PendingBucket | None,
    axis: Axis,
    splits: Splits | None = None,
    rematerializer: Rematerializer | None = None,
) -> list[torch.Tensor]:
    """`bucket_autograd.wait_bucket`, whose weights all micro-batches of a step share.

    The target of a `call_function` node of emitted code.
    """
    if bucket is None:
        return accumulator.leaves(number)
    return accumulator.share(number, bucket_autograd.wait_bucket(conversion, bucket, axis, splits, rematerializer))


def accumulate_gradients(accumulator: GradientAccumulator, number: int, weights: Tensors) -> list[torch.Tensor]:
    """The weights of bucket `number`, whose gradients are accumulated over micro-batches before they are reduced.

    The target of a `call_function` node of emitted code.
    """
    return accumulator.accumulate(number, weights)


class _Context(Protocol):
    leaf: torch.Tensor
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class _AddAccumulated(torch.autograd.Function):
    """The weight itself; its gradient is added to what the leaf accumulated, and the total is passed on."""

    @staticmethod
    def forward(ctx: _Context, weight: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        ctx.leaf = leaf
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        total, ctx.leaf.grad = ctx.leaf.grad, None
        if total is None or gradient is None:
            return (total if gradient is None else gradient), None
        return total.add_(gradient), None


def _traced(weight: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """`_AddAccumulated` in a graph, of which the total is an input."""
    if leaf.grad is None:
        return weight
    found: torch.Tensor = _AddTotal.apply(weight, leaf.grad)  # type: ignore[no-untyped-call]
    return found


class _AddTotal(torch.autograd.Function):
    """The weight itself; the total is added to its gradient."""

    @staticmethod
    def forward(ctx: _Context, weight: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(total)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (total,) = ctx.saved_tensors
        return total + gradient, None
