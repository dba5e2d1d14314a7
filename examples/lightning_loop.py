"""Lightning's Trainer over a parallel module, which is made in `configure_model`; every process loads its own samples.

torchrun --nproc-per-node 2 examples/lightning_loop.py /tmp/checkpoint                     needs lightning
"""

from __future__ import annotations

import os
import sys
import warnings

import lightning
import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.integrations.lightning import AutoparStrategy

BATCH = 16
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 8))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(x), target)


class Training(lightning.LightningModule):
    """One parallel module and its optimizer."""

    def __init__(self, data: TensorDataset) -> None:
        super().__init__()
        self.data, self.losses = data, []
        self.net: fx.GraphModule | None = None

    def configure_model(self) -> None:
        """Build this rank's part, once the processes run."""
        if self.net is None:
            self.net = autopar.parallelize(Model(), self.data[:BATCH], (WORLD,), strategy="fsdp", inputs="sharded")

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.net(*self.net.shard(tuple(batch), samples=True))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=BATCH // self.net.data_world)


def main(folder: str) -> None:
    """Train for two epochs, save, and go on for two more in another Trainer."""
    warnings.filterwarnings("ignore", category=UserWarning)  # of the library, on loaders without workers
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    data = TensorDataset(x, x.sin())
    options = {"accelerator": "cpu", "devices": WORLD, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    for epochs in (2, 4):
        training = Training(data)
        trainer = lightning.Trainer(strategy=AutoparStrategy(), max_epochs=epochs, gradient_clip_val=1.0, **options, **quiet)
        trainer.fit(training, ckpt_path=folder if epochs > 2 else None)
        trainer.save_checkpoint(folder)
        if trainer.is_global_zero:
            print("losses", " ".join(f"{loss:.6f}" for loss in training.losses))


if __name__ == "__main__":
    main(sys.argv[1])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
