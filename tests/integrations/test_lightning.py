"""Lightning's Trainer over a parallel module: the losses of a loop on one process, also after a checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grads
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar
from autopar.errors import InputError
from autopar.integrations.lightning import AutoparStrategy, grad_norm
from autopar.runtime.workers import WorkerPool
from tests.integrations.launched import launched

BATCH, STEPS = 8, 3
X = torch.randn(BATCH * STEPS, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sin())
STAGES = {"pipeline": "axis0", "stages": 2, "microbatches": 2}


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 6)) for _ in range(2))
        self.body = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(x), y)


class Training(lightning.LightningModule):
    """What a user writes."""

    def __init__(self, dropout: float, strategy: str) -> None:
        super().__init__()
        self.dropout, self.strategy, self.losses = dropout, strategy, []
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            model, mesh = Net(self.dropout), (dist.get_world_size(),)
            how = STAGES if self.strategy == "stages" else {"strategy": self.strategy}
            self.net = autopar.parallelize(model, DATA[:BATCH], mesh, inputs="sharded", device="h100", **how)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        assert self.net is not None
        loss = self.net(*self.net.shard(tuple(batch), samples=True))
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch: list[torch.Tensor]) -> None:
        assert self.net is not None
        self.losses.append(self.net.gather(self.net(*self.net.shard(tuple(batch), samples=True))).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader[object]:
        assert self.net is not None
        return DataLoader(DATA, batch_size=BATCH // self.net.data_world)


def trained(dropout: float, strategy: str, epochs: int, load: Path | None = None, save: Path | None = None) -> list[float]:
    """The losses of a fit, and of a test behind it if nothing is saved."""
    module = Training(dropout, strategy)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=AutoparStrategy(), max_epochs=epochs, gradient_clip_val=0.1, **options
    )
    trainer.fit(module, ckpt_path=load and str(load))
    if save:
        trainer.save_checkpoint(save)
    else:
        trainer.test(module, module.train_dataloader(), verbose=False)
    return module.losses


def fitted(folder: Path) -> tuple[list[list[float]], list[list[float]]]:
    """Losses without dropout under three strategies; and with it, without a stop and with one, in parts, stages and whole."""
    launched()
    warnings.simplefilter("ignore")
    plain = [trained(0.0, strategy, 2) for strategy in ("fsdp", "megatron", "stages")]
    stopped = []
    for strategy in ("fsdp", "stages", "ddp"):
        saved = folder / strategy
        resumed = trained(0.5, strategy, 1, save=saved) + trained(0.5, strategy, 2, load=saved)
        stopped += [trained(0.5, strategy, 2), resumed]
    return plain, stopped


def expected(shares: int) -> list[float]:
    """The losses of a plain loop over the batches of the library's sampler, which shuffles in training, and of a test."""
    model, losses = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(2 * STEPS):
        batch: list[int] = []
        for rank in range(shares):
            sampler = DistributedSampler(DATA, num_replicas=shares, rank=rank)
            sampler.set_epoch(step // STEPS)
            own = BATCH // shares
            batch += [*sampler][step % STEPS * own :][:own]
        loss = model(*DATA[batch])
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    own = BATCH // shares
    for first in range(0, len(DATA) // shares, own):
        parts = [[*DistributedSampler(DATA, num_replicas=shares, rank=rank, shuffle=False)] for rank in range(shares)]
        losses.append(model(*DATA[[sample for part in parts for sample in part[first : first + own]]]).item())
    return losses


def test_fits_and_tests_have_the_losses_of_one_process_and_resume_with_their_dropout(pool: WorkerPool, tmp_path: Path) -> None:
    for plain, stopped in pool.run(f"{__name__}:fitted", tmp_path, ranks=2):  # type: ignore[misc]
        assert plain == [pytest.approx(expected(shares), rel=1e-4) for shares in (2, 1, 1)]
        for without, resumed in zip(stopped[::2], stopped[1::2], strict=True):
            assert len(without) == 3 * STEPS
            assert resumed == pytest.approx(without, rel=1e-6)
    for strategy in ("fsdp", "stages"):  # as docs/integrations.md says
        dcp_to_torch_save(tmp_path / strategy, tmp_path / "weights.pt")
        plain = Training(0.5, strategy)
        plain.net = Net(0.5)  # type: ignore[assignment]
        plain.load_state_dict(torch.load(tmp_path / "weights.pt")["state_dict"])


def restored(folder: Path) -> list[list[float]]:
    """The losses of tests behind a fit, and by its weights alone."""
    launched()
    warnings.simplefilter("ignore")
    found = []
    for strategy in ("fsdp", "ddp"):
        module = Training(0.0, strategy)
        saver = ModelCheckpoint(folder / strategy, save_weights_only=True, save_last=True)
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "callbacks": [saver]}
        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=AutoparStrategy(), max_epochs=1, **options)
        trainer.fit(module)
        for path in (None, saver.last_model_path):
            module.losses.clear()
            trainer.test(module, module.train_dataloader(), ckpt_path=path, verbose=False)
            found.append([*module.losses])
    return found


