"""The places where forward may leave Python state for its next call: attributes of modules, and others.

    self.calls += 1                          an attribute of a module of the model
    next(self.rates)                         an iterator there
    Schedule.calls += 1                      an attribute of a class, here and in files that define classes of the model
    global calls; calls += 1                 a global of such a file
    def forward(self, x, before=[]): ...     a default of a function there

The modules are copies made for tracing. All else is the user's, so changes that tracing makes there are undone.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

MOST_ELEMENTS, MOST_NESTED = 1024, 3  # elements of a container, and levels of nesting, that are inspected
MOST_IN_ALL = 2**16  # elements of all nested containers together
OF_TORCH = frozenset(vars(nn.Module()))  # tables of hooks and contents, and `training`
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_NOT_SIMPLE = (nn.Module, Mapping, type, FunctionType)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, SimpleNamespace, *_CONTAINERS})


@dataclass(frozen=True, slots=True)
class Place:
    """A value that Python keeps, a function that replaces it, and whether it is outside of the model's modules."""

    value: object
    put: Callable[[Any], object]
    outside: bool = False


class CountedIterator:
    """An iterator that counts how many items were taken from it, which plain iterators do not tell."""

    def __init__(self, iterator: Iterator[object]) -> None:
        self.iterator, self.taken = iterator, 0

    def __iter__(self) -> CountedIterator:
        return self

    def __next__(self) -> object:
        self.taken += 1
        return next(self.iterator)


def count_iterators(model: nn.Module) -> None:
    """Make iterators in attributes of a model count their items."""
    for module in model.modules():
        for name, held in vars(module).items():
            if isinstance(held, Iterator) and not isinstance(held, io.IOBase | CountedIterator):
                vars(module)[name] = CountedIterator(held)


def too_long(value: object, room: int) -> bool:
    """Whether a container has more elements than are inspected, or than there is `room` for."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | torch.Tensor):
        return False
    return len(value) > min(MOST_ELEMENTS, room)


def module_places(model: nn.Module) -> Iterator[tuple[str, Place]]:
    """The attributes of a model's modules, by dotted name."""
    for path, module in model.named_modules():
        held = vars(module)
        for name, value in held.items():
            if name not in OF_TORCH:
                yield f"{path}.{name}".strip("."), Place(value, partial(held.__setitem__, name))


def outside_places(model: nn.Module) -> Iterator[tuple[str, Place]]:
    """The plain values, containers and simple objects held by classes of a model, the files that define these, and functions
    there, by dotted name; for functions including their defaults and closures."""
    for owner, label in owners(model).items():
        for name, value in _held(owner).items():
            yield f"{label}.{name}", Place(value, partial(setattr, owner, name), outside=True)
        if isinstance(owner, FunctionType):
            for name, cell in cells_of(owner).items():
                if _plain(cell.cell_contents, owner):
                    yield f"{label}.{name}", Place(cell.cell_contents, partial(setattr, cell, "cell_contents"), outside=True)
            for name, value in _defaults(owner).items():
                if type(value) in _CONTAINERS:
                    yield f"{label}.{name}", Place(value, lambda _: None, outside=True)


@contextlib.contextmanager
def taken_back(model: nn.Module) -> Iterator[None]:
    """On exit, restore the places outside of a model's modules, and the contents of containers there."""
    names = [(owner, _held(owner).keys()) for owner in owners(model)]
    places = dict(outside_places(model))
    contents = [one for place in places.values() for one in _contents(place.value)]
    try:
        yield
    finally:
        for owner, before in names:
            for name in _held(owner).keys() - before:
                delattr(owner, name)
        now = dict(outside_places(model))
        for name, place in places.items():
            if name not in now or now[name].value is not place.value:
                place.put(place.value)
        for put_back in contents:
            put_back()


