"""What optimizers keep, and how their parameters are grouped: a resumed run has the losses of an unbroken one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar import elastic
from autopar.errors import CheckpointError, InputError
from autopar.runtime.workers import WorkerPool
from tests.support.elastic_training import Model, build

Groups = list[dict[str, Any]]
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


class Decayed(torch.optim.Optimizer):
    """Keeps no state, and its steps change weights without gradients and without `lr`."""

    def __init__(self, parameters: object, **settings: object) -> None:
        super().__init__(parameters, {"eta": 0.05, "decay": 0.1, **settings})  # type: ignore[arg-type]

    def keep(self, parameter: nn.Parameter) -> None:
        """Keep what this class of optimizers does."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.keep(parameter)
                    parameter.add_(parameter.grad + group["decay"] * parameter, alpha=-group["eta"])


class Keeping(Decayed):
    """Keeps something of each parameter, which is a function of the number of its steps."""

    def __init__(self, parameters: object, kept: Callable[[nn.Parameter, int], object]) -> None:
        super().__init__(parameters)
        self.kept = kept

    def keep(self, parameter: nn.Parameter) -> None:
        own = self.state[parameter]
        own["count"] = own.get("count", 0) + 1
        own["kept"] = self.kept(parameter, own["count"])


def keeping(kept: Callable[[nn.Parameter, int], object]) -> OptimizerOf:
    return lambda model: Keeping(model.parameters(), kept)


def by_layer(model: nn.Module, empty: bool = True) -> torch.optim.Optimizer:
    """A rate for each layer; ranks without the layer have an empty group, or none."""
    held = dict(model.named_parameters())
    groups: Groups = [
        {"params": [one for name, one in held.items() if name.startswith(f"body.{n}.")], "lr": 0.01 / (n + 1)} for n in range(4)
    ]
    return torch.optim.AdamW([group for group in groups if empty or group["params"]])


OPTIMIZERS: dict[str, OptimizerOf] = {
    "an empty group": by_layer,
    "no state": lambda model: Decayed(model.parameters()),
    "a rate that is a tensor": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "none": keeping(lambda parameter, count: None),
    "numbers": keeping(lambda parameter, count: [count, (0.5, count)]),
    "dicts": keeping(lambda parameter, count: {0: torch.full_like(parameter, count), "of": {"count": count}}),
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(24, 24, generator=torch.Generator().manual_seed(step))
    return x, x.sin()


def losses(folder: Path, steps: int, optimizer: OptimizerOf, **options: Any) -> tuple[list[float], elastic.TrainingState]:
    found: list[float] = []

    def train_step(state: elastic.TrainingState, batch: Any) -> torch.Tensor:
        loss = state.model.step(*batch)
        state.optimizer.step()
        state.optimizer.zero_grad()
        found.append(loss.item())
        return loss

    options = {"data": batch, "device": "cpu", "every": 2, **options}
    return found, elastic.run(build, train_step, optimizer=optimizer, steps=steps, checkpoints=folder, **options)


def plain_losses(optimizer: OptimizerOf, steps: int) -> tuple[list[float], torch.optim.Optimizer]:
    """The losses of the user's module."""
    torch.manual_seed(0)
    model, found = Model(), []
    own = optimizer(model)
    for step in range(steps):
        loss = model(*batch(step))
        loss.backward()
        own.step()
        own.zero_grad()
        found.append(loss.item())
    return found, own


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saving_and_loading_change_nothing(name: str, tmp_path: Path) -> None:
    whole, own = plain_losses(OPTIMIZERS[name], 5)
    first, _ = losses(tmp_path, 3, OPTIMIZERS[name])
    then, state = losses(tmp_path, 5, OPTIMIZERS[name])
    assert [*first, *then] == pytest.approx(whole, rel=1e-5)
    assert state.optimizer.state_dict()["param_groups"] == own.state_dict()["param_groups"]
    if isinstance(own, Keeping):
        torch.testing.assert_close(state.optimizer.state_dict()["state"], own.state_dict()["state"])


REFUSED: dict[str, tuple[OptimizerOf, str, int]] = {
    "LBFGS": (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS is not saved in parts", 0),
    "text": (keeping(lambda parameter, count: "warm"), "state of body.0.weight has text", 1),
    "a list of tensors": (keeping(lambda parameter, count: [parameter.clone()]), "body.0.weight has a list of tensors", 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_first_saved(name: str, tmp_path: Path) -> None:
    optimizer, said, steps = REFUSED[name]
    taken: list[int] = []
    with pytest.raises(InputError, match=said):
        losses(tmp_path, 2, optimizer, every=1, data=lambda step: taken.append(step) or batch(step))
    assert len(taken) == steps


def staged(case: tuple[Path, bool]) -> Sequence[float]:
    """The losses of a run in two stages that is stopped and resumed."""
    folder, empty = case
    options = {"mesh": lambda n: {"pp": n}, "pipeline": "pp", "stages": ["body.2"], "device": "h100"}
    parts = [losses(folder, steps, lambda model: by_layer(model, empty), **options)[0] for steps in (2, 4)]
    return [*parts[0], *parts[1]]


@pytest.mark.parametrize("empty", [True, False])
def test_a_rank_without_a_group_of_the_optimizer_resumes(pool: WorkerPool, tmp_path: Path, empty: bool) -> None:
    whole, _ = plain_losses(by_layer, 4)
    for found in pool.run(f"{__name__}:staged", (tmp_path, empty), ranks=2):
        assert found == pytest.approx(whole, rel=1e-5)


def of_others(folder: Path) -> str:
    """What a run says whose ranks have different optimizers."""
    momentum = 0.9 * dist.get_rank()
    optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)  # noqa: E731
    with pytest.raises(CheckpointError, match="the checkpoint of step 2 was not written") as raised:
        losses(folder, 4, optimizer, strategy="fsdp", device="h100")
    return raised.value.details["fix"]


def test_ranks_with_different_optimizers_are_not_told_to_make_room(pool: WorkerPool, tmp_path: Path) -> None:
    for said in pool.run(f"{__name__}:of_others", tmp_path, ranks=2):
        assert said.startswith("the same model and optimizer on every rank, and start again")
