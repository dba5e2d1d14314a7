"""Functions in attributes that close over the model's modules compute with the modules of the copy."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.capture import interpreter

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Block(nn.Module):
    """As in minGPT: `m = self.mlp; self.mlpf = lambda x: m.proj(m.fc(x))`."""

    def __init__(self, know: Callable[[nn.ModuleDict], Callable[[torch.Tensor], torch.Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = nn.ModuleDict({"fc": nn.Linear(6, 8), "proj": nn.Linear(8, 6)})
        self.mlpf = know(self.mlp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlpf(x)


def closure(mlp: nn.ModuleDict) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: mlp.proj(mlp.fc(x).relu())


def default(mlp: nn.ModuleDict) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x, m=mlp: m.proj(m.fc(x).relu())


def keyword(mlp: nn.ModuleDict) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor, *, layers: tuple[nn.Module, ...] = (mlp.fc, mlp.proj)) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return run


def function_of_a_function(mlp: nn.ModuleDict) -> Callable[[torch.Tensor], torch.Tensor]:
    inner = closure(mlp)
    return lambda x: inner(x).sin()


def partial(mlp: nn.ModuleDict) -> Callable[[torch.Tensor], torch.Tensor]:
    return functools.partial(lambda m, x: closure(mlp)(x) + m.proj(m.fc(x)), mlp)


def parameter(mlp: nn.ModuleDict) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = mlp.fc.weight
    return lambda x: x @ weight.t() @ weight


def itself(mlp: nn.ModuleDict) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor, times: int = 2) -> torch.Tensor:
        return run(mlp.proj(mlp.fc(x)), times - 1) if times else x

    return run


@pytest.mark.parametrize("know", [closure, default, keyword, function_of_a_function, partial, parameter, itself])
def test_what_a_function_knows_is_trained(know: Callable[[nn.ModuleDict], Callable[[torch.Tensor], torch.Tensor]]) -> None:
    model = Block(know)
    before = model.mlpf
    program = interpreter.check(model, X).program
    assert program.parameters[0].used
    assert model.mlpf is before
    assert model.mlpf(X).requires_grad


def test_a_patched_forward_is_that_of_the_copy() -> None:
    model = Block(closure)
    forward = model.forward
    model.forward = lambda x: forward(2 * x)  # type: ignore[method-assign]
    interpreter.check(model, X)
