"""A run stopped within an epoch and resumed at a step has the losses of an uninterrupted one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.errors import InputError
from autopar.integrations.training_state import load_training_state, save_training_state
from autopar.runtime.workers import WorkerPool
from tests.support import pipeline_checkpoints

BATCH, EPOCH, END = 4, 5, 12  # samples, and steps
X = torch.randn(BATCH * EPOCH + 2, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sin())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(x), y)


class Training:
    """A loop over shuffled samples with dropout, a schedule and a loss scale, from one step to another."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.parallel = autopar.parallelize(Net(), DATA[:BATCH], (2,), device="h100", strategy="fsdp", inputs="sharded")
        self.optimizer = torch.optim.AdamW(self.parallel.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, END)
        self.scaler = autopar.GradScaler(self.parallel, init_scale=64.0, growth_interval=3)
        self.sampler = self.parallel.sampler(DATA, shuffle=True, seed=1)

    @property
    def small(self) -> dict[str, dict[str, object]]:
        """What every rank has alike."""
        return {"schedule": self.schedule.state_dict(), "scaler": self.scaler.state_dict()}

    def run(self, first: int, last: int) -> Iterator[float]:
        """The losses of these steps, and the loss scale behind them."""
        self.sampler.start(first // EPOCH, first % EPOCH)
        loader, step = DataLoader(DATA, batch_sampler=self.sampler), first
        while step < last:
            for samples in loader:
                if step == last:
                    break
                loss = self.parallel(*self.parallel.shard(samples, samples=True))
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.schedule.step()
                self.optimizer.zero_grad()
                step += 1
                yield loss.item()
            self.sampler.set_epoch(step // EPOCH)
        yield self.scaler.get_scale()


def stopped(case: tuple[Path, int]) -> tuple[list[float], ...]:
    """The losses of a run without a stop, of one that was saved at a step, and of one that resumed there in another module."""
    folder, step = case
    without = [*Training(0).run(0, END)]
    before = Training(0)
    kept = [*before.run(0, step)][:-1]
    save_training_state(before.parallel, [before.optimizer], folder)
    torch.save(before.small, folder / f"small_{torch.distributed.get_rank()}.pt")
    after = Training(99)
    load_training_state(after.parallel, [after.optimizer], folder)
    small = torch.load(folder / f"small_{torch.distributed.get_rank()}.pt")
    after.schedule.load_state_dict(small["schedule"])
    after.scaler.load_state_dict(small["scaler"])
    return without, kept + [*before.run(step, END)], kept + [*after.run(step, END)]


@pytest.mark.parametrize("step", [7, 0])
def test_a_run_resumes_at_a_step_with_dropout_schedule_and_scale(pool: WorkerPool, tmp_path: Path, step: int) -> None:
    """Within an epoch; before the first step, which torch makes an optimizer count that is asked for its state."""
    for without, *others in pool.run(f"{__name__}:stopped", (tmp_path, step), ranks=2):  # type: ignore[misc]
        for losses in others:
            assert len(losses) == END + 1
            assert losses == pytest.approx(without, rel=1e-6)


def test_the_state_of_lbfgs_is_refused(tmp_path: Path) -> None:
    parallel = autopar.parallelize(Net(), DATA[:BATCH], (1,))
    for change in (save_training_state, load_training_state):
        with pytest.raises(InputError, match="LBFGS is not saved in parts"):
            change(parallel, [torch.optim.LBFGS(parallel.parameters())], tmp_path)


class Kept(torch.optim.SGD):
    """Steps with another rate than `lr`, and keeps what it is told to."""

    def __init__(self, parameters: object, **kept: object) -> None:
        super().__init__(parameters, lr=0.1)  # type: ignore[arg-type]
        self.kept = kept

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.9)
            self.state[parameter].update(self.kept) if self.kept else None


def test_saving_and_loading_without_a_state_change_no_weights(tmp_path: Path) -> None:
    parallel = autopar.parallelize(Net(), DATA[:BATCH], (1,))
    optimizer = Kept(parallel.parameters())
    before = {name: tensor.clone() for name, tensor in parallel.state_dict().items()}
    save_training_state(parallel, [optimizer], tmp_path)
    torch.testing.assert_close(dict(parallel.state_dict()), before, rtol=0, atol=0)
    load_training_state(parallel, [optimizer], tmp_path)
    torch.testing.assert_close(dict(parallel.state_dict()), before, rtol=0, atol=0)


def test_a_state_is_loaded_where_gradients_are(tmp_path: Path) -> None:
    states = []
    for load in (False, True):
        parallel = autopar.parallelize(Net(), DATA[:BATCH], (1,))
        optimizer = torch.optim.AdamW(parallel.parameters())
        parallel(*DATA[:BATCH]).backward()
        gradients = [parameter.grad for parameter in parallel.parameters()]
        if load:
            load_training_state(parallel, [optimizer], tmp_path)
            assert all(one.grad is gradient for one, gradient in zip(parallel.parameters(), gradients, strict=True))
        else:
            optimizer.step()
            save_training_state(parallel, [optimizer], tmp_path)
        states.append(optimizer.state_dict()["state"])
    assert states[0]
    torch.testing.assert_close(states[1], states[0])


def test_text_in_a_state_is_refused(tmp_path: Path) -> None:
    parallel = autopar.parallelize(Net(), DATA[:BATCH], (1,))
    optimizer = Kept(parallel.parameters(), phase="warm")
    optimizer.step()
    with pytest.raises(InputError, match=r"state of body\.0\.weight has text, which torch cannot load"):
        save_training_state(parallel, [optimizer], tmp_path)


def test_an_epoch_goes_on_after_the_batches_that_it_has() -> None:
    sampler = autopar.parallelize(Net(), DATA[:BATCH], (1,)).sampler(DATA, shuffle=True)
    sampler.set_epoch(1)
    whole = [*sampler]
    sampler.start(1, 2)
    assert [[*sampler], [*sampler]] == [whole[2:], whole]
    with pytest.raises(InputError, match="an epoch has 5 batches, and cannot go on after 6"):
        sampler.start(0, 6)


def grouped(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW with settings for positions, of which a rank without the first stage has none, for vectors, and for the rest."""
    kinds: list[list[nn.Parameter]] = [[], [], []]
    for name, parameter in module.named_parameters():
        kinds[0 if "wpe" in name else 1 if parameter.ndim == 1 else 2].append(parameter)
    settings = ({"lr": 3 * lr}, {"weight_decay": 0.0}, {"weight_decay": 5 * lr})
    return torch.optim.AdamW([{"params": own, **one} for own, one in zip(kinds, settings, strict=True)], lr=lr)


def of_other_stages(case: tuple[bool, Path]) -> tuple[list[float], list[float]]:
    """Losses of the user's module, and of one in two stages that is saved after a step and goes on in four.

    The optimizer that goes on has other settings than the one that was saved.
    """
    tied, folder = case
    torch.manual_seed(0)
    model, sample = pipeline_checkpoints.model(tied=tied).double().eval(), pipeline_checkpoints.batch()
    options = {"mesh": {"pp": 2}, "device": "h100", "pipeline": "pp"}
    first = autopar.parallelize(model, sample, stages=2, microbatches=2, schedule="1f1b", **options)
    second = autopar.parallelize(model, sample, stages=4, microbatches=4, schedule="interleaved", **options)
    optimizers = [grouped(module, 1e-3 if module is second else 1e-2) for module in (model, first, second)]
    own, staged = [], []
    for step in range(3):
        loss = model(**sample).loss
        loss.backward()
        own.append(float(loss))
        staged.append(float((second if step else first).step(**sample)))
        for optimizer in optimizers if step else optimizers[:2]:
            optimizer.step()
            optimizer.zero_grad()
        if not step:
            save_training_state(first, optimizers[1:2], folder)
            load_training_state(second, optimizers[2:], folder)
    return own, staged


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_in_stages_goes_on_in_others(pool: WorkerPool, tmp_path: Path, tied: bool) -> None:
    for own, staged in pool.run(f"{__name__}:of_other_stages", (tied, tmp_path), ranks=2):  # type: ignore[misc]
        assert staged == pytest.approx(own, rel=1e-12)
