"""Train so that processes may leave and come: start it again, on any number of processes, and it goes on where it was.

torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py /tmp/elastic             a killed process is started again
torchrun --nproc-per-node 4 --max-restarts 3 examples/elastic.py /tmp/elastic             goes on on four

torchrun --nnodes 1:4 --nproc-per-node 2 --max-restarts 9 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/elastic.py ...
                                                                on each node: the others go on when one leaves or comes
"""

from __future__ import annotations

import logging
import os
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from autopar import elastic

STEPS, BATCH = 20, 24


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(x), target)


def build() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The model, and a sample of its global batch."""
    torch.manual_seed(0)
    return Model(), (torch.empty(BATCH, 16), torch.empty(BATCH, 16))


def data() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Global batches, the same on every rank: the order is that of rank 0's generator."""
    x = torch.randn(240, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sin()), BATCH, shuffle=True)


def train_step(state: elastic.TrainingState, batch: object) -> torch.Tensor:
    """One step, as in any loop."""
    x, target = batch  # type: ignore[misc]
    state.optimizer.zero_grad()
    loss = state.model.step(x, target)  # forward and backward of each micro-batch
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    state.optimizer.step()
    if state.scheduler is not None:
        state.scheduler.step()
    if os.environ.get("RANK", "0") == "0":
        print(f"step {state.step}  loss {loss.item():.5f}", flush=True)
    return loss


def main(folder: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("autopar").setLevel(logging.INFO)  # says from which step it goes on, and what is saved
    elastic.run(
        build,
        train_step,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        data=data(),
        steps=STEPS,
        checkpoints=folder,
        every=5,
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
