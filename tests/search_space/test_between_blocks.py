"""Activations are split between blocks however a model is written: with residual sums in its blocks, or in its own forward."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar

WIDTH, DEPTH = 32, 3


class Layer(nn.Module):
    """Feed-forward, with the sum inside if it is `residual`."""

    def __init__(self, *, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + y if self.residual else y


class Network(nn.Module):
    """Two layers a block: each adds itself, or the network adds them, or calls what is in them, too."""

    def __init__(self, style: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.style = style
        self.embedding, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64, bias=False)
        self.layers = nn.ModuleList(nn.ModuleList(Layer(residual=style == "in blocks") for _ in range(2)) for _ in range(DEPTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for first, second in self.layers:  # type: ignore[misc]  # a pair
            for layer in (first, second):
                match self.style:
                    case "in blocks":
                        x = layer(x)
                    case "outside":
                        x = x + F.dropout(layer(x), 0.1, training=False)
                    case _:
                        x = layer.down(F.gelu(layer.up(layer.norm(x)))) + x
        return self.head(x).square().mean()


def planned(style: str, strategy: str) -> tuple[autopar.Plan, Counter[tuple[str, str, str, int]]]:
    """A plan, and what it sends of activations."""
    tokens = torch.zeros(8, 16, dtype=torch.long)
    plan = autopar.plan(Network(style), tokens, mesh=(2, 2), device="h100", strategy=strategy)
    return plan, Counter((c.axis, c.kind, c.where, c.bytes) for c in plan.collectives if ":" in c.value)


@pytest.mark.parametrize("strategy", ["fsdp+tp", "zero1+2d"])
@pytest.mark.parametrize("style", ["outside", "layers of layers"])
def test_sums_outside_of_blocks_are_split_as_those_within(style: str, strategy: str) -> None:
    plan, sent = planned(style, strategy)
    assert sent == planned("in blocks", strategy)[1]
    sums = [layout for name, layout in plan.layouts.items() if "add" in name]
    assert len(sums) == 2 * DEPTH
    assert len(set(sums)) == 1, "each is as the others are"
