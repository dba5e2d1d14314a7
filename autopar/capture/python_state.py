"""Python state that changes between calls but is frozen in a graph: generators, and attributes of modules.

Generators are those of `random` and `numpy.random`, and the seed of torch's. Attributes count if they are plain values:
numbers, strings, and containers and simple objects of them.
"""

from __future__ import annotations

import copy
import copyreg
import itertools
import random
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.capture.drawn_numbers import drawn_from
from autopar.capture.python_places import (
    MOST_ELEMENTS,
    MOST_IN_ALL,
    MOST_NESTED,
    OF_TORCH,
    Place,
    cells_of,
    module_places,
    outside_places,
    too_long,
)
from autopar.errors import CaptureError, InputError

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
SETTINGS = (*_SCALARS, Enum, np.generic, FunctionType, BuiltinFunctionType)
MOST_NUMBERS = 64  # in a list, a tuple or a dict that counts as a setting
_SWITCHES = frozenset({"_disable_adapters"})  # private, but set from outside: by peft's `disable_adapter()`
_SEEDED = "torch.manual_seed"
Kept = Mapping[str, object]  # frozen, by dotted name
Changes = Mapping[str, Place]


class CarriedTensorError(CaptureError):
    """Forward uses a tensor from a previous call."""


class Generators:
    """The states of the process's generators when forward begins; torch's gets a seed that no model would set."""

    def __init__(self) -> None:
        self._given = torch.default_generator.get_state()
        torch.default_generator.manual_seed((torch.initial_seed() + 1) % 2**62)
        self._before = _generators()

    def refuse(self, at: str) -> None:
        """Raise CaptureError if one of them has changed, at a line or before it."""
        now = _generators()
        name = next((name for name, state in self._before.items() if now[name] != state), "")
        if name == _SEEDED:
            raise CaptureError(
                f"forward calls {name}, which a graph does not", at=f"{at}, or before", fix="seed outside of forward"
            )
        if name:
            raise drawn_from(name, f"{at}, or before")

    def restore(self) -> None:
        """Restore the seed and state of torch's generator."""
        torch.default_generator.set_state(self._given)


def _generators() -> dict[str, object]:
    _, words, *rest = np.random.get_state(legacy=True)
    assert isinstance(words, np.ndarray)
    seed = torch.default_generator.initial_seed()
    return {"random": random.getstate(), "numpy.random": (words.tobytes(), *rest), _SEEDED: seed}


def plain_values(model: nn.Module) -> Kept:
    """The plain values that the modules of a model hold, and other places, frozen."""
    return {name: _frozen(place.value) for name, place in _places(model)}


def _places(model: nn.Module) -> Iterator[tuple[str, Place]]:
    yield from module_places(model)
    yield from outside_places(model)


class _BesideTensors(dict[str, object]):
    """The frozen plain values of a container or an object that also holds tensors."""


def _frozen(value: object, depth: int = MOST_NESTED, room: int = MOST_IN_ALL) -> object:
    """A frozen form of a value, which compares like the plain values in it; `...` for a tensor."""
    if too_long(value, room):
        return None
    match value:
        case random.Random():
            return value.getstate()
        case np.random.Generator():
            return str(value.bit_generator.state)
        case np.random.RandomState():
            return str(value.get_state(legacy=False))
        case torch.Tensor():
            return ...
        case np.ndarray() | np.generic():
            return str(value.dtype), value.shape, value.tobytes() if value.size <= MOST_ELEMENTS else None
        case itertools.count():
            return repr(value)
        case set() | frozenset():
            return sorted(repr(one) for one in value if isinstance(one, _SCALARS))
        case nn.Module() | type():
            return None
    if isinstance(value, str | bytes):
        return type(value), value
    if isinstance(value, _SCALARS):
        return type(value), repr(value)
    inside = _inside(value)
    if inside is None or too_long(inside, room) or not depth:
        return None
    room //= max(len(inside), 1)
    found = {repr(key): _frozen(part, depth - 1, room) for key, part in inside.items() if isinstance(key, _SCALARS)}
    if any(part is ... or isinstance(part, _BesideTensors) for part in found.values()):
        return _BesideTensors({key: part for key, part in found.items() if part is not ...})
    return found


def _inside(value: object) -> Mapping[Any, object] | None:
    """What a container or an object holds, by position or name; None for methods, objects of torch, and empty ones."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    kind = type(value)
    if isinstance(value, FunctionType):
        return _closed_over(value) | vars(value) or None
    if isinstance(value, MethodType | ModuleType) or (callable(value) and kind.__module__.startswith("torch")):
        return None
    slots = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return held | getattr(value, "__dict__", {}) or None


def _closed_over(function: FunctionType) -> dict[str, object]:
    """The numbers in a function's closure, by name."""
    held = {name: cell.cell_contents for name, cell in cells_of(function).items()}
    return {name: number for name, number in held.items() if type(number) in (int, float)}


def changes(model: nn.Module, before: Kept) -> Changes:
    """The places whose values have changed, with their new values."""
    return {name: place for name, place in _places(model) if _differs(_frozen(place.value), before.get(name))}


def _differs(now: object, before: object) -> bool:
    """Whether a frozen value has changed; next to tensors, which may be created on first use, only numbers that were there
    before count."""
    if now is ...:
        return False
    if not isinstance(now, _BesideTensors):
        return now != before
    if not isinstance(before, _BesideTensors):
        return False
    return any(_counts(part) and key in before and _differs(part, before[key]) for key, part in now.items())


