"""A training loop with Hugging Face accelerate: `prepare` takes a parallel module, and every process loads its own samples.

torchrun --nproc-per-node 2 examples/accelerate_loop.py                   needs accelerate and safetensors
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.integrations.accelerate import Accelerator

BATCH = 16


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(x), target)


def main() -> None:
    """Train for three epochs, in steps of two batches."""
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    data = TensorDataset(x, x.sin())
    mesh = (int(os.environ.get("WORLD_SIZE", "1")),)
    parallel = autopar.parallelize(Model(), data[:BATCH], mesh, inputs="sharded")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=BATCH // parallel.data_world, shuffle=True)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    parallel, optimizer, loader = accelerator.prepare(parallel, optimizer, loader)
    for epoch in range(3):
        for samples in loader:
            with accelerator.accumulate(parallel):
                loss = parallel(*samples)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(parallel.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
