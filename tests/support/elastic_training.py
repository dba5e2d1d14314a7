"""A small training for the tests of elastic runs: what it trains, and what it records of every step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from autopar import elastic

BATCH = FEATURES = 24  # what 8, 6 and 4 divide
SAMPLES = 120  # an epoch of five steps


class Model(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, FEATURES))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(x), target)


def samples() -> TensorDataset:
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, x.sin())


def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Model(), (torch.empty(BATCH, FEATURES), torch.empty(BATCH, FEATURES))


def train(folder: Path, steps: int, every: int, **options: object) -> elastic.TrainingState:
    """Train in a folder; rank 0 writes step, loss, rate and world down, a line for each step that it has taken."""
    log = folder / "log.jsonl"

    def train_step(state: elastic.TrainingState, batch: object) -> torch.Tensor:
        state.optimizer.zero_grad()
        x, target = batch  # type: ignore[misc]
        noise = 0.01 * torch.randn(x.shape)  # of the host's generator, as augmentation is
        loss = state.model.step(x + noise, target)
        state.optimizer.step()
        assert state.scheduler is not None
        rate = state.scheduler.get_last_lr()[0]
        state.scheduler.step()
        if os.environ.get("RANK", "0") == "0":
            line = {"step": state.step, "loss": loss.item(), "rate": rate, "world": int(os.environ.get("WORLD_SIZE", "1"))}
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return loss

    given: dict[str, object] = {"keep": 2, "device": "cpu", "strategy": "fsdp", **options}  # so that all is split
    return elastic.run(
        build,
        train_step,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        data=DataLoader(samples(), BATCH, shuffle=True),
        steps=steps,
        every=every,
        checkpoints=folder / "checkpoints",
        **given,  # type: ignore[arg-type]
    )


def logged(folder: Path) -> list[Mapping[str, float]]:
    """The steps that were taken, in the order of time; a line that was cut by a kill is none."""
    lines = (folder / "log.jsonl").read_text().splitlines() if (folder / "log.jsonl").exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]