def _counts(part: object) -> bool:
    return isinstance(part, _BesideTensors) or (isinstance(part, tuple) and part[:1] in ((int,), (float,)))


@dataclass(frozen=True, slots=True)
class _Captured:
    """A module at capture, by its path; it is not kept alive."""

    module: weakref.ref[nn.Module]
    path: str
    kind: type[nn.Module]
    settings: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Settings:
    """The numbers, strings and functions in attributes of modules at capture; does not keep the modules alive.

    `training` has the modes of modules, by path; those not in it have the mode of the whole model. `constants` are tensors from
    outside the model, each with its version counter.
    """

    modules: tuple[_Captured, ...]
    training: Mapping[str, bool] = field(default_factory=dict)
    constants: tuple[tuple[torch.Tensor, int], ...] = ()

    @staticmethod
    def of(model: nn.Module, kept: Set[str], constants: Iterable[torch.Tensor]) -> Settings:
        """The settings of every module of a model, except those private to its class (peft's switch of adapters is not) or
        set by forward."""
        named = [*model.named_modules()]
        return Settings(
            tuple(_Captured(weakref.ref(one), path, type(one), dict(_settings(one, path, kept))) for path, one in named),
            {path: module.training for path, module in named},
            tuple((one, one._version) for one in constants if not one.is_inference()),
        )

    def check(self, parallel: nn.Module, stands_in: type[nn.Module]) -> None:
        """Raise InputError for anything that changed since capture: a setting of the captured model or the parallel one, a
        module of either that was replaced, a constant that was written, or a submodule with a mode of its own.

        Modules of the class `stands_in` hold the tensors of captured ones; others in their place must be of the same class.
        """
        self._check_modes(parallel)
        if any(one._version != version for one, version in self.constants):
            raise InputError(
                "a tensor that is not in a module was written after the model was captured, which has no effect",
                fix="register it as a buffer, or make it an argument of forward",
            )
        whole = next((captured.module() for captured in self.modules if not captured.path), None)
        for captured in self.modules:
            own, held = captured.module(), _at(parallel, captured.path)
            if (whole is not None and _at(whole, captured.path) is not own) or (
                held is not None and held is not parallel and not isinstance(held, (stands_in, captured.kind))
            ):
                raise InputError(
                    f"{captured.path} was replaced after the model was captured, which has no effect",
                    fix="replace it, or add adapters, before; or parallelize again, over= the first for the same weights",
                )
            for module in (own, held):
                if module is not None:
                    _check_settings(module, captured)

    def _check_modes(self, parallel: nn.Module) -> None:
        """Raise InputError for a submodule that has neither the mode of the whole nor the one in which it was captured."""
        captured = self.training if self.training.get("") == parallel.training else {}
        for path, module in parallel.named_modules():
            if module.training != captured.get(path, parallel.training) and module.training != parallel.training:
                mode, call = ("training", "train()") if module.training else ("evaluation", "eval()")
                raise InputError(
                    f"{path} alone was put into {mode} mode, which has no effect on a parallel module",
                    fix=f"call {path}.{call} before the model is made parallel, or train() or eval() of the whole",
                )


def _check_settings(module: nn.Module, captured: _Captured) -> None:
    """Raise InputError for a setting of a module that is not what it was."""
    for name, value in captured.settings.items():
        now = vars(module).get(name, value)
        if now is not value and _set(now, value):
            raise InputError(
                f"{captured.path}.{name}".strip(".") + " was set after the model was captured, which has no effect",
                captured=repr(value),
                now=repr(now),
                fix="set it before, and parallelize again, over= the first for the same weights; or make it an "
                "argument of forward, as a tensor",
            )


def _settings(module: nn.Module, path: str, kept: Set[str]) -> Iterator[tuple[str, object]]:
    for name, held in vars(module).items():
        public = not name.startswith("_") or name in _SWITCHES or _behind_property(module, name)
        own = name not in {*OF_TORCH, "forward"} and f"{path}.{name}".strip(".") not in kept
        if public and own and isinstance(held, SETTINGS):
            yield name, held
        elif public and own and _of_numbers(held):
            yield name, copy.copy(held)


def _of_numbers(held: object) -> bool:
    """Whether a value is a list, a tuple or a dict of numbers, such as the weights of several losses."""
    parts = held.values() if isinstance(held, dict) else held
    few = isinstance(held, list | tuple | dict) and len(held) <= MOST_NUMBERS
    return few and all(type(part) in (bool, int, float) for part in parts)  # type: ignore[attr-defined]


def _set(now: object, captured: object) -> bool:
    """Whether a setting has changed. Among several numbers, only those present at capture count; a cleared log does not."""
    if isinstance(captured, dict):
        return isinstance(now, dict) and len(now) > 0 and {name: now.get(name) for name in captured} != captured
    if isinstance(captured, list | tuple):
        return isinstance(now, list | tuple) and len(now) > 0 and [*now[: len(captured)]] != [*captured]
    return isinstance(now, SETTINGS) and now != captured


def _behind_property(module: nn.Module, name: str) -> bool:
    """Whether an attribute backs a settable property of its name, as `_beta` backs `beta`."""
    public = getattr(type(module), name.removeprefix("_"), None)
    return isinstance(public, property) and public.fset is not None


def _at(module: nn.Module, path: str) -> nn.Module | None:
    """The module at a path; None if there is none."""
    found: nn.Module | None = module
    for name in filter(None, path.split(".")):
        found = found._modules.get(name) if found is not None else None
    return found
