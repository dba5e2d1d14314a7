"""A restarted training sees the batches that it would have seen, whatever its loader draws from; unused parameters have no
optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from autopar import elastic
from autopar.elastic.batches import Data
from tests.support.elastic_training import BATCH, FEATURES, Model, samples

EPOCH = 5  # steps


class PartlyUsed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.left_out = nn.Linear(FEATURES, 2)


def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return PartlyUsed(), (torch.empty(BATCH, FEATURES), torch.empty(BATCH, FEATURES))


def own() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], Data]] = {
    "the host's generators": lambda: DataLoader(samples(), BATCH, shuffle=True),
    "its own": lambda: DataLoader(samples(), BATCH, shuffle=True, generator=own()),
    "its sampler's": lambda: DataLoader(samples(), BATCH, sampler=RandomSampler(samples(), generator=own())),
    "the host's, with workers that stay": lambda: DataLoader(
        samples(), BATCH, shuffle=True, num_workers=1, persistent_workers=True
    ),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "without a state": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


def losses(folder: Path, steps: int, loader: str, optimizer: str) -> list[float]:
    """The losses of the steps that were left."""
    found: list[float] = []

    def train_step(state: elastic.TrainingState, batch: Any) -> torch.Tensor:
        state.optimizer.zero_grad()
        loss = state.model.step(*batch)
        state.optimizer.step()
        found.append(loss.item())
        return loss

    given = {"optimizer": OPTIMIZERS[optimizer], "data": LOADERS[loader](), "steps": steps, "every": 20}
    state = elastic.run(build, train_step, checkpoints=folder, device="cpu", **given)  # type: ignore[arg-type]
    assert not any(state.optimizer.state.get(one) for one in state.model.left_out.parameters()), "none had a gradient"
    return found


CASES = [*((name, "AdamW") for name in LOADERS), ("its own", "without a state")]


@pytest.mark.parametrize("loader, optimizer", CASES)
def test_a_run_that_was_stopped_in_an_epoch_has_the_losses_of_one_that_was_not(
    tmp_path: Path, loader: str, optimizer: str
) -> None:
    whole = losses(tmp_path / "whole", 3 * EPOCH, loader, optimizer)
    parts = [losses(tmp_path / "parts", steps, loader, optimizer) for steps in (EPOCH + 2, 3 * EPOCH)]
    assert [*parts[0], *parts[1]] == whole
