"""Tensors that share memory with others are refused if one of them changes, because in a graph each is separate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError

X = torch.ones(4, 6)
Make = Callable[["Holds"], None]


class Holds(nn.Module):
    def __init__(self, make: Make, *, write: str = "", read: str = "") -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.register_buffer("queue", torch.zeros(2, 6))
        self.write, self.read = write, read
        make(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.other(self.layer(x))
        if self.write:
            getattr(self, self.write).add_(y.detach().mean(0))
        return y + getattr(self, self.read).sum(0) if self.read else y


def view(self: Holds) -> None:
    self.latest = self.queue[0]


def registered_view(self: Holds) -> None:
    self.register_buffer("latest", self.queue[:1])


def teacher(self: Holds) -> None:
    self.teacher = self.layer.weight.data


def registered_teacher(self: Holds) -> None:
    self.register_buffer("teacher", self.layer.weight.detach())


def list_of_parts(self: Holds) -> None:
    self.parts = [self.layer.weight.data[:2]]
    self.teacher = self.parts[0]


def frozen(self: Holds) -> None:
    self.other.weight.data = self.layer.weight.data
    self.other.requires_grad_(False)


def aside(self: Holds) -> None:
    self.latest, self.teacher = self.queue[0].clone(), self.layer.weight.detach().clone()


def the_same(self: Holds) -> None:
    self.latest = self.queue


@pytest.mark.parametrize(
    "make, write, read, said",
    [
        (view, "latest", "queue", "queue lies in the memory of latest, which forward writes"),
        (view, "queue", "latest", "latest lies in the memory of queue, which forward writes"),
        (view, "latest", "", "queue lies in the memory of latest, which forward writes"),
        (registered_view, "latest", "", "queue lies in the memory of latest, which forward writes"),
        (teacher, "", "teacher", r"teacher lies in the memory of layer\.weight, which is trained"),
        (registered_teacher, "", "", r"teacher lies in the memory of layer\.weight, which is trained"),
        (list_of_parts, "", "teacher", r"parts\[0\] lies in the memory of layer\.weight, which is trained"),
        (frozen, "", "", r"other\.weight lies in the memory of layer\.weight, which is trained"),
    ],
)
def test_what_changes_with_another_tensor_is_refused(make: Make, write: str, read: str, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(Holds(make, write=write, read=read), X)


@pytest.mark.parametrize(
    "make, write, read",
    [
        (view, "", "latest"),  # nobody writes
        (registered_view, "", "latest"),
        (teacher, "", ""),  # nobody reads
        (aside, "queue", "latest"),
        (aside, "", "teacher"),
        (the_same, "latest", "queue"),
    ],
)
def test_what_does_not_change_may_share_memory(make: Make, write: str, read: str) -> None:
    capture(Holds(make, write=write, read=read), X)


def test_the_weight_that_spectral_norm_computes_anew_is_none() -> None:
    """It holds its first value, in the memory of the parameter."""
    capture(nn.utils.spectral_norm(nn.Linear(6, 6)), X)
