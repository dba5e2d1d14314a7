"""Conversions of several weights at once: one message for all, on its way while the device computes.

    begun = begin("all_gather__reduce_scatter", [w, v], dp)                               h.1's weights are sent for,
    ...                                                                                   h.0 computes,
    w, v = finish(anew, "all_gather__reduce_scatter", begun, dp, [[0], [1]])           h.1's weights are here

The backward goes the other way: `finish` sends the gradients of the bundle as soon as it has all, `begin` waits for them.
Autograd runs what is ready in the reverse order of the forward, so that between the two it computes the gradients of all that
was called between them. What is on its way is never looked at: `finish` returns the buffer in which the gradients will arrive.

Only an all-gather of weights, and an all-reduce or reduce-scatter of their gradients, is one message; other primitives run one
weight after the other, when `finish` is called.

The gradients of a copy in a narrow dtype may be added up in a wider one. Autograd gives a tensor gradients of its own dtype, so
what stands for such a weight between the two functions is a tensor of the wider dtype, without memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from autopar.runtime.collectives import (
    PRIMITIVES,
    StoragePlace,
    all_gathered,
    joined,
    reduce_scattered,
    reduced,
    unfolded,
    wait,
)
from autopar.runtime.rematerialize.manager import Rematerializer
from autopar.runtime.world import Axis

Tensors = Sequence[torch.Tensor]
Places = Sequence[Sequence[int]]


class PendingBucket(NamedTuple):
    """Weights that were sent for."""

    edges: Tensors  # what autograd sees of them
    weights: Tensors
    flight: Tensors  # the buffer in which they arrive, if anything is sent


def begin(conversion: str, weights: Tensors, axis: Axis, summed: torch.dtype | None = None) -> PendingBucket:
    """Send for the converted weights; `summed` is the dtype in which their gradients are added up, if not their own.

    The target of a `call_function` node, like `finish`.
    """
    if axis.size == 1:
        return PendingBucket(weights, weights, ())
    forward, _ = conversion.split("__")
    found = _Begin.apply(forward, axis, summed, *weights)  # type: ignore[no-untyped-call]
    return PendingBucket(found[: len(weights)], [weight.detach() for weight in weights], found[len(weights) :])


def finish(
    anew: Rematerializer | None, conversion: str, begun: PendingBucket, axis: Axis, places: Places | None = None
) -> list[torch.Tensor]:
    """The converted weights, from what `begin` returned; `places[i]` is the `StoragePlace` of weight i, if the state is split.

    With `anew` they are dropped after their use and made again for the backward (`autopar.runtime.rematerialize.manager`).
    """
    if axis.size == 1:
        return list(begun.weights)
    forward, backward = conversion.split("__")
    at = [StoragePlace(*place) for place in places] if places else [StoragePlace()] * len(begun.weights)
    parts = (*begun.edges, *begun.weights, *begun.flight)
    values = list(_Finish.apply(forward, backward, axis, at, *parts))  # type: ignore[no-untyped-call]
    if anew is not None:
        anew.convert(values, _Remade(forward, axis, at), begun.weights)
    return values


class _Remade:
    """The same conversion once more, for the backward."""

    def __init__(self, forward: str, axis: Axis, places: Sequence[StoragePlace]) -> None:
        self.forward, self.axis, self.places = forward, axis, places

    def begin(self, weights: Tensors) -> Tensors:
        """Send for them."""
        return sent(self.forward, weights, self.axis)

    def finish(self, which: Sequence[int], weights: Tensors, flight: Tensors) -> list[torch.Tensor]:
        """The converted weights."""
        return list(arrived(self.forward, weights, flight, self.axis, [self.places[place] for place in which]))


class _Sending(Protocol):
    backward: str
    axis: Axis
    places: Sequence[StoragePlace]
    dtype: torch.dtype  # of the gradients that go on from here
    given: int

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Sending, forward: str, axis: Axis, summed: torch.dtype | None, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        flight = sent(forward, weights, axis)
        ctx.dtype, ctx.given = weights[0].dtype, len(weights)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*flight)
        edges = weights if summed is None else [_edge(weight, summed) for weight in weights]
        return (*edges, *flight)

    @staticmethod
    def backward(ctx: _Sending, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = gradients[: ctx.given]
        here = [gradient for gradient in given if gradient is not None]
        for buffer in {gradient.untyped_storage().data_ptr(): gradient for gradient in here}.values():
            wait(buffer)
        return None, None, None, *(gradient if gradient is None else gradient.to(ctx.dtype) for gradient in given)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Sending, forward: str, backward: str, axis: Axis, places: Sequence[StoragePlace], *begun: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        count = len(places)
        edges, weights, flight = begun[:count], begun[count : 2 * count], begun[2 * count :]
        ctx.backward, ctx.axis, ctx.places, ctx.given = backward, axis, places, len(begun)
        ctx.dtype = edges[0].dtype
        ctx.set_materialize_grads(False)
        return tuple(arrived(forward, weights, flight, axis, places))

    @staticmethod
    def backward(ctx: _Sending, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        here = [place for place, gradient in enumerate(gradients) if gradient is not None]
        given = [gradient for gradient in gradients if gradient is not None]
        results: list[torch.Tensor | None] = [None] * ctx.given
        sums = returned(ctx.backward, given, ctx.dtype, ctx.axis, [ctx.places[place] for place in here])
        for place, gradient in zip(here, sums, strict=True):
            results[place] = gradient
        return None, None, None, None, *results


def _edge(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one element that looks like a weight in another dtype; nobody reads it."""
    return weight.new_empty_strided(weight.shape, (0,) * weight.dim(), dtype=dtype)


