"""Products with weights whose gradients are made in two parts, for pipeline schedules that have a backward in halves.

    y = deferred_linear(deferred, x, w)         instead of linear(x, w)
    I   dx = dy w goes on; x and dy are kept    inside `deferred.collecting(k)`, around the backward of micro-batch k
    W   dw = dy^T x goes on to the weight       `deferred.run(k)`

Nothing is done twice: each saved tensor is unpacked once, so a plan's recomputations and repeated gathers run once. The weight
is cut off the graph of the activations, so that I does not come to what made the weight (a view, a cast).

    w, b = cut_weights(deferred, gathered)      weights whose gradients travel in every micro-batch

I makes some of a bucket's gradients (biases, norms), W the others: they are collected, and W sends them on once it has made the
last of the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.runtime.rematerialize.recompute import Tensors

WeightGradient = tuple[GradientEdge, Callable[[], torch.Tensor]]  # where it goes, and what makes it


class _CutBucket:
    """The weights of a bucket in one micro-batch: where their gradients go, and the gradients so far."""

    def __init__(self, weights: Tensors) -> None:
        self.ends = [get_gradient_edge(weight) if weight.requires_grad else None for weight in weights]
        self.gradients: list[torch.Tensor | None] = [None] * len(weights)
        self.made_of = frozenset(_buckets(self.ends))

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add the gradient from one use of a weight."""
        before = self.gradients[index]
        self.gradients[index] = gradient if before is None else before + gradient

    def send(self) -> None:
        """Pass the gradients on to the weights' producers."""
        pairs = [(end, one) for end, one in zip(self.ends, self.gradients, strict=True) if end and one is not None]
        if pairs:
            torch.autograd.backward([end for end, _ in pairs], [one for _, one in pairs])
        self.gradients = []


class DeferredProducts:
    """The pending weight gradients, and the buckets that wait for them, by micro-batch."""

    def __init__(self) -> None:
        self._pending: dict[int, list[WeightGradient]] = {}
        self._buckets: dict[int, list[_CutBucket]] = {}
        self._now: list[WeightGradient] | None = None
        self._forward = 0

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Around the forward of a micro-batch."""
        self._forward = microbatch
        yield

    @contextmanager
    def collecting(self, microbatch: int) -> Iterator[None]:
        """Around the backward of a micro-batch whose weight gradients are left to `run`."""
        self._now = self._pending.setdefault(microbatch, [])
        try:
            yield
        finally:
            self._now = None

    def cut(self, weights: Tensors) -> list[torch.Tensor]:
        """Detach the weights of a bucket from their producers, which get the gradients when all are complete."""
        bucket, root = _CutBucket(weights), torch.zeros((), requires_grad=True)
        self._buckets.setdefault(self._forward, []).append(bucket)
        return [
            _Cut.apply(root, weight.detach(), bucket, index) if weight.requires_grad else weight  # type: ignore[no-untyped-call]
            for index, weight in enumerate(weights)
        ]

    def add(self, edge: GradientEdge, make: Callable[[], torch.Tensor]) -> None:
        """Defer a gradient; raises RuntimeError outside of `collecting`."""
        if self._now is None:
            raise RuntimeError("a backward of a stage that defers gradients of weights runs in its schedule alone")
        self._now.append((edge, make))

    def run(self, microbatch: int) -> None:
        """Compute the gradients of a micro-batch, in the order of its backward, and free their operands."""
        pending, buckets = self._pending.pop(microbatch, [])[::-1], self._buckets.pop(microbatch, [])
        last = {bucket: place for place, (edge, _) in reversed(list(enumerate(pending))) for bucket in _buckets([edge])}
        ready: dict[int, list[_CutBucket]] = {}
        for bucket in reversed(buckets):  # one that is made of another comes first
            ready.setdefault(last.get(bucket, len(pending)), []).append(bucket)
        for bucket in ready.get(len(pending), ()):
            bucket.send()
        while pending:
            edge, make = pending.pop()
            torch.autograd.backward([edge], [make()])
            for bucket in ready.get(len(pending), ()):
                bucket.send()

    def clear(self) -> None:
        """Drop pending gradients after a failed step."""
        self._pending.clear()
        self._buckets.clear()

    def __deepcopy__(self, memo: dict[int, object]) -> DeferredProducts:
        return DeferredProducts()


def _buckets(ends: Iterable[GradientEdge | None]) -> Iterator[_CutBucket]:
    """The buckets to which gradients come, through what makes weights of weights, and those of which these are made."""
    nodes = [end.node for end in ends if end]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if isinstance(found := getattr(node, "bucket", None), _CutBucket):
            yield from (found, *found.made_of)
            continue
        more = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= more
        nodes += more


class _CutContext(torch.autograd.function.FunctionCtx):
    bucket: _CutBucket
    index: int


class _Cut(torch.autograd.Function):
    """A weight, whose gradient is left with its bucket."""

    @staticmethod
    def forward(ctx: _CutContext, root: torch.Tensor, weight: torch.Tensor, bucket: _CutBucket, index: int) -> torch.Tensor:
        ctx.bucket, ctx.index = bucket, index
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: _CutContext, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.bucket.add(ctx.index, gradient)
        return None, None, None, None


def cut_weights(deferred: DeferredProducts, weights: Tensors) -> list[torch.Tensor]:
    """The weights of a bucket as products use them; see `DeferredProducts.cut`. The target of a node of emitted code."""
    return deferred.cut(weights) if torch.is_grad_enabled() else list(weights)


def deferred_linear(
    deferred: DeferredProducts, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear(x, w, bias)`. The target of a `call_function` node of emitted code."""
    return _product(deferred, x, w, bias, transposed=True)


