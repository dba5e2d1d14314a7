"""Indices of one number that a tensor holds: torch reads the number, which a graph cannot know, and selects by it.

    alpha[t]                 alpha[t.reshape(1)].select(0, 0)
    queue[pointer] = row     queue[pointer.reshape(1)] = row.unsqueeze(0)

Numbers that follow from sizes stay numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeGuard

import torch

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
ALL = slice(None)


@dataclass(frozen=True, eq=False, slots=True)
class IndexedView:
    """What an index selects: of a view by all its other parts, `numbers` along some dims, ascending."""

    view: torch.Tensor
    numbers: dict[int, torch.Tensor]

    def read(self) -> torch.Tensor:
        """The selected elements."""
        found = self.view
        for dim, number in reversed(self.numbers.items()):
            index: list[Any] = [ALL] * dim + [number.reshape(1)]
            found = found[tuple(index)].select(dim, 0)
        return found

    def write(self, value: Any) -> None:
        """Write the selected elements."""
        dims = [*self.numbers]
        apart = any(after - before > 1 for before, after in itertools.pairwise(dims))
        if isinstance(value, torch.Tensor) and value.dim():
            shape = [size for dim, size in enumerate(self.view.shape) if dim not in self.numbers]
            value = value[(0,) * (value.dim() - len(shape))].to(self.view.dtype).expand(shape)
            value = value.unsqueeze(0 if apart else dims[0])  # where torch puts the dim of several indices
        self.view[tuple(self.numbers[dim].reshape(1) if dim in self.numbers else ALL for dim in range(self.view.dim()))] = value


INDEXING: dict[object, Callable[..., object]] = {
    torch.Tensor.__getitem__: IndexedView.read,
    torch.Tensor.__setitem__: IndexedView.write,
}


def places(x: torch.Tensor, index: Any, known: Callable[[torch.Tensor], bool]) -> IndexedView | None:
    """What an index with unknown numbers selects; None if it has none, or an index of several elements beside them."""
    parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    numbers = {at: part for at, part in enumerate(parts) if _number(part) and not known(part)}
    if not numbers or not all(at in numbers or _basic(part) for at, part in enumerate(parts)):
        return None
    view = x[tuple(ALL if at in numbers else part for at, part in enumerate(parts))]
    return IndexedView(view, {_dim(parts[:at], x.dim() - _taken(parts)): number for at, number in numbers.items()})


def _number(part: object) -> TypeGuard[torch.Tensor]:
    """Whether a part of an index is a number in a tensor."""
    return isinstance(part, torch.Tensor) and not part.dim() and part.dtype in INTEGERS


def _basic(part: object) -> bool:
    """Whether a part of an index selects a view."""
    return isinstance(part, int | slice | None | EllipsisType) and not isinstance(part, bool)


def _taken(parts: Sequence[object]) -> int:
    """How many dims the parts of an index select from, without an ellipsis."""
    return sum(part is not None and part is not ... for part in parts)


def _dim(before: Sequence[object], rest: int) -> int:
    """The dim of a view that follows these parts of its index, of which an ellipsis stands for `rest` dims."""
    return sum(rest if part is ... else not isinstance(part, int) for part in before)


__all__ = ["INDEXING", "IndexedView", "places"]
