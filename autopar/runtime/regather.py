"""A gathered weight is dropped after its use and gathered again for the backward; so is a copy in another dtype, and cast.

Emitted code makes gathered values with `bundle.finish(gathers, ...)` inside `with gathers.active():`. When autograd saves a
tensor that lies in the memory of such a value (linear saves a transposed view, say), only its geometry is kept, and the
conversion runs again when the backward asks for it. What autograd does with the gradient is not touched.

    Again      how the values of a bundle are made: a conversion, and the tensors (or other gathered values) that it converts
    Gathered   one of these values
    Part       a tensor in the memory of a gathered value, as geometry
    Saved      a part that will be asked for: by autograd, or because another gathered value is made from it
    Use        the claim of a saved part on the gathered value

A value that was made again is kept until each of its uses was served, so that a backward makes it once; a second backward
(`retain_graph`) makes it anew. When a bundle is made, the one before it in the forward, which the backward will ask for next,
is sent for. Memory is recognised by its storage, and a mark dies with the storage: a freed address is soon used again by
something else.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

Tensors = Sequence[torch.Tensor]


class Conversion(Protocol):
    """Converts tensors together."""

    def begin(self, weights: Tensors) -> Tensors:
        """Send for the converted tensors: what is on its way."""

    def finish(self, which: Sequence[int], weights: Tensors, flight: Tensors) -> Tensors:
        """The converted tensors; `which` are their places in the bundle."""


class Again:
    """How the values of a bundle are made again; `before` is the bundle that the forward made before this one."""

    def __init__(self, conversion: Conversion, before: Again | None) -> None:
        self._conversion, self._before = conversion, before
        self._members: dict[int, Gathered] = {}  # by their places in the bundle
        self._which: list[int] = []
        self._weights: Tensors = ()
        self._flight: Tensors | None = None

    def add(self, place: int, first: torch.Tensor, source: torch.Tensor | Part) -> Gathered:
        """The value at a place of the bundle, made from `source`."""
        self._members[place] = Gathered(self, first, source)
        return self._members[place]

    def make(self, member: Gathered) -> None:
        """Make this value, and with it all of the bundle that are wanted."""
        while member.wanted:
            self._send()
            assert self._flight is not None
            with torch.no_grad():
                values = self._conversion.finish(self._which, self._weights, self._flight)
            for place, value in zip(self._which, values, strict=True):
                self._members[place].made(value)
            self._weights, self._flight = (), None

    def ahead(self) -> None:
        """Send for the bundle that the backward will ask for after this one."""
        other = self._before
        while other is not None and not any(member.awaited for member in other._members.values()):
            other = other._before
        if other is not None:
            other._send()

    def _send(self) -> None:
        """Send for all that are wanted, unless they are on their way already."""
        if self._flight is None:
            self._which = [place for place, member in self._members.items() if member.wanted]
            self._weights = [self._members[place].source() for place in self._which]
            with torch.no_grad():
                self._flight = self._conversion.begin(self._weights)


class Gathered:
    """A gathered value, which fills a storage of its own. It lays claim to its source as long as something uses it."""

    __slots__ = ("_asking", "_claim", "_served", "_source", "_stride", "_uses", "_value", "again", "dtype", "round")

    def __init__(self, again: Again, first: torch.Tensor, source: torch.Tensor | Part) -> None:
        self.again, self._source = again, source
        self._stride, self.dtype = first.stride(), first.dtype
        self._value: torch.Tensor | None = None
        self._claim: Saved | None = None
        self._uses = 0  # that exist
        self._asking = 0  # of them, on their own (not for another gathered value made from this one), and not yet served
        self._served = 0  # of them, since the value was made
        self.round = 0  # how often the value was let go

    @property
    def wanted(self) -> bool:
        """Whether something may ask for the value, which is not there."""
        return self._value is None and self._uses > 0

    @property
    def awaited(self) -> bool:
        """Whether the backward will ask for it itself."""
        return self._value is None and self._asking > 0

    def value(self) -> torch.Tensor:
        """The value, made again unless it is still there from another use."""
        if self._value is None:
            self.again.make(self)
        assert self._value is not None
        return self._value

    def source(self) -> torch.Tensor:
        """The tensor that is converted."""
        if isinstance(self._source, torch.Tensor):
            return self._source
        assert self._claim is not None, "a value that is wanted has a claim to its source"
        return self._claim.tensor()

    def made(self, value: torch.Tensor) -> None:
        """The value is there again."""
        alike = value.stride() == self._stride and not value.storage_offset()
        self._value = value if alike else value.new_empty_strided(value.size(), self._stride).copy_(value)

    def add(self, change: int, *, asking: bool) -> None:
        """One use more, or less; `asking` if the backward will ask for it itself."""
        self._uses += change
        self._asking += change if asking else 0
        if not self._uses:
            self._claim = None
        elif self._claim is None and isinstance(self._source, Part):
            self._claim = self._source.saved(source=True)

    def serve(self, *, asking: bool) -> None:
        """A use has got the value."""
        self._served += 1
        self._asking -= asking
        self._let_go()

    def remove(self, *, served: bool, asking: bool) -> None:
        """A use has ended; `served` if it has got the value that is there now."""
        self.add(-1, asking=asking)
        self._served -= served
        self._let_go()

    def _let_go(self) -> None:
        if self._value is not None and self._served >= self._uses:
            self._value = None
            self._served = 0
            self.round += 1


class Use:
    """One reason to make a gathered value again; it ends with the object."""

    __slots__ = ("_asking", "_round", "of")

    def __init__(self, of: Gathered, *, source: bool) -> None:
        self.of, self._round, self._asking = of, -1, not source
        of.add(1, asking=self._asking)

    def take(self) -> torch.Tensor:
        """The value; a use that asks twice counts once, as long as others wait for the same value."""
        value, now = self.of.value(), self.of.round
        if self._round != now:
            self._round = now
            self.of.serve(asking=self._asking)
            self._asking = False
        return value

    def __del__(self) -> None:
        self.of.remove(served=self._round == self.of.round, asking=self._asking)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor that lies in the memory of a gathered value, as geometry."""

    of: Gathered
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def saved(self, *, source: bool) -> Saved:
        """The part with a claim to the value; `source` if another gathered value is made from it."""
        return Saved(part=self, use=Use(self.of, source=source))


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A part of a gathered value that will be asked for."""

    part: Part
    use: Use

    def tensor(self) -> torch.Tensor:
        """The tensor, in the value made again."""
        return self.use.take().as_strided(self.part.size, self.part.stride, self.part.offset)


class Gathers:
    """The gathered values of a parallel model that are alive now, by the storage in which they lie."""

    def __init__(self) -> None:
        self._marks: MutableMapping[torch.UntypedStorage, Gathered] = WeakIdKeyDictionary()
        self._last: Again | None = None  # of the forward that runs

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around a forward: what autograd saves of gathered values is their geometry only."""
        self._last = None
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._last = None

    def mark(self, values: Tensors, conversion: Conversion, sources: Tensors) -> None:
        """Have the values that were converted from `sources` made again, if something is saved at all.

        Not those that lie in the memory of their source. A source is kept until the backward, unless it was made so itself.
        """
        if not torch.is_grad_enabled():
            return
        again = Again(conversion, self._last)
        for place, (value, source) in enumerate(zip(values, sources, strict=True)):
            if value.untyped_storage() is not source.untyped_storage() and _fills_its_storage(value):
                self._marks[value.untyped_storage()] = again.add(place, value, self._part(source) or source.detach())
        self._last = again

    def _part(self, tensor: torch.Tensor) -> Part | None:
        """A tensor as a part of a gathered value, if it is one."""
        found = self._marks.get(tensor.untyped_storage())
        if found is None or found.dtype != tensor.dtype:
            return None
        return Part(of=found, size=tensor.size(), stride=tensor.stride(), offset=int(tensor.storage_offset()))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Saved:
        part = self._part(tensor)
        return part.saved(source=False) if part else tensor

    def _unpack(self, saved: torch.Tensor | Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        tensor = saved.tensor()
        saved.part.of.again.ahead()
        return tensor

    def __deepcopy__(self, memo: dict[int, object]) -> Gathers:
        return Gathers()


def cast(gathers: Gathers, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of a weight in another dtype, which is dropped after its use and cast again for the backward.

    The target of a `call_function` node of the emitted graph.
    """
    copied = weight.to(dtype)
    gathers.mark([copied], _Cast(dtype), [weight])
    return copied


@dataclass(frozen=True, slots=True)
class _Cast:
    """Casts: nothing is on its way."""

    dtype: torch.dtype

    def begin(self, weights: Tensors) -> Tensors:
        """Nothing is sent."""
        return ()

    def finish(self, which: Sequence[int], weights: Tensors, flight: Tensors) -> Tensors:
        """The copies."""
        return [weight.to(self.dtype) for weight in weights]


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()
