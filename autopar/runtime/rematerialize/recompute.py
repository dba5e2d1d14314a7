"""What of a forward can be done once more: calls, conversions of bundles of weights, fetches (`runtime.recompute`)."""

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
    """A function with its operands."""

    def __init__(
        self, function: Callable[..., object], args: object, kwargs: object, part: Callable[[torch.Tensor], StoragePart | None]
    ) -> None:
        super().__init__()
        self._function = function
        leaves, self._spec = tree_flatten((args, kwargs))
        tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        self.reads = {memory(tensor) for tensor in tensors.values()}
        self._differentiable = {i for i, tensor in tensors.items() if tensor.requires_grad}
        self._parts = {i: found for i, tensor in tensors.items() if (found := part(tensor))}
        kept = {i: tensor.detach() for i, tensor in tensors.items() if i not in self._parts}
        self._leaves = [kept.get(i) if i in tensors else leaf for i, leaf in enumerate(leaves)]
        self._claims: dict[int, SavedEntry] = {}
        self._claimed = 0
        self._count = 0

    def place(self) -> int:
        """The place of the next tensor that autograd saves inside, or of the next result."""
        self._count += 1
        return self._count - 1

    def claim(self, made: RecomputedStorage) -> None:
        """Hold what is made again among the operands."""
        self._claimed += 1
        if self._claimed == 1:
            self._claims = {i: part.saved() for i, part in self._parts.items()}

    def release(self, made: RecomputedStorage) -> None:
        """Let go of it with the last."""
        self._claimed -= 1
        if not self._claimed:
            self._claims = {}

    def lacking(self, made: RecomputedStorage) -> list[RecomputedStorage]:
        """The operands that are not there."""
        return [claim.part.of for claim in self._claims.values() if claim.part.of.wanted]

    def make(self, made: RecomputedStorage) -> None:
        """Run the function as in the forward, and see what autograd saves."""
        leaves = [self._operand(i, self._claims[i].tensor() if i in self._claims else x) for i, x in enumerate(self._leaves)]
        args, kwargs = tree_unflatten(leaves, self._spec)
        saved: list[torch.Tensor] = []
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, _never), _as_called(leaves):
            results = self._function(*args, **kwargs)
        found = [*saved, *tensors(results)]
        saved.clear()  # the results hold it
        if len(found) != self._count:
            raise RuntimeError(f"{self._function} has {len(found)} tensors in the backward, {self._count} in the forward")
        for place, other in list(self.makes.items()):
            if other.wanted:
                other.put(found[place])
        for claim in self._claims.values():
            claim.part.of.run.ahead()

    def _operand(self, place: int, leaf: object) -> object:
        """An operand as the forward had it, cut off from the graph."""
        return leaf.detach().requires_grad_(place in self._differentiable) if isinstance(leaf, torch.Tensor) else leaf


class OffloadFetch(Recomputation):
    """A piece of memory that the host holds."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__()
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._held = OffloadedTensor(flat)
        self.made = self.add(0, flat)

    def claim(self, made: RecomputedStorage) -> None:
        """The copy is on its way."""

    def release(self, made: RecomputedStorage) -> None:
        """It ends with this object."""

    def lacking(self, made: RecomputedStorage) -> list[RecomputedStorage]:
        """Nothing is."""
        return []

    def make(self, made: RecomputedStorage) -> None:
        """Fetch it."""
        made.put(self._held.fetch())


class ConversionCall(Protocol):
    """Converts tensors together."""

    def begin(self, weights: Tensors) -> Tensors:
        """Send for the converted tensors: what is on its way."""

    def finish(self, which: Sequence[int], weights: Tensors, flight: Tensors) -> Tensors:
        """The converted tensors; `which` are their places in the bundle."""


class BucketGather(Recomputation):
    """The conversion of a bundle; `order` are the bundles of this forward."""

    def __init__(
        self, conversion: ConversionCall, sources: Sequence[torch.Tensor | StoragePart], order: list[ref[BucketGather]]
    ) -> None:
        super().__init__()
        self._conversion, self._sources = conversion, sources
        self._claims: dict[int, SavedEntry] = {}
        self._which: list[int] = []
        self._weights: Tensors = ()
        self._flight: Tensors | None = None
        self._order, self._number = order, len(order)
        order.append(ref(self))

    def claim(self, made: RecomputedStorage) -> None:
        """Hold the source of this one."""
        source = self._sources[made.place]
        if isinstance(source, StoragePart):
            self._claims[made.place] = source.saved(chained=True)

    def release(self, made: RecomputedStorage) -> None:
        """Let go of it."""
        self._claims.pop(made.place, None)

    def lacking(self, made: RecomputedStorage) -> list[RecomputedStorage]:
        """The sources that are not there, unless they have been sent already."""
        if self._flight is not None:
            return []
        return [claim.part.of for place in self._wanted() if (claim := self._claims.get(place)) and claim.part.of.wanted]

    def make(self, made: RecomputedStorage) -> None:
        """Have what is on its way, and send for the rest if this one is not there then."""
        while made.wanted:
            self._send()
            assert self._flight is not None
            with torch.no_grad():
                values = self._conversion.finish(self._which, self._weights, self._flight)
            for place, value in zip(self._which, values, strict=True):
                if place in self.makes:
                    self.makes[place].put(value)
            self._weights, self._flight = (), None

    def ahead(self) -> None:
        """Send for the bundle that the backward will ask for after this one."""
        for other in (link() for link in reversed(self._order[: self._number])):
            if other is not None and any(made.awaited for made in list(other.makes.values())):
                other._send()
                return

    def _send(self) -> None:
        """Send for all that are wanted, unless they are on their way already."""
        if self._flight is None:
            self._which = self._wanted()
            self._weights = [self._source(place) for place in self._which]
            with torch.no_grad():
                self._flight = self._conversion.begin(self._weights)

    def _wanted(self) -> list[int]:
        return [place for place, made in list(self.makes.items()) if made.wanted]

    def _source(self, place: int) -> torch.Tensor:
        source = self._sources[place]
        return source if isinstance(source, torch.Tensor) else self._claims[place].tensor()


def memory(tensor: torch.Tensor) -> int:
    """What tells one storage from others."""
    return int(tensor.untyped_storage()._cdata)


def tensors(results: object) -> list[torch.Tensor]:
    """Every tensor among a function's results, in order."""
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def _as_called(leaves: Sequence[object]) -> AbstractContextManager[object]:
    """Without the autocast under which a backward may be called; no forward is."""
    kind = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _never(packed: object) -> torch.Tensor:
    raise AssertionError("what was made again has no backward")
