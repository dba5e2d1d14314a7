"""With budgets that few plans fit, a larger budget never makes the plan slower."""

from __future__ import annotations

import torch
from torch import nn

import autopar


class Residual(nn.Module):
    """Two blocks so small that the weights of both are one message, which rows of memory do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 256), nn.Linear(256, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.last(x), y)


def test_a_plan_in_more_memory_is_no_slower() -> None:
    with torch.device("meta"):
        model, batch = Residual(), (torch.empty(64, 32), torch.empty(64, dtype=torch.long))
    states = 16 * sum(weight.numel() for weight in model.parameters())  # bytes of weights, gradients and Adam's
    small, large = (
        autopar.plan(model, batch, mesh=(2, 4), device="h100", budget=int(share * states)).step_time for share in (0.28, 0.4)
    )
    assert large < small
