"""Slightly binding budgets: plans keep them when they run, and none is refused that a narrower recompute policy would keep."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.verify.testing import peak


class Classifier(nn.Module):
    """Whose gradients are much of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU())))
        self.head = nn.Linear(128, 1000)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.net(x)), y)


@pytest.mark.parametrize("part", [0.97, 0.93])
def test_gradients_of_earlier_micro_batches_are_within_the_budget(part: float) -> None:
    model, batch = Classifier(), (torch.randn(512, 128), torch.randint(1000, (512,)))
    whole = autopar.plan(model, batch, (1,), device="cpu", microbatches=2)
    plan = autopar.plan(model, batch, (1,), device="cpu", microbatches=2, budget=int(part * whole.peak_memory))
    parallel = autopar.parallelize(model, batch, (1,), plan=plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), foreach=False)

    def step() -> None:
        parallel.step(*batch)
        optimizer.step()
        optimizer.zero_grad()

    found = peak(parallel, optimizer, batch, step).bytes
    assert found == pytest.approx(plan.peak_memory, rel=0.002)
    assert found <= part * whole.peak_memory


class Sentences(nn.Module):
    """A whole encoder under one index of a container, so that its layers are one region."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.1, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.net = nn.Sequential(nn.Embedding(100, 64), encoder, nn.Linear(64, 100))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten())


@pytest.mark.parametrize("part", [0.9, 0.6])
def test_what_fits_by_a_narrower_recompute_policy_is_planned(part: float) -> None:
    model, batch = Sentences(), (torch.randint(100, (16, 64)),) * 2
    budget = int(part * autopar.plan(model, batch, (1,), device="cpu").peak_memory)
    plan = autopar.plan(model, batch, (1,), device="cpu", budget=budget)
    assert plan.peak_memory <= budget
    narrow = autopar.plan(model, batch, (1,), device="cpu", budget=budget, recompute="selective")
    assert plan.step_time <= narrow.step_time * (1 + 1e-9)
