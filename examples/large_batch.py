"""Train with 32 times the batch: LAMB, a rate scaled by the square root of the batch, and warm-up over the first steps.

    pip install -e ".[large-batch]"
    torchrun --nproc-per-node 4 examples/large_batch.py

The same samples in the same number of epochs, first in batches of 16 with AdamW, then in batches of 512 with LAMB, a
thirty-second of the steps. Weights are split over the processes; LAMB's norms are those of whole weights, since it computes
on DTensors. What is printed is the loss over all samples after each training.
"""

from __future__ import annotations

import math
import os

import torch
from timm.optim import Lamb
from torch import nn
from torch.nn import functional

import autopar

SMALL, SCALE, SAMPLES, EPOCHS = 16, 32, 8192, 8
MESH = (int(os.environ.get("WORLD_SIZE", "1")),)


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 16))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(x), target)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
    return x, x.sin()


def train(batch: int, kind: type[torch.optim.Optimizer], rate: float, warm_up: float) -> float:
    """Train by batches of this size; the rate rises over the first `warm_up` of the steps and then falls as a cosine."""
    torch.manual_seed(0)
    x, target = samples()
    parallel = autopar.parallelize(Model(), (x[:batch], target[:batch]), MESH, strategy="fsdp")
    optimizer = kind(parallel.parameters(), lr=rate, weight_decay=0.01)
    steps = EPOCHS * SAMPLES // batch

    def factor(step: int) -> float:
        rising = warm_up * steps
        return (step + 1) / rising if step < rising else 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    order = torch.randperm(SAMPLES).repeat(EPOCHS).split(batch)
    for chosen in order:
        optimizer.zero_grad()
        parallel(x[chosen], target[chosen]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        parts = zip(x.split(batch), target.split(batch), strict=True)
        return sum(float(parallel(*part)) for part in parts) * batch / SAMPLES


def main() -> None:
    losses = {
        f"batches of {SMALL}, AdamW": train(SMALL, torch.optim.AdamW, 2e-3, 0.0),
        f"batches of {SMALL * SCALE}, LAMB with warm-up": train(SMALL * SCALE, Lamb, 2e-3 * math.sqrt(SCALE), 0.2),
        f"batches of {SMALL * SCALE}, AdamW as it was": train(SMALL * SCALE, torch.optim.AdamW, 2e-3, 0.0),
    }
    if os.environ.get("RANK", "0") == "0":
        for name, loss in losses.items():
            print(f"{name}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
