"""Train in micro-batches: a step takes the batch in parts, so that the activations of only one part are alive.

    torchrun --nproc-per-node 2 examples/microbatches.py    on two processes
    python examples/microbatches.py                         on one device

Losses and gradients are those of the whole batch, though the targets that count are spread unevenly over the parts.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn import functional

import autopar

MESH = (int(os.environ.get("WORLD_SIZE", "1")),)


class Model(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.body(x), labels, ignore_index=-100)


def main() -> None:
    """One step of the whole batch and one of its four parts, from the same weights."""
    torch.manual_seed(0)
    model = Model()
    batch = torch.randn(1024, 16), torch.randint(10, (1024,))
    batch[1][:250] = -100  # the first part has hardly a label

    whole = autopar.parallelize(model, batch, MESH)
    loss = whole(*batch)
    loss.backward()

    parts = autopar.parallelize(model, batch, MESH, microbatches=4)  # or "auto": as many as are best within the budget
    summed = parts.step(*batch)  # forward and backward of each part in turn; gradients add up in .grad

    if int(os.environ.get("RANK", "0")) == 0:
        peaks = [module.autopar.plan.peak_memory / 2**20 for module in (whole, parts)]
        print(f"loss  whole {loss.item():.6f}  in parts {summed.item():.6f}")
        print(f"peak memory  whole {peaks[0]:.2f} MiB  in parts {peaks[1]:.2f} MiB")
    difference = max(float((plain(a) - plain(b)).abs().max()) for a, b in zip(grads(whole), grads(parts), strict=True))
    if difference > 1e-6:
        raise SystemExit(f"gradients differ by {difference:.1e}")


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of one that may be sharded; every rank asks."""
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
