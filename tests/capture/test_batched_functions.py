"""`torch.vmap` in forward becomes the batched operators; values and gradients are the module's, on a mesh too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from tests.capture import interpreter

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Does(nn.Module):
    """A linear layer, and a body that gets it and its result."""

    def __init__(self, body: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.body = nn.Linear(6, 6), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer, self.layer(x))


def of_a_row(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row.softmax(-1).cumsum(0))(y)


def of_a_layer(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(layer)(y).relu()


def of_a_mask(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """As transformers makes masks: one level for each dim, and a function that reads a tensor from around it."""
    places = torch.arange(4, device=y.device)
    rule = torch.vmap(lambda row, column: (row >= column) & (y[0, row] > -9), in_dims=(None, 0))
    mask = torch.vmap(rule, in_dims=(0, None))(places, places)
    return (y @ y.t()).masked_fill(~mask, 0.0)


def of_two(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    products, sums = torch.vmap(lambda a, b, scale=1.0: (a @ b.t(), a.sum(0) * scale), in_dims=(0, None))(y.view(2, 2, 6), y)
    return products.sum((0, 1))[:, None] * sums.sum()


@pytest.mark.parametrize("body", [of_a_row, of_a_layer, of_a_mask, of_two])
def test_what_vmap_batches_is_captured_as_operators(body: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    model = Does(body)
    interpreter.check(model, X)
    assert autopar.plan(model, X, (2,), device="h100").step_time > 0
