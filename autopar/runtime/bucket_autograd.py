"""One collective for a bucket of weights, as two autograd functions: `start_bucket` issues it, `wait_bucket` waits for it.

The backward runs in reverse: that of `wait_bucket` issues one collective for the gradients of the bucket as soon as it has all
of them, that of `start_bucket` waits for it. Buffers in flight are not read: the backward of `wait_bucket` returns views of the
buffer that the collective writes to.

Only all-gathers of weights, and all-reduces or reduce-scatters of gradients, run as one collective. Other primitives run one
weight after the other, in `wait_bucket`.

If gradients are differentiated again (`create_graph=True`), they are converted one by one, in blocking calls.

When compiled, `wait_bucket` does both: `torch.compile` cannot trace writing one buffer while others are read, and Inductor
moves collectives and waits itself.

Gradients of a low-precision copy of a weight may be reduced in a wider dtype (`reduce_dtype`). Autograd demands that a tensor's
gradient has its dtype, so between the two functions a tensor of the wider dtype without memory stands for such a weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from autopar.ir.conversion import COPIES
from autopar.runtime.async_collectives import all_gather_start, all_reduce_start, reduce_scatter_start, wait
from autopar.runtime.collectives import PRIMITIVES, SplitPosition, concat_blocks, convert_back, unflatten
from autopar.runtime.disk import File, file_of, write
from autopar.runtime.host_memory import start_copies, start_stow, wait_copies, wait_stow
from autopar.runtime.rematerialize.manager import Rematerializer
from autopar.runtime.rematerialize.policy import kept
from autopar.runtime.rematerialize.recompute import Tensors
from autopar.runtime.world import Axis

Splits = Sequence[Sequence[int]]  # a `SplitPosition` per weight, trailing defaults left out


class PendingBucket(NamedTuple):
    """A bucket between start and wait."""

    proxies: Tensors  # the weights as autograd sees them, perhaps in the dtype in which gradients are reduced
    weights: Tensors
    buffers: Tensors  # what the collective writes to, if one was issued
    reduce_dtype: torch.dtype | None = None  # of gradients, where `wait_bucket` does it all


def start_bucket(conversion: str, weights: Tensors, axis: Axis, reduce_dtype: torch.dtype | None = None) -> PendingBucket:
    """Issue the conversion of some weights; gradients are reduced in `reduce_dtype`, by default in their own."""
    forward, _ = conversion.split("__")
    if axis.size == 1 and forward not in COPIES:
        return PendingBucket(weights, weights, ())
    if torch.compiler.is_compiling():
        return PendingBucket(weights, weights, (), reduce_dtype)
    found = _Start.apply(forward, axis, reduce_dtype, *weights)  # type: ignore[no-untyped-call]
    return PendingBucket(found[: len(weights)], [weight.detach() for weight in weights], found[len(weights) :])


def wait_bucket(
    conversion: str,
    bucket: PendingBucket,
    axis: Axis,
    splits: Splits | None = None,
    rematerializer: Rematerializer | None = None,
) -> list[torch.Tensor]:
    """The converted weights of a started bucket; `splits[i]` says where weight i is split, for conversions that move a split.

    With a `rematerializer` they are dropped after use and gathered again in the backward.
    """
    forward, backward = conversion.split("__")
    if axis.size == 1 and forward not in COPIES:
        return list(bucket.weights)
    positions = [SplitPosition(*split) for split in splits] if splits else [SplitPosition()] * len(bucket.weights)
    if torch.compiler.is_compiling():
        with kept(rematerializer is None):
            if not any(weight.requires_grad for weight in bucket.weights):  # Dynamo traces no function without gradients
                gathered = _issue(forward, bucket.weights, axis)
                return list(_values(forward, bucket.weights, gathered, axis, positions))
            return list(_Traced.apply(forward, backward, axis, positions, bucket.reduce_dtype, *bucket.weights))  # type: ignore[no-untyped-call]
    tensors = (*bucket.proxies, *bucket.weights, *bucket.buffers)
    values = list(_Wait.apply(forward, backward, axis, positions, *tensors))  # type: ignore[no-untyped-call]
    if rematerializer is not None:
        rematerializer.convert(values, _GatherAgain(forward, axis, positions), bucket.weights)
    return values


class _GatherAgain:
    """The forward's conversion of the bucket, for the backward."""

    def __init__(self, forward: str, axis: Axis, positions: Sequence[SplitPosition]) -> None:
        self.forward, self.axis, self.positions = forward, axis, positions

    def start(self, weights: Tensors) -> Tensors:
        """Issue the collective for these weights of the bucket."""
        return _issue(self.forward, weights, self.axis)

    def wait(self, indices: Sequence[int], weights: Tensors, buffers: Tensors) -> list[torch.Tensor]:
        """The converted weights; `indices` are their positions in the bucket."""
        return list(_values(self.forward, weights, buffers, self.axis, [self.positions[index] for index in indices]))


