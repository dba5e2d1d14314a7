"""Numbers that forward draws from `random` or `numpy.random` during tracing: anything independent of them is captured.

    if self.training and random.random() < self.layer_drop:        a rate of 0 drops no layer, one of 1 every layer
        continue

A graph would use the same number in every step, so one that decides a branch, or enters a computation, is refused.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from autopar.capture import source_location
from autopar.errors import CaptureError


def drawn_from(name: str, at: str) -> CaptureError:
    """The error for a number from a Python generator that a graph would freeze."""
    what = f"forward draws from {name}: the graph would have the same numbers in every step"
    return CaptureError(what, at=at, fix="draw with torch, or outside of forward, and give the numbers as a tensor")


class Drawn:
    """A number in the half-open interval from `low` to `high`; a comparison that holds for all or none of it has an answer."""

    def __init__(self, name: str, at: str, low: float, high: float) -> None:
        self.name, self.at, self.low, self.high = name, at, low, high

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, (int, float)) or self.low < other < self.high:
            self.used()
        return other >= self.high

    def __ge__(self, other: object) -> bool:
        return not self < other

    def __gt__(self, other: object) -> bool:
        if not isinstance(other, (int, float)) or self.low <= other < self.high:
            self.used()
        return other < self.low

    def __le__(self, other: object) -> bool:
        return not self > other

    def used(self, *_: object, **__: object) -> NoReturn:
        """Raise CaptureError: the number itself is used."""
        raise drawn_from(self.name, self.at)

    __torch_function__ = used  # used as an operand of a torch function
    __hash__ = None  # type: ignore[assignment]


for _name in sorted(({*dir(float)} - {*dir(object)}) | {"__eq__", "__ne__", "__index__"}):
    setattr(Drawn, _name, Drawn.used)


def drawing() -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """Replacements of functions that draw one number, for this thread: the module, the name, the function."""
    units = [(random, "random"), (np.random, "rand"), (np.random, "random"), (np.random, "random_sample")]
    found = [(owner, name, _drawing(owner, vars(owner)[name], unit=True)) for owner, name in units]
    ranges = [(owner, "uniform", _drawing(owner, vars(owner)["uniform"], unit=False)) for owner in (random, np.random)]
    return [*found, *ranges]


def _drawing(owner: ModuleType, original: Callable[..., Any], *, unit: bool) -> Callable[..., Any]:
    """Draws a number in [0, 1), or between its two arguments; with other arguments it calls the original function."""
    tracing = threading.get_ident()

    def draw(*ends: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        asked = len(ends) == (0 if unit else 2) and all(isinstance(end, (int, float)) for end in ends)
        if threading.get_ident() != tracing or named or not asked or not source_location.foreign(frame.f_code.co_filename):
            return original(*ends, **named)
        low, high = ends or (0, 1)
        if (low, high) != (0, 1):  # uniform may round up to its upper end
            high = math.nextafter(high, math.inf)
        return Drawn(owner.__name__, source_location.of_frame(frame), low, high) if low < high else original(*ends)

    return draw


__all__ = ["Drawn", "drawing", "drawn_from"]
