"""What the backward can repeat: calls of operators, gathers of weight buckets, and copies from host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol
from weakref import ref

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from autopar.runtime.offload import OffloadedTensor
from autopar.runtime.rematerialize.storage import Recomputation, RecomputedStorage, SavedEntry, StoragePart

Tensors = Sequence[torch.Tensor]


class OpCall(Recomputation):
    """A call of a function, with its operands.

    Outputs are numbered in the order in which autograd saves tensors inside the call, followed by the results. Operands that
    are themselves recomputed are held as parts, without a claim until an output has one.
    """

    def __init__(
        self, function: Callable[..., object], args: object, kwargs: object, part: Callable[[torch.Tensor], StoragePart | None]
    ) -> None:
        super().__init__()
        self._function = function
        leaves, self._spec = tree_flatten((args, kwargs))
        tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        self.reads = {storage_id(tensor) for tensor in tensors.values()}
        self._requires_grad = {i for i, tensor in tensors.items() if tensor.requires_grad}
        self._parts = {i: found for i, tensor in tensors.items() if (found := part(tensor))}
        operands = {i: tensor.detach() for i, tensor in tensors.items() if i not in self._parts}
        self._leaves = [operands.get(i) if i in tensors else leaf for i, leaf in enumerate(leaves)]
        self._claims: dict[int, SavedEntry] = {}
        self._claimed_outputs = 0
        self._count = 0

    def next_index(self) -> int:
        """The index of the next tensor that autograd saves inside the call, or of the next result."""
        self._count += 1
        return self._count - 1

    def retain_inputs(self, output: RecomputedStorage) -> None:
        """Claim the recomputed operands with the first output that is claimed."""
        self._claimed_outputs += 1
        if self._claimed_outputs == 1:
            self._claims = {i: part.claim() for i, part in self._parts.items()}

    def release_inputs(self, output: RecomputedStorage) -> None:
        """Release the claims on recomputed operands with the last claimed output."""
        self._claimed_outputs -= 1
        if not self._claimed_outputs:
            self._claims = {}

    def missing_inputs(self, output: RecomputedStorage) -> list[RecomputedStorage]:
        """The recomputed operands that are not filled."""
        return [entry.part.of for entry in self._claims.values() if entry.part.of.needed]

    def run(self, output: RecomputedStorage) -> None:
        """Repeat the call, and fill every needed output from the tensors that autograd saves and from the results."""
        leaves = [self._operand(i, self._claims[i].tensor() if i in self._claims else x) for i, x in enumerate(self._leaves)]
        args, kwargs = tree_unflatten(leaves, self._spec)
        saved: list[torch.Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(saved.append, _never_unpacked)
        with torch.enable_grad(), hooks, _autocast_disabled(leaves):
            results = self._function(*args, **kwargs)
        values = [*saved, *tensors(results)]
        saved.clear()  # the graph of the results refers to this list
        if len(values) != self._count:
            raise RuntimeError(
                f"{self._function} saved and returned {len(values)} tensors when recomputed, {self._count} in the forward"
            )
        for index, other in list(self.outputs.items()):
            if other.needed:
                other.fill(values[index])
        for entry in self._claims.values():
            entry.part.of.source.prefetch()

    def _operand(self, index: int, leaf: object) -> object:
        """An operand as in the forward, detached from the forward's graph."""
        return leaf.detach().requires_grad_(index in self._requires_grad) if isinstance(leaf, torch.Tensor) else leaf