class _Context(Protocol):
    primitives: tuple[str, str]  # of the waiting function
    forward: str  # of the starting function
    axis: Axis
    positions: Sequence[SplitPosition]
    dtype: torch.dtype  # of the gradients that the backward returns
    reduce_dtype: torch.dtype  # of those that it sends, in `_Traced`
    count: int  # of the forward's tensor arguments
    file: File | None  # of a weight that is read from the disk: its gradient goes to the same folder

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, forward: str, axis: Axis, reduce_dtype: torch.dtype | None, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        buffers = _issue(forward, weights, axis)
        ctx.forward, ctx.axis, ctx.dtype, ctx.count = forward, axis, weights[0].dtype, len(weights)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*buffers)
        proxies = weights if reduce_dtype is None else [_proxy(weight, reduce_dtype) for weight in weights]
        return (*proxies, *buffers)

    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        of_weights = gradients[: ctx.count]
        present = [gradient for gradient in of_weights if gradient is not None]
        if ctx.forward in COPIES:
            wait_stow()
        elif not torch.is_grad_enabled():  # else nothing is in flight
            for buffer in {gradient.untyped_storage().data_ptr(): gradient for gradient in present}.values():
                wait(buffer, "the reduction of gradients", ctx.axis)
        return None, None, None, *(gradient if gradient is None else gradient.to(ctx.dtype) for gradient in of_weights)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, forward: str, backward: str, axis: Axis, positions: Sequence[SplitPosition], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        count = len(positions)
        proxies, weights, buffers = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        ctx.primitives, ctx.axis, ctx.positions, ctx.count = (forward, backward), axis, positions, len(tensors)
        ctx.dtype, ctx.file = proxies[0].dtype, file_of(*weights) if forward == "read" else None
        ctx.set_materialize_grads(False)
        return tuple(_values(forward, weights, buffers, axis, positions))

    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        present = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
        results: list[torch.Tensor | None] = [None] * ctx.count
        if not present:  # the operators that read these weights do not lead to the loss: nothing is sent
            return None, None, None, None, *results
        positions = [ctx.positions[index] for index in present]
        reduce = _differentiable_gradients if torch.is_grad_enabled() else _reduced_gradients
        if ctx.file is not None:
            reduced = write([*present.values()], ctx.file, ctx.dtype)
        else:
            reduced = reduce(ctx.primitives, [*present.values()], ctx.dtype, ctx.axis, positions)
        for index, gradient in zip(present, reduced, strict=True):
            results[index] = gradient
        return None, None, None, None, *results


