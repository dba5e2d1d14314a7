"""Literal tensors: numbers written out in forward become operators, as meta tensors hold no values.

torch.tensor([1, 2])          cat([full((1,), 1), full((1,), 2)])
torch.tensor([length, 1])     stack([length, full((), 1)])
x[[0, 2]]                     x[torch.tensor([0, 2])]
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TypeGuard

import numpy as np
import torch

LITERAL_LIMIT = 1024  # operators to write out a literal tensor: one for each run of equal numbers
ELEMENTS_LIMIT = 2**20  # of a literal tensor


def as_literal(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.as_tensor` that turns numbers into a literal tensor, and leaves the rest to the original."""

    def as_tensor(data: object, dtype: torch.dtype | None = None, **rest: object) -> torch.Tensor:
        spelt = _mixed(data) or _numbers(data) is not None
        return literal(torch.tensor)(data, dtype=dtype) if spelt else original(data, dtype=dtype, **rest)

    return as_tensor


def literal(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor` of numbers, possibly tensors, as operators on the meta device."""

    def tensor(data: object, *, dtype: torch.dtype | None = None, device: object = None, **rest: object) -> torch.Tensor:
        if _mixed(data):
            return _stacked(data, dtype)
        found = _numbers(data)
        if found is None or (runs := _runs(found[1])) is None:
            return original(data, dtype=dtype, device=device, **rest)
        shape, numbers = found
        common = dtype or _dtype(data, numbers)
        if not numbers:
            return torch.zeros(shape, dtype=common, device="meta")
        if not shape:
            return torch.full((), numbers[0], dtype=common, device="meta")
        parts = [torch.full((len(alike),), alike[0], dtype=common, device="meta") for alike in runs]
        return torch.cat(parts).reshape(shape)

    return tensor


def spelt_out(data: object) -> bool:
    """Whether nested lists hold few enough numbers for a literal tensor."""
    found = _numbers(data)
    return found is not None and _runs(found[1]) is not None


def new_literal(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`x.new_tensor` and `x.new` that turn numbers into a literal tensor of the dtype of x; the original does the rest."""

    def new(x: torch.Tensor, *data: object, dtype: torch.dtype | None = None, **rest: object) -> torch.Tensor:
        numbers = rest.get("data", data[0] if len(data) == 1 else None)
        of_a_size = original is torch.Tensor.new and not isinstance(numbers, (list, np.ndarray))
        if not of_a_size and (_mixed(numbers) or _numbers(numbers) is not None):
            return literal(torch.tensor)(numbers, dtype=dtype or x.dtype)
        return original(x, *data, **({"dtype": dtype} if dtype else {}), **rest)

    return new


def _runs(numbers: list[bool | int | float]) -> list[list[bool | int | float]] | None:
    """Runs of equal numbers: an identity matrix has two for each row. None if there are too many numbers or runs."""
    if len(numbers) > ELEMENTS_LIMIT:
        return None
    runs = [list(alike) for _, alike in itertools.groupby(numbers, repr)]
    return runs if len(runs) <= LITERAL_LIMIT else None


def _mixed(data: object) -> TypeGuard[list[torch.Tensor | float]]:
    """Whether data is a flat list of numbers, some of which are tensors."""
    if not isinstance(data, (list, tuple)) or not any(isinstance(one, torch.Tensor) for one in data):
        return False
    return all(isinstance(one, (bool, int, float)) or (isinstance(one, torch.Tensor) and not one.dim()) for one in data)


def _stacked(data: list[torch.Tensor | float], dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor of a list of numbers and tensors, without a gradient."""
    parts = [one.detach() if isinstance(one, torch.Tensor) else literal(torch.tensor)(one) for one in data]
    common = dtype or functools.reduce(torch.promote_types, (part.dtype for part in parts))
    return torch.stack([part.to(common) for part in parts])


def with_literals(original: Callable[..., object]) -> Callable[..., object]:
    """`x[index]` and `x[index] = y` with lists in the index turned into literal tensors."""

    def at(x: torch.Tensor, index: object, *value: object) -> object:
        if isinstance(index, tuple):
            return original(x, tuple(map(_spelt, index)), *value)
        return original(x, _spelt(index), *value)

    return at


def _spelt(index: object) -> object:
    """A list in an index as a literal tensor; a flat list of truth values becomes the indices of the true ones."""
    if not isinstance(index, list) or (found := _numbers(index)) is None:
        return index
    if not found[1]:
        return torch.zeros(found[0], dtype=torch.int64, device="meta")
    if all(isinstance(number, bool) for number in index):
        return literal(torch.tensor)([place for place, number in enumerate(index) if number])
    return literal(torch.tensor)(index)


def _numbers(data: object) -> tuple[tuple[int, ...], list[bool | int | float]] | None:
    """The shape and the numbers of an array or nested lists of Python numbers; None for anything else."""
    if isinstance(data, (np.ndarray, np.generic)):
        return _numbers(data.tolist())
    if isinstance(data, (bool, int, float)):
        return (), [data]
    if not isinstance(data, (list, tuple, range)):
        return None
    if not data:
        return (0,), []
    parts = [_numbers(part) for part in data]
    known = [part for part in parts if part is not None]
    if len(known) != len(parts) or any(part[0] != known[0][0] for part in known):
        return None
    return (len(known), *known[0][0]), [number for _, numbers in known for number in numbers]


def _dtype(data: object, numbers: list[bool | int | float]) -> torch.dtype:
    """The dtype that `torch.tensor` gives to these numbers."""
    if isinstance(data, (np.ndarray, np.generic)):
        return getattr(torch, data.dtype.name)  # type: ignore[no-any-return]
    if not numbers or any(isinstance(number, float) for number in numbers):
        return torch.get_default_dtype()
    return torch.bool if all(isinstance(number, bool) for number in numbers) else torch.int64


__all__ = ["as_literal", "literal", "new_literal", "spelt_out", "with_literals"]