class OffloadFetch(Recomputation):
    """The copy of a storage back from host memory; `fetched` is the storage that it fills."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__()
        data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._host_copy = OffloadedTensor(data)
        self.fetched = self.add(0, data)

    def retain_inputs(self, output: RecomputedStorage) -> None:
        """Hold nothing more: the constructor started the copy to host memory."""

    def release_inputs(self, output: RecomputedStorage) -> None:
        """Keep the host memory: it is freed with this object."""

    def missing_inputs(self, output: RecomputedStorage) -> list[RecomputedStorage]:
        """Always empty: host memory has the bytes."""
        return []

    def run(self, output: RecomputedStorage) -> None:
        """Copy the bytes to the device."""
        output.fill(self._host_copy.fetch())


class ConversionCall(Protocol):
    """The conversion of some weights of a bucket, in two steps so that it overlaps with computation."""

    def start(self, weights: Tensors) -> Tensors:
        """Issue the collective, if there is one; returns its output buffers."""

    def wait(self, indices: Sequence[int], weights: Tensors, buffers: Tensors) -> Tensors:
        """The converted weights; `indices` are their positions in the bucket."""


class BucketGather(Recomputation):
    """The conversion of a bucket of weights; `order` lists all buckets of this forward, for prefetching in reverse order."""

    def __init__(
        self, conversion: ConversionCall, sources: Sequence[torch.Tensor | StoragePart], order: list[ref[BucketGather]]
    ) -> None:
        super().__init__()
        self._conversion, self._sources = conversion, sources
        self._claims: dict[int, SavedEntry] = {}
        self._indices: list[int] = []  # the weights that are being converted
        self._weights: Tensors = ()
        self._buffers: Tensors | None = None
        self._order, self._number = order, len(order)
        order.append(ref(self))

    def retain_inputs(self, output: RecomputedStorage) -> None:
        """Claim the weight from which this output is converted, if that weight is recomputed."""
        source = self._sources[output.index]
        if isinstance(source, StoragePart):
            self._claims[output.index] = source.claim(chained=True)

    def release_inputs(self, output: RecomputedStorage) -> None:
        """Release the claim on the weight from which this output is converted."""
        self._claims.pop(output.index, None)

    def missing_inputs(self, output: RecomputedStorage) -> list[RecomputedStorage]:
        """The weights that are not filled; none if the collective was issued already."""
        if self._buffers is not None:
            return []
        entries = [entry for index in self._needed() if (entry := self._claims.get(index))]
        return [entry.part.of for entry in entries if entry.part.of.needed]

    def run(self, output: RecomputedStorage) -> None:
        """Wait for the collective in progress; if it does not include this output, issue another and wait for that one."""
        while output.needed:
            self._start()
            assert self._buffers is not None
            with torch.no_grad():
                values = self._conversion.wait(self._indices, self._weights, self._buffers)
            for index, value in zip(self._indices, values, strict=True):
                if index in self.outputs:
                    self.outputs[index].fill(value)
            self._weights, self._buffers = (), None

    def prefetch(self) -> None:
        """Start the nearest earlier bucket of the forward that a saved tensor needs: the backward will read it next."""
        for other in (link() for link in reversed(self._order[: self._number])):
            if other is not None and any(output.needed_by_saved_tensor for output in list(other.outputs.values())):
                other._start()
                return

    def _start(self) -> None:
        """Start the conversion of every needed weight, unless one is in progress."""
        if self._buffers is None:
            self._indices = self._needed()
            self._weights = [self._source(index) for index in self._indices]
            with torch.no_grad():
                self._buffers = self._conversion.start(self._weights)

    def _needed(self) -> list[int]:
        return [index for index, output in list(self.outputs.items()) if output.needed]

    def _source(self, index: int) -> torch.Tensor:
        source = self._sources[index]
        return source if isinstance(source, torch.Tensor) else self._claims[index].tensor()


def storage_id(tensor: torch.Tensor) -> int:
    """A number that identifies the tensor's storage while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def tensors(results: object) -> list[torch.Tensor]:
    """Every tensor among a function's results, in order."""
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def _autocast_disabled(leaves: Sequence[object]) -> AbstractContextManager[object]:
    """A context without autocast: the user's backward may run under it, an emitted forward never does."""
    kind = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _never_unpacked(packed: object) -> torch.Tensor:
    raise AssertionError("a recomputed op has no backward of its own")
