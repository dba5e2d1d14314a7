"""A second call of forward gives the first one's program, wherever Python keeps state in between; nothing is left behind."""

from __future__ import annotations

import functools
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator
from math import exp
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError

X = torch.linspace(-1.0, 1.0, 24).view(4, 6)
BANK: list[torch.Tensor] = []
STATE: dict[str, Any] = {"calls": 0}
CONTEXT = SimpleNamespace(calls=0, before=None)
TABLES: dict[int, torch.Tensor] = {}
Body = Callable[[Any, torch.Tensor], torch.Tensor]


class Missing:
    """What libraries have in the place of a package that is not installed."""

    def __getattr__(self, name: str) -> object:
        raise AttributeError(name) if name.startswith("__") else ImportError(name)


class Corpus(list[int]):
    """What scripts have beside their models."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("millions of words are looked at")


missing, corpus = Missing(), Corpus([0] * 5000)  # globals, which are looked at


class Keeps(nn.Module):
    bank: ClassVar[list[torch.Tensor]] = []

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.lin, self.body = nn.Linear(6, 6), body
        self.latest: deque[torch.Tensor] = deque(maxlen=3)
        self.history: list[torch.Tensor] = []
        self.nested = SimpleNamespace(history=[])
        self.rates, self.steps = itertools.cycle([1.0, 0.5]), iter([1.0, 2.0, 3.0])
        self.longest, self.made, self.table = 0, False, torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.body(self, x))


def among_the_latest(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    self.latest.append(x.detach().mean(0))
    return x + sum(self.latest)


def as_many_as_before(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    self.history.append(x.detach().mean(0))
    return x * len(self.history)


def as_many_as_in_an_object(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    self.nested.history.append(x.detach().mean(0))
    return x * len(self.nested.history)


def of_a_cycle(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    return x * next(self.rates)


def of_an_iterator(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    return x * next(self.steps)


def in_a_default(self: Keeps, x: torch.Tensor, _seen: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006
    _seen.append(x.detach().mean(0))
    return x + torch.stack(_seen).mean(0)


def counted_in_a_default(self: Keeps, x: torch.Tensor, *, _seen: dict[str, int] = {}) -> torch.Tensor:  # noqa: B006
    _seen["calls"] = _seen.get("calls", 0) + 1
    return x * _seen["calls"]


def in_a_list_of_the_file(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    BANK.append(x.detach().mean(0))
    return x + torch.stack(BANK).mean(0)


def in_a_list_of_the_class(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    Keeps.bank.append(x.detach().mean(0))
    return x + torch.stack(Keeps.bank).mean(0)


def enclosed() -> Body:
    kept: list[torch.Tensor] = []

    def among(self: Keeps, x: torch.Tensor) -> torch.Tensor:
        kept.append(x.detach().mean(0))
        return x + kept[0]

    return among


def counted_in_the_file(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    STATE["calls"] += 1
    return x * STATE["calls"]


def counted_in_an_object_of_the_file(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    CONTEXT.calls += 1
    return x * CONTEXT.calls


def before(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    found = x if CONTEXT.before is None else x + CONTEXT.before
    CONTEXT.before = x.detach()
    return found


def doubled_when_a_table_is_made(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    if not self.made:
        self.made, self.table, x = True, torch.ones(6, device=x.device), 2 * x
    return x * self.table


def noted(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    BANK.append(x.detach())
    STATE["calls"] += 1
    return x * 2


def table_of_the_file(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] not in TABLES:
        TABLES[x.shape[1]] = torch.arange(x.shape[1], device=x.device).to(x.dtype)
    return x * TABLES[x.shape[1]]


def longest_table(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] > self.longest:
        self.longest, self.table = x.shape[1], torch.arange(2 * x.shape[1], device=x.device).cos()
    return x * self.table[: x.shape[1]]


def flagged_table(self: Keeps, x: torch.Tensor) -> torch.Tensor:
    if not self.made:
        self.made, self.table = True, torch.ones(6, device=x.device).mul_(3)
    return x * self.table


@functools.lru_cache
def frequencies(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size, device=device).float().cos()


@functools.cache
def drawn(size: int) -> torch.Tensor:
    return torch.rand(size)


class Window(nn.Module):
    """A structural similarity whose window is made for as many channels as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.channels, self.window = nn.Conv2d(3, 3, 1), 1, self._window(1)

    def _window(self, channels: int) -> torch.Tensor:
        line = torch.Tensor([exp(-((x - 2) ** 2) / 4.5) for x in range(5)]).unsqueeze(1)
        return (line / line.sum()).mm(line.t()).float()[None, None].expand(channels, 1, 5, 5).contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        window = self.window
        if x.shape[1] != self.channels or window.data.type() != x.data.type():
            self.window, self.channels = window, _ = self._window(x.shape[1]).type_as(x), x.shape[1]
        return nn.functional.conv2d(x, window, padding=2, groups=x.shape[1]).mean((1, 2, 3))


