"""What a training is at a step: its tensors, which every rank stores in parts, and the rest, which is small and whole."""

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
    """What `train_step` is given, and `run` returns.

    Attributes:
        model: this rank's part of the model, as `autopar.parallelize` made it for the ranks that run now.
        optimizer, scheduler: what the functions of these names returned; the scheduler is None without one.
        step: how many steps were taken since the training began, in all its restarts.
    """

    def __init__(
        self, model: ParallelModule, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, batches: Batches
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.batches = model, optimizer, scheduler, batches
        self.step = 0

    def tensors(self, *, stepped: bool) -> dict[str, torch.Tensor]:
        """What is stored in parts, by name; the optimizer's only if it has `stepped`, since asking for it makes it step."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        moments = self._moments() if stepped else {}
        return found | {f"optimizer.{name}": one for name, one in moments.items() if isinstance(one, torch.Tensor)}

    def saved_tensors(self, saved: Collection[str], *, stepped: bool) -> dict[str, torch.Tensor]:
        """What a checkpoint with tensors of these names has in parts. Parameters that had no gradient when it was written have
        no state of the optimizer in it, where others have one."""
        found, known = self.tensors(stepped=stepped), with_state(saved)
        return {name: one for name, one in found.items() if not known or with_state([name]) <= known}

    def rest(self) -> Rest:
        """What rank 0 stores whole; every rank calls it."""
        return {
            "step": self.step,
            "optimizer": self._settings(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "random": self.model.autopar.rng_state.state_dict(),
            "host": host_state(),
            "data": self.batches.state_dict(),
        }

    def load_rest(self, rest: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from what was stored. The model's tensors are loaded in place, the optimizer's are those of `tensors`."""
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
        """The optimizer's state by name of parameter: tensors, numbers and settings."""
        return dict(get_optimizer_state_dict(self.model, self.optimizer, options=FLAT))

    def _settings(self) -> dict[str, Any]:
        """What the optimizer has beside tensors, of all ranks."""
        if not self.step:
            return {}
        own = {name: one for name, one in self._moments().items() if not isinstance(one, torch.Tensor)}
        if self.model.autopar.alike:
            return own
        every: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, own, group=self.model.autopar.context.control)
        return {name: one for rank in every for name, one in rank.items()}


def with_state(names: Iterable[str]) -> set[str]:
    """The parameters of whose optimizer's state there is something among these names.

    >>> with_state(["model.a.weight", "optimizer.state.a.weight.exp_avg"])
    {'a.weight'}
    """
    return {name.removeprefix(STATE).rpartition(".")[0] for name in names if name.startswith(STATE)}


OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]
SchedulerOf = Callable[[torch.optim.Optimizer], LRScheduler]

__all__ = ["OptimizerOf", "Rest", "SchedulerOf", "TrainingState"]