class _Traced(torch.autograd.Function):
    """`_Start` and `_Wait` in one, as a function of tensors alone, which `torch.compile` traces."""

    @staticmethod
    def forward(
        ctx: _Context,
        forward: str,
        backward: str,
        axis: Axis,
        positions: Sequence[SplitPosition],
        reduce_dtype: torch.dtype | None,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.primitives, ctx.axis, ctx.positions, ctx.dtype = (forward, backward), axis, positions, weights[0].dtype
        ctx.reduce_dtype = reduce_dtype or ctx.dtype
        values = _values(forward, weights, _issue(forward, weights, axis), axis, positions)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        reduced = _reduced_gradients(ctx.primitives, gradients, ctx.reduce_dtype, ctx.axis, ctx.positions)
        return None, None, None, None, None, *(gradient.to(ctx.dtype) for gradient in reduced)


def _proxy(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the weight's shape over one element of another dtype; its value is never read."""
    return weight.new_empty_strided(weight.shape, (0,) * weight.dim(), dtype=dtype)


# --- collectives ---------------------------------------------------------------------------------------------------------


def _issue(primitive: str, weights: Tensors, axis: Axis) -> tuple[torch.Tensor, ...]:
    """The output buffer of one all-gather of all weights, flattened, or one for each that comes from the host or the disk;
    nothing for other primitives, which run in `_values`."""
    if primitive in COPIES:
        return start_copies(primitive, weights)
    if primitive != "all_gather":
        return ()
    flat = [weight.reshape(-1) for weight in weights]
    return (all_gather_start(torch.cat(flat) if len(flat) > 1 else flat[0], axis),)


def _values(
    primitive: str, weights: Tensors, buffers: Tensors, axis: Axis, positions: Sequence[SplitPosition]
) -> Iterator[torch.Tensor]:
    """The converted weights, waiting for the all-gather or the copies if they were issued."""
    if primitive in COPIES:
        wait_copies(primitive, buffers)
        yield from buffers
        return
    if primitive != "all_gather":
        yield from (PRIMITIVES[primitive](weight, axis, position) for weight, position in zip(weights, positions, strict=True))
        return
    rows = wait(buffers[0], "all_gather", axis).view(axis.size, -1)
    sizes = [weight.numel() for weight in weights]
    parts = [rows]
    if len(sizes) > 1:  # one kernel for all of them; its stub is that of the form with `out`
        parts = torch.split_with_sizes_copy(rows, sizes, dim=1)  # type: ignore[func-returns-value, assignment]
    for weight, position, part in zip(weights, positions, parts, strict=True):
        yield concat_blocks(part.view(axis.size, *weight.shape), position.dim, position.blocks)


def _differentiable_gradients(
    primitives: tuple[str, str], gradients: Tensors, dtype: torch.dtype, axis: Axis, positions: Sequence[SplitPosition]
) -> Iterator[torch.Tensor]:
    """The gradients of the unconverted weights, in this dtype, which can be differentiated."""
    if primitives[1] in COPIES:
        yield from (gradient.to("cpu", dtype) for gradient in gradients)
        return
    for gradient, position in zip(gradients, positions, strict=True):
        yield convert_back(gradient.to(dtype), axis, position, *primitives)


def _reduced_gradients(
    primitives: tuple[str, str], gradients: Tensors, dtype: torch.dtype, axis: Axis, positions: Sequence[SplitPosition]
) -> Iterator[torch.Tensor]:
    """The gradients of the unconverted weights, in this dtype; if a collective was issued, valid after `wait` (not traced)."""
    primitive = primitives[1]
    if primitive in COPIES:
        yield from start_stow(gradients, dtype)
    elif primitive == "all_reduce":
        flat = _sent(all_reduce_start(torch.cat([gradient.reshape(-1) for gradient in gradients]).to(dtype), axis), axis)
        for gradient, part in zip(gradients, _columns(flat, [gradient.numel() for gradient in gradients]), strict=True):
            yield part.view(gradient.shape)
    elif primitive == "reduce_scatter":
        chunks = [
            unflatten(gradient, position.dim, position.blocks, axis.size, -1).movedim(position.dim + 1, 0)
            for gradient, position in zip(gradients, positions, strict=True)
        ]
        sizes = [chunk[0].numel() for chunk in chunks]
        if gradients[0].dtype == dtype:  # one kernel for all of them
            rows = torch.cat([chunk.reshape(axis.size, -1) for chunk in chunks], 1)
        else:
            rows = gradients[0].new_empty(axis.size, sum(sizes), dtype=dtype)
            for chunk, part in zip(chunks, _columns(rows, sizes), strict=True):
                torch.unflatten(part, 1, chunk.shape[1:]).copy_(chunk)
        flat = _sent(reduce_scatter_start(rows, axis), axis)
        for chunk, position, part in zip(chunks, positions, _columns(flat, sizes), strict=True):
            yield part.view(chunk.shape[1:]).flatten(position.dim, position.dim + 1)
    else:
        for gradient, position in zip(gradients, positions, strict=True):
            back = position.reversed() if primitive == "all_to_all" else position
            yield PRIMITIVES[primitive](gradient.to(dtype), axis, back)


def _sent(buffer: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The buffer that a collective writes to: still in flight, except in a trace, where it is a function of its operands."""
    return wait(buffer, "the reduction of gradients", axis) if torch.compiler.is_compiling() else buffer


def _columns(rows: torch.Tensor, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    """The last dim cut into parts of these sizes."""
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        yield rows[..., end - size : end]
