"""Training checkpoints that are damaged, hostile or from another training: a clear error, and nothing in them is executed."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, CheckpointError, InputError
from autopar.integrations.training_state import load_training_state, load_weights, save_training_state
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
    with pytest.raises(CheckpointError, match="parts cannot be read"):
        load_weights(parallel, parts)
    assert not mark.exists()


def shortened(folder: Path) -> None:
    for part in folder.glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:-400])


CASES: dict[str, tuple[OptimizerOf, Callable[[Path], object], OptimizerOf, int, type[AutoparError], str]] = {
    "shorter": (one_group, shortened, one_group, 8, CheckpointError, "cannot be read"),
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
