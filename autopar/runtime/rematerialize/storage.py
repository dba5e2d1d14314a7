"""Memory that is made again, or fetched: what fills it, and who has a claim to it (`runtime.recompute`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Geometry:
        """The geometry of a tensor."""
        return Geometry(
            dtype=tensor.dtype, size=tensor.size(), stride=tensor.stride(), offset=int(tensor.storage_offset()),
            conjugate=tensor.is_conj(), negative=tensor.is_neg(),
        )  # fmt: skip

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor that lies so in a storage."""
        with torch.no_grad():
            tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
            tensor = tensor.set_(storage, self.offset, self.size, self.stride)
            tensor = torch._neg_view(tensor) if self.negative else tensor
            return tensor.conj() if self.conjugate else tensor


class Recomputation(ABC):
    """Something of the forward that can be done once more. It knows what it makes as long as something may ask for it."""

    def __init__(self) -> None:
        self.makes: MutableMapping[int, RecomputedStorage] = WeakValueDictionary()  # by place

    def add(self, place: int, tensor: torch.Tensor) -> RecomputedStorage:
        """The memory in which what it made at a place lies."""
        self.makes[place] = made = RecomputedStorage(self, place, Geometry.of(tensor))
        return made

    @abstractmethod
    def claim(self, made: RecomputedStorage) -> None:
        """Something will ask for this memory: what it is made from is needed, too."""

    @abstractmethod
    def release(self, made: RecomputedStorage) -> None:
        """Nothing will."""

    @abstractmethod
    def lacking(self, made: RecomputedStorage) -> list[RecomputedStorage]:
        """What must be made before this can be."""

    @abstractmethod
    def make(self, made: RecomputedStorage) -> None:
        """Make it, and with it all that is wanted."""

    def ahead(self) -> None:  # noqa: B027
        """It has been asked for something: send for what the backward will ask for next."""


class RecomputedStorage:
    """A storage that a run fills. As long as something uses it, the run lays claim to what it reads."""

    def __init__(self, run: Recomputation, place: int, first: Geometry) -> None:
        self.run, self.place, self._first = run, place, first
        self._value: torch.Tensor | None = None
        self._uses = 0  # that exist
        self._asking = 0  # of them, not of a bundle that is made from this one, and not yet served
        self._served = 0  # of them, since the value was made
        self.round = 0  # how often the value was let go

    @property
    def wanted(self) -> bool:
        """Whether something may ask for it, and it is not there."""
        return self._value is None and self._uses > 0

    @property
    def awaited(self) -> bool:
        """Whether something will that is not a bundle."""
        return self._value is None and self._asking > 0

    def storage(self) -> torch.UntypedStorage:
        """The memory, made again unless it is still there from another use.

        What it is made from is made first, one after the other: a chain of ops may be longer than Python's stack is deep.
        """
        waiting = [self] if self._value is None else []
        while waiting:
            lacking = waiting[-1].run.lacking(waiting[-1]) if waiting[-1].wanted else []
            waiting += reversed(lacking)
            if not lacking and (made := waiting.pop()).wanted:
                made.run.make(made)
        assert self._value is not None
        return self._value.untyped_storage()

    def put(self, value: torch.Tensor) -> None:
        """The value is there again; if it is laid out otherwise than in the forward, as it was there."""
        if Geometry.of(value) != self._first:
            value = self._first.on(value.new_empty(value.numel()).untyped_storage()).copy_(value)
        self._value = value.detach()

    def add(self, change: int, *, asking: bool) -> None:
        """One use more, or less."""
        before, self._uses = self._uses, self._uses + change
        self._asking += change if asking else 0
        if not before:
            self.run.claim(self)
        elif not self._uses:
            self.run.release(self)

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


class Claim:
    """One reason to make memory again; it ends with the object."""

    __slots__ = ("_asking", "_round", "of")

    def __init__(self, of: RecomputedStorage, *, chained: bool) -> None:
        self.of, self._round, self._asking = of, -1, not chained
        of.add(1, asking=self._asking)

    def take(self) -> torch.UntypedStorage:
        """The memory; a use that asks twice counts once, as long as others wait for the same value."""
        storage, now = self.of.storage(), self.of.round
        if self._round != now:
            self._round = now
            self.of.serve(asking=self._asking)
            self._asking = False
        return storage

    def __del__(self) -> None:
        self.of.remove(served=self._round == self.of.round, asking=self._asking)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePart:
    """A tensor that lies in memory that can be made again."""

    of: RecomputedStorage
    geometry: Geometry

    def saved(self, *, chained: bool = False) -> SavedEntry:
        """The part with a claim to the memory; `chained` if it is converted to something that is made again in its turn."""
        return SavedEntry(part=self, use=Claim(self.of, chained=chained))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEntry:
    """A part that will be asked for."""

    part: StoragePart
    use: Claim

    def tensor(self) -> torch.Tensor:
        """The tensor, in memory made again."""
        return self.part.geometry.on(self.use.take())