def deferred_mm(deferred: DeferredProducts, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`mm(x, w)`. The target of a `call_function` node of emitted code."""
    return _product(deferred, x, w, None, transposed=False)


def deferred_addmm(deferred: DeferredProducts, bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`addmm(bias, x, w)`. The target of a `call_function` node of emitted code."""
    return _product(deferred, x, w, bias, transposed=False)


def _product(
    deferred: DeferredProducts, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *, transposed: bool
) -> torch.Tensor:
    """The product; where only one factor has a gradient, as torch has it."""
    if not (torch.is_grad_enabled() and x.requires_grad and w.requires_grad):
        return _run(x, w, bias, transposed)
    made: torch.Tensor = _Product.apply(deferred, get_gradient_edge(w), transposed, x, w.detach(), bias)  # type: ignore[no-untyped-call]
    return made


def _run(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    made: torch.Tensor
    if transposed:
        made = torch.ops.aten.linear.default(x, w, bias)
    else:
        made = torch.ops.aten.mm.default(x, w) if bias is None else torch.ops.aten.addmm.default(bias, x, w)
    return made


class _Context(torch.autograd.function.FunctionCtx):
    deferred: DeferredProducts
    edge: GradientEdge
    transposed: bool
    bias: torch.Size | None
    saved_tensors: tuple[torch.Tensor, torch.Tensor]
    needs_input_grad: tuple[bool, ...]


class _Product(torch.autograd.Function):
    """x w, or x w^T if `transposed`, and the bias; the weight is given without its graph, whose `edge` takes the gradient."""

    @staticmethod
    def forward(
        ctx: _Context,
        deferred: DeferredProducts,
        edge: GradientEdge,
        transposed: bool,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.deferred, ctx.edge, ctx.transposed = deferred, edge, transposed
        ctx.bias = None if bias is None else bias.shape
        ctx.save_for_backward(x, w)
        return _run(x, w, bias, transposed)

    @staticmethod
    def backward(ctx: _Context, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        ctx.deferred.add(ctx.edge, partial(_weight_gradient, x.detach(), dy, ctx.transposed))
        dx = dy.matmul(w if ctx.transposed else w.t())
        bias = dy.sum_to_size(ctx.bias) if ctx.bias is not None and ctx.needs_input_grad[5] else None
        return None, None, None, dx, None, bias


def _weight_gradient(x: torch.Tensor, dy: torch.Tensor, transposed: bool) -> torch.Tensor:
    rows, given = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return given.t().mm(rows) if transposed else rows.t().mm(given)


__all__ = ["DeferredProducts", "cut_weights", "deferred_addmm", "deferred_linear", "deferred_mm"]
