"""The state of a training run at a step: tensors, which ranks save in parts, and the rest, which is small and saved whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from autopar.codegen import ParallelModule
from autopar.elastic.batches import Batches
from autopar.elastic.generators import host_state, set_host_state
from autopar.errors import CheckpointError, InputError
from autopar.integrations.training_state import OptimizerGroup, drop_state, state_of, steps_of, unsaved, unstepped

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

    def steps(self) -> OptimizerGroup:
        """The optimizer's state by parameter name. Raises InputError for LBFGS, and for a state that cannot be stored."""
        found = steps_of([self.optimizer], self.model)
        for path, one in leaves(found["state"]):
            if not isinstance(one, torch.Tensor) and any(isinstance(part, torch.Tensor) for part in tree_leaves(one)):
                what = f"the optimizer's state of {path[0]} has a {type(one).__name__} of tensors"
                raise InputError(what, fix="tensors of their own, or in a dict")
        return found

    def steps_to_load(self, saved: Collection[str], *, stepped: bool) -> OptimizerGroup:
        """The optimizer's state to load from a checkpoint with these names; it lacks that of parameters that had no gradient.

        If it has `stepped`, torch steps it with zeros to create the state, which may change the weights: load them afterwards.
        """
        if not stepped:
            return self.steps()
        with unstepped([self.optimizer]):
            found: OptimizerGroup = dict(get_optimizer_state_dict(self.model, self.optimizer))
        if any(name.startswith(STATE) for name in saved):
            drop_state(found, unsaved(found, saved, "optimizer"))
        return found

    def tensors(self, steps: OptimizerGroup) -> dict[str, torch.Tensor]:
        """The tensors saved in parts, by name."""
        named = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        state = {STATE + ".".join(map(str, path)): one for path, one in leaves(steps["state"])}
        return named | {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}

    def rest(self, steps: OptimizerGroup) -> Rest:
        """The rest of the state, which rank 0 saves whole; every rank calls it."""
        return {
            "step": self.step,
            "optimizer": self._settings(steps),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "random": self.model.autopar.rng_state.state_dict(),
            "host": host_state(),
            "data": self.batches.state_dict(),
        }

    def load_rest(self, rest: Mapping[str, Any], steps: OptimizerGroup) -> None:
        """Restore the rest. The tensors of the model, and of the optimizer in `steps`, are loaded in place."""
        loaded = {path: one for path, one in leaves(steps["state"]) if isinstance(one, torch.Tensor)}
        state = nested(loaded | rest["optimizer"]["state"])
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        given = state_of(self.optimizer, names, {**rest["optimizer"], "state": state})
        for group, own in zip(given["param_groups"], self.optimizer.param_groups, strict=True):
            placed = [key for key, one in own.items() if isinstance(one, torch.Tensor) and isinstance(group[key], torch.Tensor)]
            group |= {key: group[key].to(own[key].device) for key in placed}
        self.optimizer.load_state_dict(given)
        if self.scheduler:
            if rest["scheduler"] is None:
                raise CheckpointError("the checkpoint has no scheduler, and the training has one", fix="leave scheduler= out")
            self.scheduler.load_state_dict(rest["scheduler"])
        self.model.autopar.rng_state.load_state_dict(rest["random"])
        self.step = int(rest["step"])
        self.batches.load_state_dict(rest["data"])
        set_host_state(rest["host"])

    def _settings(self, steps: OptimizerGroup) -> Rest:
        """The optimizer's state except tensors, by path, and its groups, from all ranks.

        Groups with equal settings are one: ranks of a pipeline have different parameters, and may lack a group.
        """
        plain = {path: one for path, one in leaves(steps["state"]) if not isinstance(one, torch.Tensor)}
        own = plain, [settings(group) for group in steps["param_groups"]]
        every = [own]
        if not self.model.autopar.alike:
            every *= dist.get_world_size()
            dist.all_gather_object(every, own, group=self.model.autopar.context.control)
        groups: list[OptimizerGroup] = []
        for group in (group for _, found in every for group in found):
            same = next((one for one in groups if {**one, "params": group["params"]} == group), None)
            if same is None:
                groups.append(group)
            else:
                same["params"] += [name for name in group["params"] if name not in same["params"]]
        return {"state": {path: one for state, _ in every for path, one in state.items()}, "param_groups": groups}


def settings(group: OptimizerGroup) -> OptimizerGroup:
    """A group of an optimizer as it is stored, with tensors, such as a learning rate, on the host."""
    kept = {key: one for key, one in group.items() if key != "param_names"}
    return {key: one.cpu() if isinstance(one, torch.Tensor) else one for key, one in kept.items()}


def leaves(held: Mapping[Any, Any], *path: object) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What dicts in dicts hold, with the keys that lead there.

    >>> [*leaves({"a.weight": {"step": 1, "of": {0: 2}}})]
    [(('a.weight', 'step'), 1), (('a.weight', 'of', 0), 2)]
    """
    for key, one in held.items():
        if isinstance(one, dict):
            yield from leaves(one, *path, key)
        else:
            yield (*path, key), one


def nested(found: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """The dicts in dicts of which `leaves` finds this.

    >>> nested({("a.weight", "step"): 1, ("a.weight", "of", 0): 2})
    {'a.weight': {'step': 1, 'of': {0: 2}}}
    """
    whole: dict[Any, Any] = {}
    for path, one in found.items():
        place = whole
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = one
    return whole


OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]
SchedulerOf = Callable[[torch.optim.Optimizer], LRScheduler]

__all__ = ["OptimizerOf", "Rest", "SchedulerOf", "TrainingState"]
