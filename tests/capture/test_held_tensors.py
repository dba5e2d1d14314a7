"""Tensors that modules hold in attributes, containers and objects become buffers of the program; none is frozen or lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError

X = torch.linspace(-1.0, 1.0, 48).view(8, 6)


class Pair(NamedTuple):
    scale: torch.Tensor
    shift: torch.Tensor


class Holds(nn.Module):
    def __init__(self, body: Callable[[Holds, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.lin, self.body = nn.Linear(6, 6), body
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0]))
        self.plain = torch.arange(6.0)
        self.scales = [torch.full((6,), 2.0), torch.arange(6.0)]
        self.anchors = {"small": torch.arange(6.0), "sets": [{"deep": torch.full((6,), 3.0)}]}
        self.grid, self.pair = SimpleNamespace(x=torch.arange(6.0)), Pair(torch.full((6,), 4.0), torch.arange(6.0))
        self.again, self.table = [self.mask, self.scales[0]], {"weight": self.lin.weight}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.lin(x)).sum()


def each_of_a_list(self: Holds, h: torch.Tensor) -> torch.Tensor:
    for scale in self.scales:
        h = h * scale
    return h


def written(self: Holds, h: torch.Tensor) -> torch.Tensor:
    self.scales[0].mul_(0.5)
    return h * self.scales[0]


HELD: dict[str, tuple[Callable[[Holds, torch.Tensor], torch.Tensor], list[str]]] = {
    "attribute": (lambda self, h: h * self.plain, ["plain"]),
    "list": (each_of_a_list, ["scales[0]", "scales[1]"]),
    "dict": (lambda self, h: h * self.anchors["small"], ["anchors['small']"]),
    "nested": (lambda self, h: h * self.anchors["sets"][0]["deep"], ["anchors['sets'][0]['deep']"]),
    "object": (lambda self, h: h * self.grid.x, ["grid.x"]),
    "named tuple": (lambda self, h: h * self.pair.scale + self.pair.shift, ["pair[0]", "pair[1]"]),
    "buffer in a list": (lambda self, h: h * self.again[0], ["mask"]),
    "in two lists": (lambda self, h: h * self.again[1] * self.scales[0], ["scales[0]"]),
    "written in place": (written, ["scales[0]"]),
}


@pytest.mark.parametrize("case", HELD)
def test_a_tensor_in_a_container_is_a_buffer(case: str) -> None:
    body, names = HELD[case]
    program = capture(Holds(body), X).program
    used = [held for held in program.buffers if held.used]
    assert [held.value.name for held in used] == names
    assert [held.persistent for held in used] == [name == "mask" for name in names]


@pytest.mark.parametrize("case", HELD)
def test_a_module_has_the_values_of_what_the_model_holds(case: str) -> None:
    model = Holds(HELD[case][0])
    parallel = autopar.parallelize(model, X, mesh=1)
    for _ in range(2):
        torch.testing.assert_close(parallel(X), model(X))
    assert parallel.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("case", ["list", "named tuple", "buffer in a list"])
def test_what_containers_hold_is_placed_with_the_rest(case: str) -> None:
    assert autopar.verify(Holds(HELD[case][0]), X, mesh=2).ok


def moving_on(self: Holds, h: torch.Tensor) -> torch.Tensor:
    scale, shift = self.pair
    self.pair = Pair(scale, (0.5 * shift + h.mean(0)).detach())
    return h * scale + shift


def appended(self: Holds, h: torch.Tensor) -> torch.Tensor:
    self.scales[1] = self.scales[1] + h.detach().mean(0)
    return h * self.scales[1]


@pytest.mark.parametrize("body, name", [(moving_on, "pair[1]"), (appended, "scales[1]")])
def test_what_is_replaced_for_the_next_call_is_refused(body: Callable[[Holds, torch.Tensor], torch.Tensor], name: str) -> None:
    with pytest.raises(CaptureError, match=f"forward reads {re.escape(name)} and sets it"):
        capture(Holds(body), X)


def test_a_trained_tensor_that_no_module_registers_is_refused() -> None:
    """Its gradient would stay in the program."""
    model = Holds(each_of_a_list)
    model.scales = [nn.Parameter(torch.ones(6))]
    with pytest.raises(CaptureError, match=r"scales\[0\] requires a gradient, but is none of the model's parameters"):
        capture(model, X)


REACHED: dict[str, Callable[[Holds, torch.Tensor], torch.Tensor]] = {
    "in a dict": lambda self, h: h @ self.table["weight"],
    "in a list that is an operand": lambda self, h: h * torch.stack([*self.again, self.lin.bias])[0] @ self.table["weight"].T,
    "beside its own name": lambda self, h: h @ self.table["weight"] + self.lin.weight.sum(),
    "written in place": lambda self, h: h * self.again[0].mul_(0.5),
}


@pytest.mark.parametrize("case", REACHED)
def test_what_is_registered_is_the_same_wherever_it_is_reached(case: str) -> None:
    """torch.export takes what a container holds for a constant, and a parameter there has no gradient."""
    program = capture(model := Holds(REACHED[case]), X).program
    assert {held.value.name for held in (*program.parameters, *program.buffers) if held.used} >= {"lin.weight", "lin.bias"}
    assert autopar.verify(model, X, mesh=2, strategy="fsdp").ok