# --- messages ------------------------------------------------------------------------------------------------------------


def sent(primitive: str, weights: Tensors, axis: Axis) -> tuple[torch.Tensor, ...]:
    """The buffer in which the chunks of all ranks arrive if the primitive is an all-gather; nothing else is sent ahead."""
    if primitive != "all_gather":
        return ()
    flat = [weight.reshape(-1) for weight in weights]
    return (all_gathered(torch.cat(flat) if len(flat) > 1 else flat[0], axis),)


def arrived(
    primitive: str, weights: Tensors, flight: Tensors, axis: Axis, places: Sequence[StoragePlace]
) -> Iterator[torch.Tensor]:
    """The converted weights."""
    if primitive != "all_gather":
        yield from (PRIMITIVES[primitive](weight, axis, place) for weight, place in zip(weights, places, strict=True))
        return
    rows = wait(flight[0]).view(axis.size, -1)
    for weight, place, part in zip(weights, places, _columns(rows, [weight.numel() for weight in weights]), strict=True):
        yield joined(part.reshape(axis.size, *weight.shape), place.dim, place.blocks)


def returned(
    primitive: str, gradients: Tensors, dtype: torch.dtype, axis: Axis, places: Sequence[StoragePlace]
) -> Iterator[torch.Tensor]:
    """The gradients of what was converted, in this dtype, as they will be once `wait` returns."""
    if primitive == "all_reduce":
        flat = reduced(torch.cat([gradient.reshape(-1) for gradient in gradients]).to(dtype), axis)
        for gradient, part in zip(gradients, _columns(flat, [gradient.numel() for gradient in gradients]), strict=True):
            yield part.view(gradient.shape)
    elif primitive == "reduce_scatter":
        cuts = [
            unfolded(gradient, place.dim, place.blocks, axis.size, -1).movedim(place.dim + 1, 0)
            for gradient, place in zip(gradients, places, strict=True)
        ]
        sizes = [cut[0].numel() for cut in cuts]
        rows = gradients[0].new_empty(axis.size, sum(sizes), dtype=dtype)
        for cut, part in zip(cuts, _columns(rows, sizes), strict=True):
            torch.unflatten(part, 1, cut.shape[1:]).copy_(cut)
        flat = reduce_scattered(rows, axis)
        for cut, place, part in zip(cuts, places, _columns(flat, sizes), strict=True):
            yield part.view(cut.shape[1:]).flatten(place.dim, place.dim + 1)
    else:
        for gradient, place in zip(gradients, places, strict=True):
            yield PRIMITIVES[primitive](gradient.to(dtype), axis, place.back() if primitive == "all_to_all" else place)


def _columns(rows: torch.Tensor, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    """The last dim cut into parts of these sizes."""
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        yield rows[..., end - size : end]
