"""Buffers that forward replaces keep their new values, in whatever module and however they are assigned."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.passes import normalise
from tests.capture import interpreter

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Keeps(nn.Module):
    """A mean and a copy of it, which a test replaces."""

    def __init__(self, replace: Callable[[Keeps, torch.Tensor], object]) -> None:
        super().__init__()
        self.replace = replace
        self.register_buffer("mean", torch.linspace(1, 2, 6))
        self.register_buffer("kept", torch.linspace(2, 3, 6))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        before = self.mean
        self.replace(self, y.detach().mean(0))
        return y * before + self.mean * self.kept


class Outer(nn.Module):
    def __init__(self, replace: Callable[[Keeps, torch.Tensor], object], *, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.inner, self.twice = nn.Linear(6, 6), Keeps(replace), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.layer(x))
        return self.inner(y) if self.twice else y


def attribute(m: Keeps, now: torch.Tensor) -> None:
    m.mean = 0.9 * m.mean + 0.1 * now


def dictionary(m: Keeps, now: torch.Tensor) -> None:
    m._buffers["mean"] = 0.9 * m.mean + 0.1 * now


def registered(m: Keeps, now: torch.Tensor) -> None:
    m.register_buffer("mean", m.mean + now)


def swapped(m: Keeps, now: torch.Tensor) -> None:
    m.mean, m.kept = m.kept, m.mean


def of_another(m: Keeps, now: torch.Tensor) -> None:
    m.kept = m.mean.view(2, 3).view(6)
    m.mean = m.mean + now


def in_place_then(m: Keeps, now: torch.Tensor) -> None:
    m.kept.add_(now)
    m.mean = m.kept * 2


@pytest.mark.parametrize("replace", [attribute, dictionary, registered, swapped, of_another, in_place_then])
@pytest.mark.parametrize("made", [Outer, lambda replace: Outer(replace, twice=True), Keeps])
def test_a_buffer_that_is_replaced_is_written(
    replace: Callable[[Keeps, torch.Tensor], object],
    made: Callable[[Callable[[Keeps, torch.Tensor], object]], nn.Module],
) -> None:
    model = made(replace)
    captured, other = capture(model, X), copy.deepcopy(model)
    for program in (captured.program, normalise(captured.program)):
        for _ in range(2):
            (found,) = interpreter.outputs(program, model, [X])
            torch.testing.assert_close(found, other(X))
            for one, another in zip(model.buffers(), other.buffers(), strict=True):
                torch.testing.assert_close(one, another)


def dropped(m: Keeps, now: torch.Tensor) -> None:
    m.kept, m.mean = m.mean, None  # type: ignore[assignment]


def widened(m: Keeps, now: torch.Tensor) -> None:
    m.mean = m.mean.double()


@pytest.mark.parametrize(
    "replace, said",
    [(dropped, "replaces the buffer inner.mean by None"), (widened, r"float32 of shape \(6,\), by float64 of shape \(6,\)")],
)
def test_what_no_graph_writes_is_refused(replace: Callable[[Keeps, torch.Tensor], object], said: str) -> None:
    model = Outer(replace)
    model.inner.forward = lambda y: (replace(model.inner, y), y)[1]  # type: ignore[method-assign, return-value]
    with pytest.raises(CaptureError, match=said):
        capture(model, X)


def test_a_buffer_that_another_module_keeps_is_refused() -> None:
    model = Outer(attribute)
    model.register_buffer("same", model.inner.mean)
    with pytest.raises(CaptureError, match=r"replaces the buffer inner\.mean, which another module keeps as it was"):
        capture(model, X)
