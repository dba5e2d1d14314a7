"""Records which operators really run, and the memory that they fill."""

from __future__ import annotations

import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.runtime.memory_tracker import counts


class Ops(TorchDispatchMode):
    """Counts the operators that run, and knows the memory that they fill."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        found = func(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__] += 1
        given = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        results = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        self._storages += [weakref.ref(x.untyped_storage()) for x in results if _address(x) not in given and counts()]
        return found

    @property
    def alive(self) -> int:
        """Bytes that are held now, of those that were filled here."""
        held = {storage._cdata: storage.nbytes() for link in self._storages if (storage := link())}
        return sum(held.values())


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
