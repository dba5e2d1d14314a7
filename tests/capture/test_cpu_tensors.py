"""Tensors that forward creates on the CPU, from numbers or by operators, as a module trained there may."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from tests.capture import interpreter

X = torch.linspace(-1.0, 1.0, 24).view(4, 6)
SIX = [1, 2, 3, 4, 5, 6]
Body = Callable[[torch.Tensor], torch.Tensor]


class Does(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.lin, self.body = nn.Linear(6, 6), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.lin(x))


def written(x: torch.Tensor) -> torch.Tensor:
    weight = torch.Tensor(6)
    weight.fill_(2.0)
    weight[1:3] = 5.0
    return x * weight + weight.sum()


def counted(x: torch.Tensor) -> torch.Tensor:
    sizes = torch.LongTensor([2, 4])
    first, second = x.split(sizes.tolist(), 1)
    return torch.cat([second, first], 1) * int(sizes[0])


def of_its_type(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(6).type(x.type()) + torch.ones(6, dtype=torch.float64).type_as(x)


BODIES: dict[str, Body] = {
    "Tensor": lambda x: x * torch.Tensor(SIX),
    "moved": lambda x: x * torch.Tensor([SIX]).to(x.device),
    "FloatTensor": lambda x: x * torch.FloatTensor(SIX),
    "one number": lambda x: x * torch.Tensor([2])[0],
    "rows": lambda x: x[torch.LongTensor([0, 2, 1])],
    "sizes of x": lambda x: x * torch.Tensor([x.shape[0]] * x.shape[1]),
    "no elements": lambda x: torch.cat([x, torch.Tensor([[]] * 4)], 1),
    "new_tensor": lambda x: x * x.new_tensor(SIX),
    "new_tensor of an array": lambda x: x * x.new_tensor(data=np.arange(6.0)),
    "new_tensor of a dtype": lambda x: x[x.new_tensor([0, 2], dtype=torch.int64)],
    "new of numbers": lambda x: x * x.new(SIX),
    "new of a size": lambda x: x * x.new(6).fill_(2.0),
    "zeros on the CPU": lambda x: x + torch.zeros(6, device="cpu") + torch.ones(4, 1).cpu(),
    "written": written,
    "counted": counted,
    "type": of_its_type,
    "there and back": lambda x: x.cpu().relu().to(x.device) + x,
}


@pytest.mark.parametrize("case", BODIES)
def test_numbers_are_those_of_the_module(case: str) -> None:
    interpreter.check(Does(BODIES[case]), X)


@pytest.mark.parametrize("case", ["Tensor", "rows", "written", "counted", "new_tensor"])
def test_devices_compute_what_the_module_does(case: str) -> None:
    assert autopar.verify(Does(BODIES[case]), X, (2,), strategy="megatron").ok


def test_what_is_drawn_there_is_drawn_in_each_step() -> None:
    program = capture(Does(lambda x: x * torch.Tensor(6).uniform_(0.5, 1.0)), X).program
    assert "aten.uniform.default" in [op.target for op in program.ops]