def owners(model: nn.Module) -> dict[Any, str]:
    """The classes of a model's modules, the files that define them, classes of the same packages that these files refer to, the
    functions of all of them, and functions in attributes of modules, each with its name."""
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__ if not _of_torch(kind))
    files = {file: name for name in map(_file, kinds) if (file := sys.modules.get(name)) is not None}
    own = set(map(_package, files))
    known = [held for file in files for held in vars(file).values() if isinstance(held, type) and _package(held) in own]
    found: dict[Any, str] = {kind: kind.__qualname__ for kind in (*kinds, *known)} | files
    own_functions = [held for owner in found for held in _functions(owner) if _file(held) == _file(owner)]
    attributes = [held for module in model.modules() for held in _functions(module) if _package(held) != "torch"]
    functions = dict.fromkeys((*own_functions, *attributes))
    alike = Counter[str]()
    for function in functions:
        alike[function.__qualname__] += 1
        count = alike[function.__qualname__]
        found[function] = f"{function.__qualname__}#{count}" if count > 1 else function.__qualname__
    return found


def _functions(owner: object) -> list[FunctionType]:
    return [held for held in vars(owner).values() if isinstance(held, FunctionType)]


def _held(owner: object) -> dict[str, object]:
    """The plain values, containers and simple objects that a class, a file or a function holds."""
    held = {name: value for name, value in [*vars(owner).items()] if not name.startswith("__") and _plain(value, owner)}
    filled = _filled_by_tracers({name for name, value in held.items() if type(value) in _CONTAINERS}, owner)
    return {name: value for name, value in held.items() if name not in filled}


def _filled_by_tracers(names: set[str], owner: object) -> set[str]:
    """The containers that a file imported from torch or from this package, which tracing itself may fill."""
    if not names or not isinstance(owner, ModuleType):
        return set()
    files = [vars(file) for key, file in [*sys.modules.items()] if key.startswith(("torch.", "autopar."))]
    return {name for held in files for name in names & held.keys() if held[name] is vars(owner)[name]}


def _plain(value: object, owner: object) -> bool:
    """Whether a value is plain, a container, or a simple object of its owner's package."""
    own = _package(type(value)) == _package(owner) and not isinstance(value, _NOT_SIMPLE)
    return own or type(value) in _PLAIN or isinstance(value, torch.Tensor)


def cells_of(function: FunctionType) -> dict[str, CellType]:
    """A function's closure: its nonempty cells by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if cell != CellType()}


def _defaults(function: FunctionType) -> dict[str, object]:
    """The defaults of a function's parameters, by name."""
    values = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return dict(zip(names[len(names) - len(values) :], values, strict=True)) | (function.__kwdefaults__ or {})


def _contents(value: object, depth: int = MOST_NESTED, room: int = MOST_IN_ALL) -> Iterator[Callable[[], object]]:
    """Functions that each restore the contents of a container or object, including nested ones."""
    if isinstance(value, _NOT_SIMPLE) and not isinstance(value, dict):
        return
    held = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None)
    if isinstance(value, torch.Tensor) or not isinstance(held, _CONTAINERS) or too_long(held, room) or not depth:
        return
    yield partial(_refill, held, held.copy())
    for part in [*held.values()] if isinstance(held, dict) else [*held]:
        yield from _contents(part, depth - 1, room // len(held))


def _refill(container: Any, before: Any) -> None:
    if _parts(container) != _parts(before):
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def _parts(container: Any) -> object:
    """The ids of a container's elements."""
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return set(map(id, container)) if isinstance(container, set) else [*map(id, container)]


def _of_torch(kind: type) -> bool:
    return kind is object or _package(kind) == "torch"


def _file(owner: Any) -> str:
    """The name of the file that defines a class or a function; for a file, its own name."""
    return str(owner.__module__ if isinstance(owner, type | FunctionType) else owner.__name__)


def _package(owner: Any) -> str:
    return _file(owner).partition(".")[0]


__all__ = [
    "MOST_ELEMENTS",
    "MOST_IN_ALL",
    "MOST_NESTED",
    "OF_TORCH",
    "Place",
    "cells_of",
    "count_iterators",
    "module_places",
    "outside_places",
    "owners",
    "taken_back",
    "too_long",
]
