"""Counters that forward keeps in Python, wherever they are, do not become constants of a graph."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError

X = torch.ones(4, 6)
STEPS = LOGGED = 0
Body = Callable[["Counting"], float]


class Annealing:
    """A schedule that is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1 / self.calls


@dataclass(slots=True)
class Slots:
    count: int = 0


class Counting(nn.Module):
    calls = 0

    def __init__(self, held: Any, body: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer, self.held, self.body = nn.Linear(6, 6), held, body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.body(self)


def entry(self: Counting) -> float:
    self.held[0] += 1
    return float(self.held[0])


def array(self: Counting) -> float:
    self.held += 1
    return float(self.held.sum())


def scalar(self: Counting) -> float:
    self.held = np.float32(0.5 * self.held)
    return float(self.held)


def grown(self: Counting) -> float:
    (self.held.append if isinstance(self.held, collections.deque) else self.held.add)(len(self.held))
    return float(len(self.held))


def slotted(self: Counting) -> float:
    self.held.count += 1
    return float(self.held.count)


def enclosed() -> Callable[[], float]:
    count = 0

    def counted() -> float:
        nonlocal count
        count += 1
        return float(count)

    return counted


def of_the_class(self: Counting) -> float:
    type(self).calls += 1
    return float(type(self).calls)


def of_the_file(self: Counting) -> float:
    global STEPS
    STEPS += 1
    return float(STEPS)


def logged(self: Counting) -> float:
    global LOGGED
    LOGGED += 1
    return 2.0


@pytest.mark.parametrize(
    "held, body",
    [
        (Annealing(), lambda self: self.held()),
        ({0: 0, "mean": torch.zeros(6)}, entry),
        ([0, torch.zeros(6)], entry),
        (collections.deque([1.0]), grown),
        (set(), grown),
        (itertools.count(1), lambda self: float(next(self.held))),
        (np.zeros(3), array),
        (np.float32(1.0), scalar),
        (Slots(), slotted),
        (enclosed(), lambda self: self.held()),
    ],
    ids=["called", "dict", "list", "deque", "set", "itertools", "array", "scalar", "slots", "closure"],
)
def test_counters_in_attributes_are_refused(held: object, body: Callable[[Any], float]) -> None:
    with pytest.raises(CaptureError, match=r"forward changes 0\.held, which the graph would have as it was"):
        capture(nn.Sequential(Counting(held, body)), X)


@pytest.mark.parametrize(
    "body, name", [(of_the_class, r"Counting\.calls"), (of_the_file, r"tests\.capture\.test_python_counters\.STEPS")]
)
def test_counters_of_classes_and_files_are_refused_and_stay_as_they_were(body: Callable[[Any], float], name: str) -> None:
    before = Counting.calls, STEPS
    with pytest.raises(CaptureError, match=f"forward changes {name}, which the graph would have as it was"):
        capture(Counting(None, body), X)
    assert (Counting.calls, STEPS) == before


def test_a_counter_of_which_nothing_depends_is_no_harm() -> None:
    capture(Counting(None, logged), X)
    assert LOGGED == 0


def test_a_table_beside_a_flag_is_made_when_it_is_asked_for() -> None:
    def table(self: Counting) -> float:
        if not self.held["made"]:
            self.held |= {"made": True, "table": torch.ones(6, device="meta")}
        return 2.0

    capture(Counting({"made": False, "table": torch.zeros(6)}, table), X)
