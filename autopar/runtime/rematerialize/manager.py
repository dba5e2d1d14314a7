"""Rematerialization: activations and gathered weights are dropped after the forward and restored in the backward.

Emitted code marks such values inside `with rematerializer.active():`

    y = recompute_op(rematerializer, torch.ops.aten.mul.Tensor, a, b)                       y is recomputed from a and b
    d = recompute_seeded(rematerializer, dropout, rng_state, 3, [dp], y, 0.1, training)     d is recomputed with the same mask
    w = all_gather__reduce_scatter_wait(bucket, dp, ..., rematerializer=rematerializer)     w is gathered again
    z = offload(rematerializer, z)                                                          z is copied to host memory and back

Like activation checkpointing, this works through saved tensor hooks. Autograd saves tensors, often views of a marked value
(`linear` saves a transposed weight, say). The pack hook looks at the tensor's storage: if it is marked, autograd keeps only
sizes and strides, so the storage is freed after its last use in the forward. The unpack hook fills the storage again by
repeating the computation that made it. Tensors that autograd saves inside a `recompute_op` (a dropout mask, statistics of a
norm) are marked too. The hooks change neither gradients nor their order.

Operands of a recomputed op are held until nothing can request its results any more; of operands that are recomputed themselves
only the recipe is held. When a gathered bucket is read in the backward, the bucket before it in the forward, which the backward
reads next, is prefetched.

Storages are identified by the storage object, not by its address, because addresses of freed storages are soon reused.

A compiled module has no hooks: torch's partitioner recomputes marked values (`policy`), including gathers of buckets.

`storage` has the storages and the counts of claims on them, `recompute` the computations that fill them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from autopar.runtime.collectives import FUNCTIONS
from autopar.runtime.drawing import drawn
from autopar.runtime.parallel_ops import OPS
from autopar.runtime.random import RngState, seeded
from autopar.runtime.rematerialize.policy import kept
from autopar.runtime.rematerialize.recompute import (
    BucketGather,
    ConversionCall,
    OffloadFetch,
    OpCall,
    Tensors,
    storage_id,
    tensors,
)
from autopar.runtime.rematerialize.storage import Geometry, RecomputedStorage, SavedEntry, StoragePart
from autopar.runtime.world import Axis

CONVERSIONS = {function.__name__: function for function in FUNCTIONS.values()}


def recompute_op(rematerializer: Rematerializer, function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
    """`function(*args, **kwargs)`, whose results and saved tensors are dropped and recomputed in the backward.

    The function must be deterministic and free of side effects. The target of a `call_function` node of emitted code.
    """
    if torch.compiler.is_compiling():
        with kept(False):
            return function(*args, **kwargs)
    return rematerializer.call(function, args, kwargs) if torch.is_grad_enabled() else function(*args, **kwargs)


def recompute_seeded(
    rematerializer: Rematerializer, operator: Callable[..., torch.Tensor], state: RngState, index: int, axes: Sequence[Axis], /,
    *args: object, **kwargs: object,
) -> object:  # fmt: skip
    """`random.seeded(operator, ...)`, recomputed in the backward from the seed of this forward: it draws the same numbers.

    The seed is computed here, so that calls of the model between this forward and its backward do not change it. The target
    of a `call_function` node.
    """
    if torch.compiler.is_compiling():
        return recompute_op(rematerializer, seeded, operator, state, index, axes, *args, **kwargs)
    return recompute_op(rematerializer, drawn, operator, state.seed_of(index, axes), *args, **kwargs)


def recompute_conversion(rematerializer: Rematerializer, name: str, x: torch.Tensor, axis: Axis, *position: int) -> object:
    """The conversion of this name in `autopar.runtime.collectives`, whose result is dropped and recomputed in the backward.

    The name stands for the function because fx prints no plain functions as arguments. The target of a `call_function` node.
    """
    return recompute_op(rematerializer, CONVERSIONS[name], x, axis, *position)


def recompute_parallel_op(rematerializer: Rematerializer, name: str, axis: Axis, *args: object, **kwargs: object) -> object:
    """The parallel operator of this name in `autopar.runtime.parallel_ops`, recomputed in the backward.

    Its communication is repeated too. The target of a `call_function` node.
    """
    return recompute_op(rematerializer, OPS[name], axis, *args, **kwargs)


def offload(rematerializer: Rematerializer, x: torch.Tensor) -> torch.Tensor:
    """The tensor itself; its storage is copied to host memory, dropped after its last use, and copied back in the backward.

    The target of a `call_function` node of emitted code.
    """
    if torch.is_grad_enabled():
        rematerializer.offload(x)
    return x


@dataclass(slots=True, weakref_slot=True, eq=False)
class PackedTensor:
    """What autograd holds in place of a saved tensor: the tensor itself, or how to fill its storage again."""

    value: torch.Tensor | SavedEntry


class Rematerializer:
    """Decides during a forward which saved tensors are kept and which are recomputed, by the storage that they view."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._storages: MutableMapping[torch.UntypedStorage, RecomputedStorage] = WeakIdKeyDictionary()
        self._packed: MutableMapping[torch.UntypedStorage, list[ref[PackedTensor]]] = WeakIdKeyDictionary()
        self._buckets: list[ref[BucketGather]] = []
        self._running: OpCall | None = None

    @property
    def tracked(self) -> int:
        """How many live storages of the running forward would be recomputed."""
        return len(self._storages)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Enter around a forward: tensors that autograd saves go through the hooks."""
        self._reset()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._reset()  # otherwise an output that the user keeps would keep its recipe alive

    def call(self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Call a function whose results and saved tensors are recomputed in the backward; see `recompute_op`."""
        self._running = op = OpCall(function, args, kwargs, self._part)
        try:
            results = function(*args, **kwargs)
        finally:
            self._running = None
        for tensor in tensors(results):
            self._mark(op, op.next_index(), tensor)
        return results

    def convert(self, values: Tensors, conversion: ConversionCall, sources: Tensors) -> None:
        """Mark weights of a bucket, converted from `sources`, as gathered again in the backward.

        Values that view their source, or only part of a storage, are not marked. Without gradients, none are.
        """
        if not torch.is_grad_enabled():
            return
        bucket = BucketGather(conversion, [self._part(source) or source.detach() for source in sources], self._buckets)
        for index, (value, source) in enumerate(zip(values, sources, strict=True)):
            if value.untyped_storage() is not source.untyped_storage() and _fills_its_storage(value):
                self._storages[value.untyped_storage()] = bucket.add(index, value)

    def offload(self, x: torch.Tensor) -> None:
        """Mark the storage of a tensor as copied to host memory and back; see the function `offload`."""
        storage = x.untyped_storage()
        if storage not in self._storages:
            self._storages[storage] = fetched = OffloadFetch(storage).fetched
            for packed in (link() for link in self._packed.pop(storage, [])):  # the op that returned x saved it earlier
                if packed is not None and isinstance(packed.value, torch.Tensor):
                    packed.value = StoragePart(of=fetched, geometry=Geometry.of(packed.value)).claim()

    def _mark(self, op: OpCall, index: int, tensor: torch.Tensor) -> None:
        """Mark an output of an op for recomputation, unless it views an operand or is marked already."""
        if storage_id(tensor) not in op.reads and tensor.untyped_storage() not in self._storages:
            self._storages[tensor.untyped_storage()] = op.add(index, tensor)

    def _part(self, tensor: torch.Tensor) -> StoragePart | None:
        """A tensor as a part of a recomputed storage; None if its storage is kept."""
        found = self._storages.get(tensor.untyped_storage())
        return StoragePart(of=found, geometry=Geometry.of(tensor)) if found is not None else None

    def _pack(self, tensor: torch.Tensor) -> PackedTensor:
        if self._running is not None:
            self._mark(self._running, self._running.next_index(), tensor)
        part = self._part(tensor)
        if part:
            return PackedTensor(part.claim())
        # detached: the graph of an operator's own result would hold this packed tensor
        packed = PackedTensor(tensor.detach() if tensor.grad_fn is not None else tensor)
        self._packed.setdefault(tensor.untyped_storage(), []).append(ref(packed))
        return packed

    def _unpack(self, packed: PackedTensor) -> torch.Tensor:
        if isinstance(packed.value, torch.Tensor):
            return packed.value
        tensor = packed.value.tensor()
        packed.value.part.of.source.prefetch()
        return tensor

    def __deepcopy__(self, memo: dict[int, object]) -> Rematerializer:
        return Rematerializer()


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()
