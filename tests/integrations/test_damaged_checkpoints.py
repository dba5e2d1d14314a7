"""Training checkpoints that are damaged, hostile or from another training: a clear error, and nothing in them is executed."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError, CheckpointError, InputError
from autopar.integrations.training_state import load_training_state, load_weights, save_training_state
from autopar.runtime.checkpoint_files import ReplacingWriter
from autopar.runtime.workers import WorkerPool
from tests.support.hostile import Hostile

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def one_group(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def two_groups(module: nn.Module) -> torch.optim.Optimizer:
    kinds = [[one for one in module.parameters() if (one.ndim == 1) == vectors] for vectors in (False, True)]
    return torch.optim.AdamW([{"params": kinds[0], "weight_decay": 0.3}, {"params": kinds[1]}], lr=0.01)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def made(optimizer: OptimizerOf, width: int = 8) -> tuple[autopar.ParallelModule, torch.optim.Optimizer]:
    parallel = autopar.parallelize(Net(width), X, (1,))
    return parallel, optimizer(parallel)


def saved(folder: Path, optimizer: OptimizerOf, **options: object) -> None:
    """The state after a step, with more options in a group of the optimizer."""
    parallel, own = made(optimizer)
    parallel(X).backward()
    own.step()
    own.param_groups[0].update(options)
    save_training_state(parallel, [own], folder)


def test_no_index_and_no_entry_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    mark, parts = tmp_path / "ran", tmp_path / "parts"
    saved(parts, one_group, foreach=Hostile(mark))
    mark.unlink(missing_ok=True)  # of the one that was saved
    parallel, optimizer = made(one_group)
    with pytest.raises(CheckpointError, match="parts cannot be read"):
        load_training_state(parallel, [optimizer], parts)
    assert not mark.exists()
    (parts / ".metadata").write_bytes(pickle.dumps(Hostile(mark)))
    with pytest.raises(CheckpointError, match="parts is damaged") as raised:
        load_training_state(parallel, [optimizer], parts)
    assert "it names" in raised.value.details["error"]
    with pytest.raises(CheckpointError, match="parts is damaged"):
        load_weights(parallel, parts)
    assert not mark.exists()


def shortened(folder: Path) -> None:
    for part in folder.glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:-400])


CASES: dict[str, tuple[OptimizerOf, Callable[[Path], object], OptimizerOf, int, type[AutoparError], str]] = {
    "shorter": (one_group, shortened, one_group, 8, CheckpointError, "is damaged(.|\n)*distcp is shorter than"),
    "without an index": (
        one_group,
        lambda folder: (folder / ".metadata").unlink(),
        one_group,
        8,
        CheckpointError,
        "is damaged",
    ),
    "gone": (one_group, shutil.rmtree, one_group, 8, CheckpointError, "is not there"),
    "another width": (one_group, Path.exists, one_group, 9, CheckpointError, "cannot be read"),
    "another optimizer": (one_group, Path.exists, momentum, 8, CheckpointError, "cannot be read"),
    "one group into two": (one_group, Path.exists, two_groups, 8, CheckpointError, "cannot be read"),
    "two groups into one": (two_groups, Path.exists, one_group, 8, InputError, "no group of parameters that was saved has"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_that_does_not_fit_is_named(tmp_path: Path, name: str) -> None:
    before, damage, after, width, kind, said = CASES[name]
    folder = tmp_path / "parts"
    saved(folder, before)
    damage(folder)
    parallel, optimizer = made(after, width)
    with pytest.raises(kind, match=said):
        load_training_state(parallel, [optimizer], folder)


def test_a_checkpoint_that_fits_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path, two_groups)
    parallel, optimizer = made(two_groups)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    load_training_state(parallel, [optimizer], tmp_path)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.01]
    assert all(optimizer.state[one]["step"] == 1 for one in parallel.parameters())


def weights_of(parallel: nn.Module) -> list[list[float]]:
    return [whole(one).flatten().tolist() for one in parallel.parameters()]


def whole(one: torch.Tensor) -> torch.Tensor:
    return (one.full_tensor() if isinstance(one, DTensor) else one).detach()


def failed(case: tuple[Path, bool]) -> tuple[str, list[str], list[list[float]], list[list[float]], int]:
    """The error of a second save into a folder, during which the disk of the last rank is full, and the files there; the
    weights of the first save, those that are loaded, and how many files there are after a third save.

    `killed`: nobody clears up, as after a process that is killed.
    """
    folder, killed = case
    world, rank = dist.get_world_size(), dist.get_rank()
    parallel = autopar.parallelize(Net(), X, (world,), device="h100", strategy="fsdp")
    optimizer = one_group(parallel)

    def step() -> None:
        parallel(X).backward()
        optimizer.step()
        optimizer.zero_grad()

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    step()
    save_training_state(parallel, [optimizer], folder)
    first = weights_of(parallel)
    step()
    with pytest.MonkeyPatch.context() as patch:
        if rank == world - 1:
            patch.setattr(ReplacingWriter, "write_data", full)
        if killed:
            patch.setattr(ReplacingWriter, "discard", lambda self: None)
        with pytest.raises(CheckpointError) as raised:
            save_training_state(parallel, [optimizer], folder)
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    load_training_state(parallel, [optimizer], folder)
    loaded = weights_of(parallel)
    save_training_state(parallel, [optimizer], folder)
    dist.barrier()
    return str(raised.value), left, first, loaded, len(list(folder.iterdir()))


@pytest.mark.parametrize("killed", [False, True])
def test_an_older_state_counts_until_all_of_the_next_is_written(pool: WorkerPool, tmp_path: Path, killed: bool) -> None:
    for said, left, first, loaded, files in pool.run(f"{__name__}:failed", (tmp_path, killed), ranks=2):  # type: ignore[misc]
        assert "was not written" in said
        assert "No space left on device, on rank 1" in said
        assert loaded == first
        assert len(left) == (4 if killed else 3)  # the index, and the parts of two ranks
        assert files == 3
