"""Storages that the backward can fill again, with reference counts of the saved tensors that need them.

A storage is dropped after its last use in the forward. Each saved tensor that views it becomes a `SavedEntry`: sizes, strides
and offset (`Geometry`), and a `Claim` on the storage. The storage is filled when the first claim is redeemed, and freed once
every claim has been.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a tensor views its storage: everything about a tensor but its bytes."""

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
        """A tensor of this geometry over a storage."""
        with torch.no_grad():
            tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
            tensor = tensor.set_(storage, self.offset, self.size, self.stride)
            tensor = torch._neg_view(tensor) if self.negative else tensor
            return tensor.conj() if self.conjugate else tensor


class Recomputation(ABC):
    """Work of the forward that can be repeated in the backward; `outputs` are the storages that it fills, by output index.

    The references are weak: a storage that nothing needs any more is not filled.
    """

    def __init__(self) -> None:
        self.outputs: MutableMapping[int, RecomputedStorage] = WeakValueDictionary()

    def add(self, index: int, tensor: torch.Tensor) -> RecomputedStorage:
        """Register the storage of an output of the forward as one that `run` fills."""
        self.outputs[index] = output = RecomputedStorage(self, index, Geometry.of(tensor))
        return output

    @abstractmethod
    def retain_inputs(self, output: RecomputedStorage) -> None:
        """Hold the inputs that this output is computed from, because the output now has a claim."""

    @abstractmethod
    def release_inputs(self, output: RecomputedStorage) -> None:
        """Drop the inputs that only this output needed, because its last claim has ended."""

    @abstractmethod
    def missing_inputs(self, output: RecomputedStorage) -> list[RecomputedStorage]:
        """The inputs that must be filled before `run` can fill this output."""

    @abstractmethod
    def run(self, output: RecomputedStorage) -> None:
        """Fill this output, and every other output that is needed."""

    def prefetch(self) -> None:  # noqa: B027
        """Start communication for what the backward will need next; called after one of the outputs was read."""


class RecomputedStorage:
    """A storage that a `Recomputation` fills, with counts of the claims on it.

    The storage stays filled until every claim was redeemed, so one backward fills it once; a second backward
    (`retain_graph=True`) fills it once more. While it has claims, its recomputation holds its inputs.
    """

    def __init__(self, source: Recomputation, index: int, geometry: Geometry) -> None:
        self.source, self.index, self._geometry = source, index, geometry
        self._value: torch.Tensor | None = None
        self._claims = 0
        self._saved_claims = 0  # of saved tensors (not of buckets gathered from this storage), not redeemed yet
        self._redeemed = 0  # claims redeemed since the storage was filled
        self.round = 0  # how often the storage was freed

    @property
    def needed(self) -> bool:
        """Whether there is a claim on it and it is not filled."""
        return self._value is None and self._claims > 0

    @property
    def needed_by_saved_tensor(self) -> bool:
        """Whether it is not filled and a saved tensor has a claim on it; claims of buckets gathered from it do not count."""
        return self._value is None and self._saved_claims > 0

    def storage(self) -> torch.UntypedStorage:
        """The filled storage.

        Inputs that are missing are recomputed first, with a stack of our own: a chain of ops may be longer than Python's
        recursion limit.
        """
        stack = [self] if self._value is None else []
        while stack:
            missing = stack[-1].source.missing_inputs(stack[-1]) if stack[-1].needed else []
            stack += reversed(missing)
            if not missing and (output := stack.pop()).needed:
                output.source.run(output)
        assert self._value is not None
        return self._value.untyped_storage()

    def fill(self, value: torch.Tensor) -> None:
        """Store the recomputed value; saved views need the forward's strides, so a value with other strides is copied."""
        if Geometry.of(value) != self._geometry:
            value = self._geometry.on(value.new_empty(value.numel()).untyped_storage()).copy_(value)
        self._value = value.detach()

    def add_claim(self, *, saved: bool) -> None:
        """Count a new claim; the first one retains the inputs."""
        self._claims += 1
        self._saved_claims += saved
        if self._claims == 1:
            self.source.retain_inputs(self)

    def redeem(self, *, saved: bool) -> None:
        """Count a claim that has received the filled storage."""
        self._redeemed += 1
        self._saved_claims -= saved
        self._free_if_redeemed()

    def remove_claim(self, *, redeemed: bool, saved: bool) -> None:
        """Count a claim that has ended; `redeemed` if it had received the currently filled storage."""
        self._claims -= 1
        self._saved_claims -= saved
        if not self._claims:
            self.source.release_inputs(self)
        self._redeemed -= redeemed
        self._free_if_redeemed()

    def _free_if_redeemed(self) -> None:
        if self._value is not None and self._redeemed >= self._claims:
            self._value = None
            self._redeemed = 0
            self.round += 1


class Claim:
    """The right to a recomputed storage; it ends when this object is freed.

    `chained` marks the claim of a bucket whose gathered weights are themselves recomputed.
    """

    __slots__ = ("_round", "_saved", "target")

    def __init__(self, target: RecomputedStorage, *, chained: bool) -> None:
        self.target, self._round, self._saved = target, -1, not chained
        target.add_claim(saved=self._saved)

    def redeem(self) -> torch.UntypedStorage:
        """The filled storage; redeeming twice counts once unless the storage was freed in between."""
        storage, now = self.target.storage(), self.target.round
        if self._round != now:
            self._round = now
            self.target.redeem(saved=self._saved)
            self._saved = False
        return storage

    def __del__(self) -> None:
        self.target.remove_claim(redeemed=self._round == self.target.round, saved=self._saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePart:
    """A tensor that views a recomputed storage."""

    of: RecomputedStorage
    geometry: Geometry

    def claim(self, *, chained: bool = False) -> SavedEntry:
        """This part with a claim on its storage; `chained` if a bucket is gathered from it that is recomputed itself."""
        return SavedEntry(part=self, claim=Claim(self.of, chained=chained))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEntry:
    """The entry kept in place of a saved tensor whose storage is recomputed."""

    part: StoragePart
    claim: Claim

    def tensor(self) -> torch.Tensor:
        """The tensor, over the storage filled again."""
        return self.part.geometry.on(self.claim.redeem())
