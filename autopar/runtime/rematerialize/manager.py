"""What is dropped after its use in the forward and made again for the backward: gathered weights, and results of ops.

Emitted code makes such values with `bucket.finish(anew, ...)`, `call(anew, op, ...)` or `convert(anew, ...)` inside
`with anew.active():`. When autograd saves a tensor that lies in their memory (linear saves a transposed view, say), only its
geometry is kept, and what made the memory runs once more when the backward asks for it. So does what autograd keeps inside an
op, masks and statistics. What autograd does with the gradient is not touched. What was given to `offload` comes back from the
host's memory instead.

    Run        what runs again: a `OpCall` with its operands, or the conversion of a bundle of weights (`BucketGather`); or a
    `OffloadFetch` Made       a piece of memory that a run makes
    Part       a tensor in such memory, as geometry
    Saved      a part that will be asked for: by autograd, or because another run reads it
    Use        the claim of a saved part on the memory

Memory that was made again is kept until each of its uses was served, so that a backward makes it once; a second backward
(`retain_graph`) makes it anew. A run holds what it reads as long as something may ask for what it makes: tensors as they are,
parts of what is made again as parts. When a bundle is made, the one before it in the forward, which the backward will ask for
next, is sent for. Memory is recognised by its storage, and a mark dies with the storage: a freed address is soon used again by
something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from autopar.runtime.collectives import FUNCTIONS
from autopar.runtime.parallel_ops import FORMS
from autopar.runtime.rematerialize.recompute import BucketGather, ConversionCall, OffloadFetch, OpCall, Tensors, memory, tensors
from autopar.runtime.rematerialize.storage import Geometry, RecomputedStorage, SavedEntry, StoragePart
from autopar.runtime.world import Axis

NAMED = {function.__name__: function for function in FUNCTIONS.values()}


def call(anew: Rematerializer, function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
    """`function(*args, **kwargs)`, whose results are dropped after their use and made again for the backward.

    The target of a `call_function` node, like `convert`. The function gives the same each time and changes nothing.
    """
    return anew.call(function, args, kwargs) if torch.is_grad_enabled() else function(*args, **kwargs)


def convert(anew: Rematerializer, conversion: str, x: torch.Tensor, axis: Axis, *place: int) -> object:
    """The same for a function of `runtime.collectives`, by its name."""
    return call(anew, NAMED[conversion], x, axis, *place)


def form(anew: Rematerializer, name: str, axis: Axis, *args: object, **kwargs: object) -> object:
    """The same for a function of `runtime.forms`; what it sends is sent once more."""
    return call(anew, FORMS[name], axis, *args, **kwargs)


def offload(anew: Rematerializer, x: torch.Tensor) -> torch.Tensor:
    """The tensor, which goes to the host's memory and is dropped after its use; the backward has it from there."""
    if torch.is_grad_enabled():
        anew.send(x)
    return x


@dataclass(slots=True, weakref_slot=True, eq=False)
class StoredTensor:
    """What autograd holds of a tensor that it saved."""

    what: torch.Tensor | SavedEntry


class Rematerializer:
    """What can be made again of a parallel model's forward while it runs, by the storage in which it lies."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._marks: MutableMapping[torch.UntypedStorage, RecomputedStorage] = WeakIdKeyDictionary()
        self._kept: MutableMapping[torch.UntypedStorage, list[ref[StoredTensor]]] = WeakIdKeyDictionary()
        self._order: list[ref[BucketGather]] = []
        self._calling: OpCall | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around a forward: of what is made again, autograd saves the geometry only."""
        self._begin()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._begin()  # an output that the user keeps holds nothing

    def call(self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """See the function `call`."""
        self._calling = run = OpCall(function, args, kwargs, self._part)
        try:
            results = function(*args, **kwargs)
        finally:
            self._calling = None
        for tensor in tensors(results):
            self._mark(run, run.place(), tensor)
        return results

    def convert(self, values: Tensors, conversion: ConversionCall, sources: Tensors) -> None:
        """Have the values that were converted from `sources` made again, if something is saved at all.

        Not those that lie in the memory of their source.
        """
        if not torch.is_grad_enabled():
            return
        run = BucketGather(conversion, [self._part(source) or source.detach() for source in sources], self._order)
        for place, (value, source) in enumerate(zip(values, sources, strict=True)):
            if value.untyped_storage() is not source.untyped_storage() and _fills_its_storage(value):
                self._marks[value.untyped_storage()] = run.add(place, value)

    def send(self, x: torch.Tensor) -> None:
        """See the function `offload`."""
        storage = x.untyped_storage()
        if storage not in self._marks:
            self._marks[storage] = made = OffloadFetch(storage).made
            for kept in (link() for link in self._kept.pop(storage, [])):  # what made it may have saved it
                if kept is not None and isinstance(kept.what, torch.Tensor):
                    kept.what = StoragePart(of=made, geometry=Geometry.of(kept.what)).saved()

    def _mark(self, run: OpCall, place: int, tensor: torch.Tensor) -> None:
        """Have a result of a call, or what autograd saves in it, made again, if it does not lie in an operand."""
        if memory(tensor) not in run.reads and tensor.untyped_storage() not in self._marks:
            self._marks[tensor.untyped_storage()] = run.add(place, tensor)

    def _part(self, tensor: torch.Tensor) -> StoragePart | None:
        """A tensor as a part of what can be made again, if it is one."""
        found = self._marks.get(tensor.untyped_storage())
        return StoragePart(of=found, geometry=Geometry.of(tensor)) if found is not None else None

    def _pack(self, tensor: torch.Tensor) -> StoredTensor:
        if self._calling is not None:
            self._mark(self._calling, self._calling.place(), tensor)
        part = self._part(tensor)
        if part:
            return StoredTensor(part.saved())
        kept = StoredTensor(tensor)
        self._kept.setdefault(tensor.untyped_storage(), []).append(ref(kept))
        return kept

    def _unpack(self, kept: StoredTensor) -> torch.Tensor:
        if isinstance(kept.what, torch.Tensor):
            return kept.what
        tensor = kept.what.tensor()
        kept.what.part.of.run.ahead()
        return tensor

    def __deepcopy__(self, memo: dict[int, object]) -> Rematerializer:
        return Rematerializer()


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()