def test_weights_alone_are_restored_behind_a_fit(pool: WorkerPool, tmp_path: Path) -> None:
    for found in pool.run(f"{__name__}:restored", tmp_path, ranks=2):
        for behind, again in zip(found[::2], found[1::2], strict=True):  # type: ignore[index]
            assert len(behind) == STEPS
            assert again == pytest.approx(behind, rel=1e-6)


def swept(folder: Path) -> list[list[float]]:
    """The losses of a fit behind a sweep of learning rates, with that of the sweep's first step before them."""
    launched()
    warnings.simplefilter("ignore")
    found = []
    for strategy in ("fsdp", "stages"):
        module = Training(0.0, strategy)
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=AutoparStrategy(), max_epochs=1, gradient_clip_val=0.1, **options
        )
        Tuner(trainer).lr_find(
            module, num_training=STEPS, min_lr=1e-3, max_lr=0.1, update_attr=False, early_stop_threshold=None
        )
        (first, *more), module.losses = module.losses, []
        assert more
        trainer.fit(module)
        found.append([first, *module.losses])
    return found


def test_a_sweep_of_learning_rates_leaves_the_weights_as_they_were(pool: WorkerPool, tmp_path: Path) -> None:
    for found in pool.run(f"{__name__}:swept", tmp_path, ranks=2):
        for shares, (first, *losses) in zip((2, 1), found, strict=True):  # type: ignore[call-overload]
            whole = expected(shares)[:STEPS]
            assert [first, *losses] == pytest.approx([whole[0], *whole], rel=1e-4)


def norms(asked: tuple[str, float | str]) -> dict[str, float]:
    """The norms of gradients of a parallel module."""
    strategy, kind = asked
    module = autopar.parallelize(Net(), DATA[:BATCH], (2,), strategy=strategy, device="h100")
    module(*DATA[:BATCH]).backward()
    return {name: float(norm) for name, norm in grad_norm(module, kind).items()}


@pytest.mark.parametrize("kind", [2, "inf"])
def test_norms_of_split_gradients_are_those_that_the_library_has_of_one_process(pool: WorkerPool, kind: float | str) -> None:
    """Its own ends in an error: it makes a tensor of DTensors."""
    model = Net()
    model(*DATA[:BATCH]).backward()
    expected = {name: pytest.approx(float(norm), rel=1e-5) for name, norm in grads.grad_norm(model, kind).items()}
    for strategy in ("fsdp", "megatron"):
        assert pool.run(f"{__name__}:norms", (strategy, kind), ranks=2, keep=True) == [expected, expected]
    for wrong in ("x", 0, -1.0, float("nan")):
        with pytest.raises(InputError, match=r"norm_type=.* is no norm"):
            grad_norm(model, wrong)


def test_a_lightning_module_without_a_parallel_one_is_refused() -> None:
    strategy = AutoparStrategy()
    strategy._lightning_module = lightning.LightningModule()
    with pytest.raises(InputError, match="LightningModule has no parallel module"):
        _ = strategy.parallel


def with_fabric(folder: Path) -> tuple[list[float], float]:
    """The losses of a loop that saves behind its first epoch, of its second one when that is loaded, and of weights alone."""
    launched()
    losses = []
    for load in (False, True):
        strategy = ModelParallelStrategy(parallelize_fn=lambda module, mesh: module)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        parallel = fabric.setup_module(autopar.parallelize(Net(), DATA[:BATCH], (2,), strategy="fsdp", device="h100"))
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(parallel.parameters(), lr=0.05))
        loader = fabric.setup_dataloaders(DataLoader(DATA, batch_size=BATCH), use_distributed_sampler=False)
        state = {"model": parallel, "optimizer": optimizer, "epoch": 0}
        if load:
            fabric.load(folder / "saved", state)
        for epoch in range(state["epoch"], 2):
            for step, batch in enumerate(loader):
                with fabric.no_backward_sync(parallel, enabled=not step):
                    loss = parallel(*batch)
                    fabric.backward(loss)
                losses.append(loss.item())
                if step:
                    fabric.clip_gradients(parallel, optimizer, max_norm=0.1)
                    optimizer.step()
                    optimizer.zero_grad()
            if not load and not epoch:
                fabric.save(folder / "saved", {**state, "epoch": 1})
    if not dist.get_rank():
        torch.save(Net().state_dict(), folder / "raw.pt")
    fabric.barrier()
    fabric.load_raw(folder / "raw.pt", parallel)
    return losses, parallel(*DATA[:BATCH]).item()


def test_fabric_trains_saves_and_loads_a_parallel_module(pool: WorkerPool, tmp_path: Path) -> None:
    model, losses = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(2 * STEPS):
        first = step % STEPS * BATCH
        loss = model(*DATA[first : first + BATCH])
        loss.backward()
        losses.append(loss.item())
        if step % STEPS:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for found, raw in pool.run(f"{__name__}:with_fabric", tmp_path, ranks=2):  # type: ignore[misc]
        assert found[: 2 * STEPS] == pytest.approx(losses, rel=1e-5)
        assert found[2 * STEPS :] == pytest.approx(losses[STEPS:], rel=1e-5)
        assert raw == pytest.approx(losses[0], rel=1e-5)
