"""Parameters and submodules that forward replaces are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError

X = torch.ones(4, 6)


class Replaces(nn.Module):
    def __init__(self, replace: Callable[[Replaces], object]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layers, self.replace = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]), replace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](self.first(x))
        self.replace(self)
        return y


def decayed(self: Replaces) -> None:
    self.first.weight = nn.Parameter(0.5 * self.first.weight)


def removed(self: Replaces) -> None:
    self.first.bias = None


def swapped(self: Replaces) -> None:
    self.first, self.second = self.second, self.first


def rotated(self: Replaces) -> None:
    self.layers[0], self.layers[1] = self.layers[1], self.layers[0]


def there_and_back(self: Replaces) -> None:
    before = self.first
    self.first = self.second
    self.first = before


@pytest.mark.parametrize(
    "replace, said",
    [
        (decayed, r"parameter 0\.first\.weight"),
        (removed, r"parameter 0\.first\.bias"),
        (swapped, r"submodule 0\.first"),
        (rotated, r"submodule 0\.layers\.0"),
    ],
)
def test_what_is_another_one_in_the_next_step_is_refused(replace: Callable[[Replaces], object], said: str) -> None:
    with pytest.raises(CaptureError, match=f"forward replaces the {said}"):
        capture(nn.Sequential(Replaces(replace)), X)


def test_what_is_put_back_is_no_harm() -> None:
    capture(nn.Sequential(Replaces(there_and_back)), X)
