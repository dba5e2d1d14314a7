"""Where forward stops gradients, the program does too; where a graph cannot express that, it is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.capture import interpreter

X = torch.linspace(-1, 1, 24).reshape(4, 6)
Teach = Callable[["Taught", torch.Tensor], torch.Tensor]


class Taught(nn.Module):
    def __init__(self, teach: Teach) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher, self.teach = nn.Linear(6, 6), nn.Linear(6, 6), teach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.student(x)
        return (y - self.teach(self, y + x).clone()).square().mean()


def by_context(self: Taught, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return self.teacher(x)


@torch.inference_mode()
def by_decorator(self: Taught, x: torch.Tensor) -> torch.Tensor:
    return self.teacher(x)


def without_it(self: Taught, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        return self.teacher(x)


def within(self: Taught, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(), torch.inference_mode(False):
        return self.teacher(x)


@pytest.mark.parametrize("teach", [by_context, by_decorator, without_it, within])
def test_inference_mode_stops_gradients(teach: Teach) -> None:
    interpreter.check(Taught(teach), X)


def frozen_for_a_while(self: Taught, x: torch.Tensor) -> torch.Tensor:
    self.teacher.requires_grad_(False)
    y = self.teacher(x)
    self.teacher.requires_grad_(True)
    return y


def frozen_by_attribute(self: Taught, x: torch.Tensor) -> torch.Tensor:
    self.teacher.weight.requires_grad = False
    return self.teacher(x)


@pytest.mark.parametrize("teach", [frozen_for_a_while, frozen_by_attribute])
def test_a_parameter_that_forward_freezes_is_refused(teach: Teach) -> None:
    with pytest.raises(CaptureError, match=rf"sets requires_grad of a parameter(.|\n)*in {teach.__name__}"):
        capture(Taught(teach), X)


def as_it_is(self: Taught, x: torch.Tensor) -> torch.Tensor:
    self.teacher.requires_grad_(True)
    return self.teacher(x.detach().requires_grad_())


def test_what_changes_nothing_of_a_parameter_is_no_harm() -> None:
    capture(Taught(as_it_is), X)
