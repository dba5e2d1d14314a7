"""What an elastic run refuses, and its messages; a damaged checkpoint is an error, and a hostile one is not executed."""

from __future__ import annotations

import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar import elastic
from autopar.errors import AutoparError, BudgetError, CheckpointError, ConstraintError, InputError, MeshError
from tests.support.elastic_training import Model, build, logged, train
from tests.support.hostile import Hostile


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(24, 24, generator=torch.Generator().manual_seed(step))
    return x, x.sin()


def step(state: elastic.TrainingState, batch: Any) -> torch.Tensor:
    loss = state.model.step(*batch)
    state.optimizer.step()
    state.optimizer.zero_grad()
    return loss


def trained(folder: Path, **changed: Any) -> elastic.TrainingState:
    asked: dict[str, Any] = {"optimizer": sgd, "data": batch, "steps": 2, "checkpoints": folder, "device": "cpu"}
    given = {"build": build, "train_step": step, **asked, **changed}
    return elastic.run(given.pop("build"), given.pop("train_step"), **given)


WRONG: dict[str, tuple[dict[str, Any], type[AutoparError], str]] = {
    "no loss": ({"train_step": lambda state, batch: None}, InputError, "train_step returned a NoneType, not the loss"),
    "many losses": (
        {"train_step": lambda state, batch: torch.zeros(3)},
        InputError,
        "train_step returned a Tensor of [3], not the loss",
    ),
    "no step": (
        {"train_step": lambda state, batch: state.model.step(*batch)},
        InputError,
        "train_step did not step the optimizer",
    ),
    "no batch": ({"train_step": lambda state: 0.0}, InputError, "train_step cannot be called: too many positional arguments"),
    "build": ({"build": lambda: Model()}, InputError, "build returned a Model, not a module and its sample"),
    "optimizer": ({"optimizer": lambda model: None}, InputError, "optimizer returned a NoneType"),
    "data": ({"data": 3}, InputError, "data is a int, which is neither a loader nor a function"),
    "empty data": ({"data": []}, InputError, "data yields no batch"),
    "steps": ({"steps": 0}, InputError, "steps=0 is not a number of steps"),
    "every": ({"every": True}, InputError, "every=True is not a number of steps"),
    "mesh": ({"mesh": (8,)}, MeshError, "mesh=(8,) is of a fixed size, and the number of ranks is not"),
    "mesh of others": ({"mesh": lambda n: (2,)}, MeshError, "mesh= returned a mesh of 2 devices for 1 process"),
    "plan": ({"plan": None}, ConstraintError, "plan= is not an option of an elastic run, which plans anew"),
    "memory": ({"budget": 2000}, BudgetError, "on 1 process: no plan fits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str, tmp_path: Path) -> None:
    changed, kind, said = WRONG[name]
    with pytest.raises(kind) as raised:
        trained(tmp_path, **changed)
    assert raised.value.what.startswith(said), raised.value.what


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(CheckpointError, match="step-00000002 is of another model") as raised:
        trained(tmp_path, build=lambda: (Model(32), build()[1]), steps=4)
    assert raised.value.details["differs"].startswith("model.body.0.bias: float32 of [48] there, float32 of [32] here")
    with pytest.raises(CheckpointError, match="is of another optimizer") as raised:
        trained(tmp_path, optimizer=lambda model: torch.optim.Adam(model.parameters()), steps=4)
    assert "optimizer.state.body.0.bias.exp_avg" in raised.value.details["missing"]
    deeper = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 1))
    with pytest.raises(CheckpointError, match="is of another model") as raised:
        trained(tmp_path, build=lambda: (deeper, torch.empty(24, 24)), steps=4)
    assert "model.body.0.bias" in raised.value.details["more"]


def cut(folder: Path) -> None:
    part = next(folder.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-400])


def without_rest(folder: Path) -> None:
    (folder / "training.pt").unlink()


def of_garbage(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"not an index")


def hostile_index(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(folder.parent / "ran")))


def hostile_rest(folder: Path) -> None:
    torch.save({"step": 2, "scheduler": Hostile(folder.parent / "ran")}, folder / "training.pt")


@pytest.mark.parametrize("damage", [cut, without_rest, of_garbage, hostile_index, hostile_rest])
def test_a_damaged_checkpoint_is_named_and_the_one_before_can_be_taken(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    trained(tmp_path, every=1)
    damage(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match="step-00000002 is damaged") as raised:
        trained(tmp_path, steps=4)
    assert not (tmp_path / "ran").exists()
    assert "remove" in raised.value.details["fix"]
    assert "weights_only" not in str(raised.value), "which torch advises to switch off"
    shutil.rmtree(tmp_path / "step-00000002")
    assert trained(tmp_path, steps=4).step == 4


def test_bytes_that_were_flipped_are_a_reason_to_take_the_checkpoint_before(tmp_path: Path) -> None:
    trained(tmp_path, every=1)
    for part in (tmp_path / "step-00000002").glob("*.distcp"):
        part.write_bytes(bytes(255 - byte for byte in part.read_bytes()))
    with pytest.raises(CheckpointError, match="step-00000002 cannot be read") as raised:
        trained(tmp_path, steps=4)
    assert raised.value.details["fix"].startswith(f"remove {tmp_path / 'step-00000002'}: the training goes on")


def test_a_random_state_that_no_library_takes_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, every=1)
    file = tmp_path / "step-00000002" / "training.pt"
    rest = torch.load(file)
    rest["host"]["numpy"][1] = rest["host"]["numpy"][1][:-1]
    torch.save(rest, file)
    with pytest.raises(CheckpointError, match="the random state in the checkpoint is damaged"):
        trained(tmp_path, steps=4)


@contextmanager
def files_of(most: int) -> Iterator[None]:
    """No file may be longer: as on a full disk, a write fails in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_the_last_whole_one(tmp_path: Path) -> None:
    trained(tmp_path)
    wide = {"build": lambda: (Model(), build()[1]), "steps": 6, "every": 2}
    with files_of(4096), pytest.raises(CheckpointError, match="the checkpoint of step 4 was not written") as raised:
        trained(tmp_path, **wide)
    assert raised.value.details["error"] == "File too large, on rank 0"
    assert raised.value.details["whole"] == "step-00000002"
    assert {path.name for path in tmp_path.iterdir()} == {"plans", "step-00000000", "step-00000002"}
    assert trained(tmp_path, **wide).step == 6


def test_a_state_that_could_not_be_read_again_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    class Odd(torch.optim.lr_scheduler.LambdaLR):
        def state_dict(self) -> dict[str, Any]:
            return {"model": Model()}

    with pytest.raises(CheckpointError, match="cannot be stored"):
        trained(tmp_path, scheduler=lambda optimizer: Odd(optimizer, lambda step: 1.0))
    assert [path.name for path in tmp_path.iterdir()] == ["plans"]


def test_what_an_earlier_process_left_unfinished_is_removed_and_never_taken(tmp_path: Path) -> None:
    trained(tmp_path)
    for left in (".step-00000009.0123abcd", ".step-00000000.removed", ".step-00000001.removed"):
        shutil.copytree(tmp_path / "step-00000002", tmp_path / left)
    assert trained(tmp_path, steps=3).step == 3
    assert {path.name for path in tmp_path.iterdir()} == {"plans", "step-00000002", "step-00000003"}


def test_a_run_that_was_finished_returns_at_once(tmp_path: Path) -> None:
    train(tmp_path, 3, 2)
    assert train(tmp_path, 3, 2).step == 3
    assert len(logged(tmp_path)) == 3