@pytest.mark.parametrize(
    "body, name",
    [
        (among_the_latest, "latest[0]"),
        (as_many_as_before, "history[0]"),
        (as_many_as_in_an_object, "nested.history[0]"),
        (of_a_cycle, "rates"),
        (of_an_iterator, "steps"),
        (in_a_default, "in_a_default._seen[0]"),
        (counted_in_a_default, "counted_in_a_default._seen"),
        (enclosed(), "enclosed.<locals>.among.kept[0]"),
        (in_a_list_of_the_file, f"{__name__}.BANK[0]"),
        (in_a_list_of_the_class, "Keeps.bank[0]"),
        (counted_in_the_file, f"{__name__}.STATE"),
        (counted_in_an_object_of_the_file, f"{__name__}.CONTEXT"),
        (before, f"{__name__}.CONTEXT.before"),
        (doubled_when_a_table_is_made, "made"),
    ],
)
def test_a_second_call_that_is_another_program_is_refused(body: Body, name: str) -> None:
    with pytest.raises(CaptureError, match=rf"forward (changes|keeps|reads) {re.escape(name)} ?"):
        capture(Keeps(body), X)
    assert (BANK, Keeps.bank, STATE, CONTEXT) == ([], [], {"calls": 0}, SimpleNamespace(calls=0, before=None))
    assert in_a_default.__defaults__ == ([],)


@pytest.mark.parametrize("body", [noted, table_of_the_file, longest_table, flagged_table])
def test_what_a_first_call_makes_of_numbers_and_sizes_is_no_harm_and_does_not_stay(body: Body) -> None:
    model = Keeps(body)
    parallel = autopar.parallelize(model, X, mesh=1)
    assert (BANK, STATE, TABLES) == ([], {"calls": 0}, {})
    for mode in (True, False):
        for _ in range(2):
            torch.testing.assert_close(parallel.train(mode)(X), model.train(mode)(X))
    BANK.clear(), TABLES.clear(), STATE.update(calls=0)


def test_a_window_that_is_made_for_other_channels() -> None:
    model, x = Window(), torch.linspace(-1.0, 1.0, 384).view(2, 3, 8, 8)
    parallel = autopar.parallelize(model, x, mesh=1)
    for _ in range(2):
        torch.testing.assert_close(parallel(x), model(x))
    assert autopar.verify(model, x, mesh=2).ok  # with the window that it has now


def test_what_a_cached_function_made_is_made_anew_and_does_not_stay() -> None:
    frequencies(6, torch.device("cpu"))
    model = Keeps(lambda self, x: x * frequencies(x.shape[1], x.device))
    parallel = autopar.parallelize(model, X, mesh=1)
    assert frequencies.cache_info().currsize == 0
    for mode in (True, False):
        torch.testing.assert_close(parallel.train(mode)(X), model.train(mode)(X))


@pytest.mark.parametrize(
    "kept", [drawn, functools.cache(lambda model: model.lin.weight.detach().norm())], ids=["drawn", "weight"]
)
def test_what_a_cached_function_computed_once_for_all_calls_is_refused(
    kept: Callable[[Any], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keeps, "kept", kept, raising=False)
    with pytest.raises(CaptureError, match="keeps what its first call computed"):
        capture(Keeps(lambda self, x: x * kept(6 if kept is drawn else self)), X)
