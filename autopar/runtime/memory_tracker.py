"""Measured memory of a step: every tensor storage, from its first use until it is freed.

    with MemoryTracker([*module.parameters(), *batch]) as tracker:
        module(*batch).backward()
    tracker.peak().bytes

A storage is first seen as an operand or result of an operator, those of the backward included. Workspace that a kernel
allocates and frees is not seen. Of DTensors the local tensors are. Storages first seen inside `other_device()` stand for memory
of another device, and count as 0 bytes.
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

_other_device = contextvars.ContextVar("other_device", default=False)


@contextmanager
def other_device() -> Iterator[None]:
    """Inside, new storages stand for memory of another device (host memory, say), even if their device type is the same."""
    token = _other_device.set(True)
    try:
        yield
    finally:
        _other_device.reset(token)


def counts() -> bool:
    """Whether new storages count as memory of the device: not inside `other_device()`."""
    return not _other_device.get()


PLAIN = {torch.Tensor, torch.nn.Parameter}
GIVEN = "given"  # allocated before the tracker was started


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationKind:
    """What storages have in common in a summary: the operator that made them (and autograd node), shape and dtype."""

    made: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment with the most bytes allocated, after the operator `made`; `alive` has (kind, count, bytes) of its storages."""

    bytes: int
    made: str
    alive: tuple[tuple[AllocationKind, int, int], ...]


class MemoryTracker(TorchDispatchMode):
    """Logs every allocation and release of storages on a device type.

    `given` are tensors allocated before (of DTensors their local tensors), `elsewhere` those that stand for another device's.
    """

    def __init__(self, given: Iterable[torch.Tensor], device: str = "cpu", elsewhere: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._seen: list[tuple[AllocationKind, int]] = []
        self._log: list[tuple[int, bool]] = []  # the number of a storage; True when it is first seen, False when it is freed
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in given:
            self._see(tensor, GIVEN)
        with other_device():
            for tensor in elsewhere:
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
        if not PLAIN.issuperset(types):  # a DTensor: the operators on its local tensors are seen
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
        """Bytes of the storages that are allocated at present."""
        return sum(self._seen[number][1] * (1 if allocated else -1) for number, allocated in self._log)

    def peak(self) -> Peak:
        """The moment with the most bytes allocated so far."""
        now = most = at = 0
        for moment, (number, allocated) in enumerate(self._log):
            now += self._seen[number][1] * (1 if allocated else -1)
            if now > most:
                most, at = now, moment
        alive: dict[int, None] = {}
        for number, allocated in self._log[: at + 1]:
            alive.update({number: None}) if allocated else alive.pop(number)
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
            size = storage.nbytes() if counts() else 0
            self._seen.append((AllocationKind(made=made, shape=tuple(tensor.shape), dtype=tensor.dtype), size))
            self._log.append((number, True))
            self._alive[key] = weakref.ref(storage, functools.partial(self._freed, key, number))

    def _freed(self, key: int, number: int, _: object) -> None:
        self._log.append((number, False))
        del self._alive[key]
