"""Small programs for tests of passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autopar.capture import capture
from autopar.ir.program import Program


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> object:
        return self.function(*tensors)


def program(function: Callable[..., object], *tensors: torch.Tensor) -> Program:
    """The captured function; its inputs are called `tensors.0`, `tensors.1`, ..."""
    return capture(Calls(function), tensors).program


def targets(program: Program) -> list[str]:
    """The ops of a program, in short."""
    return [op.target.removeprefix("aten.") for op in program.ops]
