"""The calls that start a bucket of weights and wait for it (`runtime.bucketed_collectives`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.analysis.weights import reduce_dtypes
from autopar.ir.conversion import SUMS
from autopar.ir.program import Program
from autopar.runtime.bucketed_collectives import PAIRS
from autopar.runtime.collectives import split_position
from autopar.runtime.gradient_accumulation import start_once, wait_once
from autopar.search_space.buckets import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A function with its arguments, as `fx.Graph.call_function` takes them."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCalls:
    """Builds the calls for the buckets of one program.

    A `number` is given for buckets that all micro-batches of a step share; the accumulator then holds the gathered weights.
    """

    program: Program
    sizes: tuple[int, ...]  # of the mesh
    accumulator: fx.Node | None

    def start(self, bucket: Bucket, sources: Sequence[fx.Node], axis: fx.Node, number: int | None = None) -> FunctionCall:
        """Issue the conversion of the bucket's weights."""
        conversion, dtype = "__".join(bucket.primitives), self.reduce_dtype(bucket)
        args = (list(sources), axis, *([dtype] if dtype else []))
        if number is None:
            return FunctionCall(function=PAIRS[conversion][0], args=args, kwargs={})
        return FunctionCall(function=start_once, args=(self.accumulator, number, conversion, *args), kwargs={})

    def wait(
        self, bucket: Bucket, pending: fx.Node, axis: fx.Node, rematerializer: fx.Node | None, number: int | None = None
    ) -> FunctionCall:
        """Wait for the converted weights; with a `rematerializer` they are gathered again in the backward."""
        conversion, splits = "__".join(bucket.primitives), self._splits(bucket)
        kwargs: dict[str, object] = {"splits": splits} if splits else {}
        if rematerializer is not None:
            kwargs["rematerializer"] = rematerializer
        if number is None:
            return FunctionCall(function=PAIRS[conversion][1], args=(pending, axis), kwargs=kwargs)
        return FunctionCall(function=wait_once, args=(self.accumulator, number, conversion, pending, axis), kwargs=kwargs)

    def reduce_dtype(self, bucket: Bucket) -> torch.dtype | None:
        """The dtype in which a bucket's gradients are reduced; None if it is their own, or if nothing is reduced."""
        return reduce_dtypes(self.program).get(bucket.steps[0][0]) if bucket.primitives[1] in SUMS else None

    def _splits(self, bucket: Bucket) -> list[tuple[int, ...]]:
        """A `SplitPosition` per weight without trailing defaults; empty for conversions that do not move a split."""
        kinds = bucket.steps[0][1].kinds
        if "S" not in kinds:
            return []
        shapes = [(step, self.program.values[name].shape) for name, step in bucket.steps]
        positions = [split_position(step, shape, self.sizes) for step, shape in shapes]
        if kinds == ("S", "S"):
            return [tuple(position) for position in positions]
        count = 2 if any(position.blocks > 1 for position in positions) else 1
        return [tuple(position)[:count] for position in positions]
