"""Save a checkpoint, and resume from it under another plan, on another number of processes.

    torchrun --nproc-per-node 2 examples/checkpoint.py save /tmp/checkpoint
    torchrun --nproc-per-node 4 examples/checkpoint.py resume /tmp/checkpoint      or on one: python examples/checkpoint.py ...

The losses after resuming are those that training without a stop would have had. What is saved is sharded: each process writes
its part, with `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch import fx, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional

import autopar

MESH = (int(os.environ.get("WORLD_SIZE", "1")),)
STEPS = 3
STRATEGY = {"save": "fsdp", "resume": "auto"}


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(x), target)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step, the same on every rank, and in every run."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 16, generator=generator)
    return x, x.sin()


def main(what: str, path: str) -> None:
    """Train the first steps and save, or load and train the next ones."""
    torch.manual_seed(0)
    parallel = autopar.parallelize(Model(), batch(0), MESH, strategy=STRATEGY[what])
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    first = 0
    if what == "resume":
        weights, states = get_state_dict(parallel, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)
        set_state_dict(parallel, optimizer, model_state_dict=weights, optim_state_dict=states)
        first = STEPS
    train(parallel, optimizer, range(first, first + STEPS))
    if what == "save":
        weights, states = get_state_dict(parallel, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)


def train(parallel: fx.GraphModule, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = parallel(*batch(step))
        loss.backward()
        optimizer.step()
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"step {step}  loss {loss.item():.5f}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in STRATEGY:
        sys.exit(__doc__)
    main(*sys.argv[1:])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
