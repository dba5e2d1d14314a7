"""The memory of a step as it is: every tensor storage, from the moment it is seen until it is freed.

    with Live([*module.parameters(), *batch]) as live:
        module(*batch).backward()
    live.peak().bytes

A storage is seen when an operator returns it or is given it, the backward's operators included. What an operator allocates and
frees inside its kernel is not seen. Of DTensors the parts on this rank are. What is first seen within `elsewhere()` stands for
another device's memory, and does not count.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_elsewhere = contextvars.ContextVar("elsewhere", default=False)


@contextmanager
def elsewhere() -> Iterator[None]:
    """What is made here stands for memory of another device, though it may be of the same type."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def here() -> bool:
    """Whether what is made now is memory of the device."""
    return not _elsewhere.get()


PLAIN = {torch.Tensor, torch.nn.Parameter}
GIVEN = "given"  # what there was before


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationKind:
    """Storages that were made alike: by which operator (in the backward with the autograd node), and of which shape."""

    made: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment with the most bytes alive, which came with what `made` says; `alive` counts what was alive, with its bytes."""

    bytes: int
    made: str
    alive: tuple[tuple[AllocationKind, int, int], ...]


class MemoryTracker(TorchDispatchMode):
    """Keeps a log: every storage on a type of device as it is seen, with its bytes, and again when it is freed.

    `given` is what there is before (of DTensors their parts).
    """

    def __init__(self, given: Iterable[torch.Tensor], device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._seen: list[tuple[AllocationKind, int]] = []
        self._log: list[tuple[int, bool]] = []  # the number of a storage, and whether it is there from now on
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in given:
            self._see(tensor, GIVEN)

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if not PLAIN.issuperset(types):  # a DTensor: what it does with its parts is seen
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        node = torch._C._current_autograd_node()
        made = f"{node.name()}: {func}" if node else str(func)
        for leaf in tree_leaves((args, kwargs, found)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device:
                self._see(leaf, made)
        return found

    @property
    def now(self) -> int:
        """Bytes alive."""
        return sum(self._seen[number][1] * (1 if there else -1) for number, there in self._log)

    def peak(self) -> Peak:
        """The peak so far."""
        now = most = at = 0
        for moment, (number, there) in enumerate(self._log):
            now += self._seen[number][1] * (1 if there else -1)
            if now > most:
                most, at = now, moment
        alive: dict[int, None] = {}
        for number, there in self._log[: at + 1]:
            alive.update({number: None}) if there else alive.pop(number)
        counts, sizes = Counter[AllocationKind](), Counter[AllocationKind]()
        for number in alive:
            alike, size = self._seen[number]
            counts[alike] += 1
            sizes[alike] += size
        last = self._seen[self._log[at][0]][0].made if self._log else GIVEN
        return Peak(bytes=most, made=last, alive=tuple((alike, counts[alike], size) for alike, size in sizes.most_common()))

    def _see(self, tensor: torch.Tensor, made: str) -> None:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._alive:
            number = len(self._seen)
            size = storage.nbytes() if here() else 0
            self._seen.append((AllocationKind(made=made, shape=tuple(tensor.shape), dtype=tensor.dtype), size))
            self._log.append((number, True))
            self._alive[key] = weakref.ref(storage, functools.partial(self._freed, key, number))

    def _freed(self, key: int, number: int, _: object) -> None:
        self._log.append((number, False))
        del self._alive[key]
