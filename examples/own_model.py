"""A model of one's own, with the loss inside of forward and outside of it.

    torchrun --nproc-per-node 2 examples/own_model.py       on two processes
    python examples/own_model.py                            on one device, without a process group

Both ways train alike. Inside, the loss is part of the graph: outputs beside it may stay sharded, and it is planned too.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn import functional

import autopar

MESH = (int(os.environ.get("WORLD_SIZE", "1")),)
STEPS = 3


class Scores(nn.Module):
    """Returns scores: no scalar, so they come back whole, and any loss may be computed from them."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class WithLoss(nn.Module):
    """The same with its loss: what of the batch is not labelled is ignored, and the mean is over all that is."""

    def __init__(self, scores: nn.Module) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.scores(x), labels, ignore_index=-100)


def main() -> None:
    """Train both, from the same weights on the same batches."""
    torch.manual_seed(0)  # the same batches on every rank: the batch is global, and whole on each
    model = Scores()
    x, labels = torch.randn(32, 16), torch.randint(10, (32,))
    labels[:5] = -100

    inside = autopar.parallelize(WithLoss(model), (x, labels), MESH)
    outside = autopar.parallelize(model, x, MESH)  # both start from the model's weights, which stay as they are
    optimizers = [torch.optim.AdamW(parallel.parameters(), lr=1e-2) for parallel in (inside, outside)]
    for step in range(STEPS):
        losses = (inside(x, labels), functional.cross_entropy(outside(x), labels, ignore_index=-100))
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"step {step}  loss inside {losses[0].item():.5f}  outside {losses[1].item():.5f}")


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
