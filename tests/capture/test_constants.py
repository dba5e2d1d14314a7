"""Tensors outside of modules, in globals of a file or in closures, are literals if nothing changes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError, InputError
from tests.capture import interpreter

X = torch.linspace(-1.0, 1.0, 24).view(4, 6)
MEAN = torch.linspace(0.1, 0.6, 6)
HALF, ROWS, MASK = torch.tensor(0.5), torch.tensor([0, 2, 1]), torch.arange(6) % 2 == 0
LOW, NONE, ONES = torch.full((6,), 1.5, dtype=torch.bfloat16), torch.zeros(4, 0), torch.ones(5000)
MANY = torch.linspace(0.0, 1.0, 5000)
STATE = torch.ones(6)
Body = Callable[[Any, torch.Tensor], torch.Tensor]


class Does(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.lin, self.body = nn.Linear(6, 6), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.lin(x))


def enclosed(tensor: torch.Tensor) -> Body:
    return lambda self, x: x * tensor


def copied(self: Does, x: torch.Tensor) -> torch.Tensor:
    table = STATE.clone()
    table[0] = 3.0
    return x * table


BODIES: dict[str, Body] = {
    "normalised": lambda self, x: (x - MEAN) / MEAN,
    "one number": lambda self, x: x * HALF if HALF > 0.3 else x + HALF.item(),
    "rows": lambda self, x: x[ROWS],
    "mask": lambda self, x: torch.where(MASK, x, -x) * MASK,
    "another dtype": lambda self, x: x * LOW,
    "no elements": lambda self, x: torch.cat([x, NONE], 1),
    "many alike": lambda self, x: x * (ONES * 2)[:6],
    "as keyword": lambda self, x: torch.addcmul(x, tensor1=MEAN, tensor2=LOW.to(x.dtype)),
    "in a list": lambda self, x: x * torch.stack([MEAN, MEAN]).sum(0),
    "in a layer": lambda self, x: x + self.lin(MEAN),
    "closure": enclosed(torch.linspace(1.0, 2.0, 6)),
    "copied": copied,
    "its size": lambda self, x: x * len(MANY),
}


@pytest.mark.parametrize("case", BODIES)
def test_numbers_are_those_of_the_module(case: str) -> None:
    interpreter.check(Does(BODIES[case]), X)


@pytest.mark.parametrize("case", ["normalised", "rows", "closure"])
def test_devices_compute_what_the_module_does(case: str) -> None:
    assert autopar.verify(Does(BODIES[case]), X, (2,), strategy="megatron").ok


def averaged(self: Does, x: torch.Tensor) -> torch.Tensor:
    STATE.mul_(0.9).add_(x.detach().mean(0))
    return x - STATE


def set_in_part(self: Does, x: torch.Tensor) -> torch.Tensor:
    STATE[1:3].add_(1.0)
    return x - STATE


def rebound(self: Does, x: torch.Tensor) -> torch.Tensor:
    global STATE
    found = x - STATE
    STATE = 0.9 * STATE + x.detach().mean(0)
    return found


def moving() -> Body:
    mean = torch.zeros(6)

    def moved(self: Does, x: torch.Tensor) -> torch.Tensor:
        nonlocal mean
        found = x - mean
        mean = 0.9 * mean + x.detach().mean(0)
        return found

    return moved


@pytest.mark.parametrize(
    "body, what",
    [
        (averaged, "forward writes a tensor that is not in a module"),
        (set_in_part, "forward writes a tensor that is not in a module"),
        (rebound, r"forward reads tests\.capture\.test_constants\.STATE and sets it"),
        (moving(), r"forward reads moving\.<locals>\.moved\.mean and sets it"),
        (lambda self, x: x * MANY[:6], "a tensor that the graph cannot contain"),
    ],
)
def test_what_is_no_constant_is_refused(body: Body, what: str) -> None:
    before = STATE
    with pytest.raises(CaptureError, match=what):
        capture(Does(body), X)
    assert before is STATE
    assert torch.equal(STATE, torch.ones(6))


def test_a_constant_in_the_memory_of_what_is_trained_is_refused() -> None:
    model = Does(lambda self, x: x)
    weight = model.lin.weight.detach()[0]
    model.body = lambda self, x: x * weight
    with pytest.raises(CaptureError, match=r"that is not in a module lies in the memory of lin\.weight, which is trained"):
        capture(model, X)


def test_a_constant_that_is_written_after_capture_is_refused_at_the_next_call() -> None:
    scale = torch.ones(6)
    parallel = autopar.parallelize(Does(enclosed(scale)), X, mesh=1)
    parallel(X)
    scale.mul_(0.5)
    with pytest.raises(InputError, match="was written after the model was captured"):
        parallel(X)
