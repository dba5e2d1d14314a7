"""The bytes that torch's dispatcher sees, to check prices; counted independently of `autopar.analysis.traffic`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Count = Callable[[torch._ops.OpOverload, tuple[object, ...], dict[str, object], object], int]


class Dispatched(TorchDispatchMode):
    """Adds up what `count` says of each operator that is dispatched, given its arguments and what it returned; views count
    nothing."""

    def __init__(self, count: Count) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.bytes = count, 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            self.bytes += self.count(func, args, kwargs or {}, found)
        return found


def tensors(data: object) -> Iterator[torch.Tensor]:
    """Every tensor in some data."""
    return (leaf for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor))
