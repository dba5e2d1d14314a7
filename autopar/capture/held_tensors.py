"""Tensors that modules hold beside parameters and buffers: in attributes, and in the containers and objects there.

self.mean = torch.zeros(16)                      mean
self.scales = [torch.ones(16), torch.ones(8)]    scales[0], scales[1]
self.anchors = {"small": torch.ones(4)}          anchors['small']
self.grid = Grid(x=torch.arange(4.0))            grid.x
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from autopar.capture.python_places import (
    MOST_ELEMENTS,
    MOST_IN_ALL,
    MOST_NESTED,
    Place,
    module_places,
    outside_places,
    too_long,
)

Replace = Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A tensor that a module holds as a plain Python value: in an attribute, or in a container or object there.

    `varies` says whether a tensor that forward made would differ in another call.
    """

    tensor: torch.Tensor
    put: Replace  # puts another tensor in its place
    varies: bool = False


def held_tensors(model: nn.Module, *, outside: bool = False) -> Mapping[str, HeldTensor]:
    """The tensors that the modules of a model hold besides parameters and buffers, by dotted name; with `outside`, also those
    that its classes and files hold."""
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {
        name: HeldTensor(tensor=tensor, put=_putting(place, put))
        for label, place in (*module_places(model), *(outside_places(model) if outside else ()))
        for name, tensor, put in _tensors(place.value, label, place.put)
        if tensor is place.value or id(tensor) not in registered
    }


def _putting(place: Place, put: Replace) -> Replace:
    """Put a tensor into a place, or into the value that is there now, which may be a copy made by torch.export."""

    def placed(tensor: torch.Tensor) -> None:
        place.put(place.value)
        put(tensor)

    return placed


def _tensors(
    value: object, name: str, put: Callable[[object], object], depth: int = MOST_NESTED, room: int = MOST_IN_ALL
) -> Iterator[tuple[str, torch.Tensor, Replace]]:
    """The tensors in a value, each with its name and a function that replaces it; `put` replaces the value itself."""
    if isinstance(value, torch.Tensor):
        yield name, value, put
        return
    if too_long(value, room) or not depth:
        return
    parts: list[tuple[str, object, Callable[[object], object]]] = []
    if isinstance(value, (list, deque)):
        parts = [(f"[{place}]", part, partial(value.__setitem__, place)) for place, part in enumerate(value)]
    elif isinstance(value, tuple):
        parts = [(f"[{place}]", part, partial(_in_tuple, value, place, put)) for place, part in enumerate(value)]
    elif isinstance(value, dict):
        parts = [(f"[{key!r}]", part, partial(value.__setitem__, key)) for key, part in value.items()]
    elif not (isinstance(value, nn.Module | type) or callable(value)):
        inside = getattr(value, "__dict__", {})
        parts = [(f".{key}", part, partial(setattr, value, key)) for key, part in inside.items()]
    if len(parts) <= MOST_ELEMENTS:
        for label, part, own in parts:
            yield from _tensors(part, name + label, own, depth - 1, room // len(parts))


def _in_tuple(value: tuple[object, ...], place: int, put: Callable[[object], object], part: object) -> None:
    """Replace a tuple by one with a different part at this position."""
    kind, parts = type(value), [*value[:place], part, *value[place + 1 :]]
    put(getattr(kind, "_make", kind)(parts))
