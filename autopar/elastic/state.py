"""The state of a training run at a step: tensors, which ranks save in parts, and the rest, which is small and saved whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import LRScheduler

from autopar.codegen import ParallelModule
from autopar.elastic.batches import Batches
from autopar.elastic.generators import host_state, set_host_state
from autopar.errors import CheckpointError

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by names of parameters: ranks of a pipeline have different ones
STATE = "optimizer.state."  # and the name of a parameter and of what the optimizer keeps of it
Rest = dict[str, Any]  # tensors, numbers, texts and containers of them


class TrainingState:
    """The state that `train_step` receives and `run` returns.

    Attributes:
        model: this rank's part of the model, as `autopar.parallelize` made it for the ranks that run now.
        optimizer, scheduler: the results of the functions with these names; the scheduler may be None.
        step: the number of steps since the training began, across restarts.
    """

    def __init__(
        self, model: ParallelModule, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, batches: Batches
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.batches = model, optimizer, scheduler, batches
        self.step = 0

    def tensors(self, *, stepped: bool) -> dict[str, torch.Tensor]:
        """The tensors saved in parts, by name; the optimizer's only if it has `stepped`, as torch steps it to read them."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        moments = self._moments() if stepped else {}
        return found | {f"optimizer.{name}": one for name, one in moments.items() if isinstance(one, torch.Tensor)}

    def saved_tensors(self, saved: Collection[str], *, stepped: bool) -> dict[str, torch.Tensor]:
        """The tensors to load from a checkpoint with these names; it lacks the state of parameters that had no gradient."""
        found, known = self.tensors(stepped=stepped), with_state(saved)
        return {name: one for name, one in found.items() if not known or with_state([name]) <= known}

    def rest(self) -> Rest:
        """The rest of the state, which rank 0 saves whole; every rank calls it."""
        return {
            "step": self.step,
            "optimizer": self._settings(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "random": self.model.autopar.rng_state.state_dict(),
            "host": host_state(),
            "data": self.batches.state_dict(),
        }

    def load_rest(self, rest: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the rest. The model's tensors are loaded in place, the optimizer's are those in `tensors`."""
        if rest["step"]:
            given = {name.removeprefix("optimizer."): one for name, one in tensors.items() if name.startswith("optimizer.")}
            fresh = self._moments()
            known = {name: rest["optimizer"][name] for name in fresh if name in rest["optimizer"]}
            whole: dict[str, Any] = {**fresh, **given, **known}
            set_optimizer_state_dict(self.model, self.optimizer, whole, options=FLAT)
            trained = with_state([*tensors, *(f"optimizer.{name}" for name in rest["optimizer"])])
            for name, parameter in self.model.named_parameters():
                if name not in trained:
                    self.optimizer.state.pop(parameter, None)
        if self.scheduler:
            if rest["scheduler"] is None:
                raise CheckpointError("the checkpoint has no scheduler, and the training has one", fix="leave scheduler= out")
            self.scheduler.load_state_dict(rest["scheduler"])
        self.model.autopar.rng_state.load_state_dict(rest["random"])
        self.step = int(rest["step"])
        self.batches.load_state_dict(rest["data"])
        set_host_state(rest["host"])

    def _moments(self) -> dict[str, Any]:
        """The optimizer's state by parameter name: tensors, numbers and settings."""
        return dict(get_optimizer_state_dict(self.model, self.optimizer, options=FLAT))

    def _settings(self) -> dict[str, Any]:
        """The optimizer's state except tensors, from all ranks."""
        if not self.step:
            return {}
        own = {name: one for name, one in self._moments().items() if not isinstance(one, torch.Tensor)}
        if self.model.autopar.alike:
            return own
        every: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, own, group=self.model.autopar.context.control)
        return {name: one for rank in every for name, one in rank.items()}


def with_state(names: Iterable[str]) -> set[str]:
    """The parameters that have optimizer state among these names.

    >>> with_state(["model.a.weight", "optimizer.state.a.weight.exp_avg"])
    {'a.weight'}
    """
    return {name.removeprefix(STATE).rpartition(".")[0] for name in names if name.startswith(STATE)}


OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]
SchedulerOf = Callable[[torch.optim.Optimizer], LRScheduler]

__all__ = ["OptimizerOf", "Rest", "SchedulerOf", "TrainingState"]
