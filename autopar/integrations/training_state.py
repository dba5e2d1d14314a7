"""Saves and loads what ranks hold in parts (weights, optimizer state) and the random state; on any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict
from torch.utils._pytree import tree_leaves

from autopar.codegen import ParallelModule
from autopar.codegen.pipeline_module import PipelineModule
from autopar.errors import InputError
from autopar.runtime.checkpoint_files import CheckpointReader, load_checkpoint, save_checkpoint

OptimizerGroup = dict[str, Any]  # of an optimizer's parameters: their names, and its settings


def save_training_state(parallel: ParallelModule, optimizers: Sequence[torch.optim.Optimizer], folder: str | Path) -> None:
    """Write this rank's parts; every rank calls it. An optimizer that has not stepped yet is saved without state.

    A state that was saved in the folder before counts until all parts are on the disk. Raises CheckpointError if they cannot be
    written, RankError if a rank dies, InputError if pipeline stages have different numbers of parameter groups, for LBFGS, and
    for text in an optimizer's state.
    """
    steps = steps_of(optimizers, parallel)
    name_groups(steps["param_groups"], parallel)
    weights = get_model_state_dict(parallel)
    states = {"model": weights, "optimizer": steps, "random": parallel.autopar.rng_state}
    save_checkpoint(states, Path(folder))


def load_training_state(parallel: ParallelModule, optimizers: Sequence[torch.optim.Optimizer], folder: str | Path) -> None:
    """Read this rank's parts, also if another number of ranks wrote them; every rank calls it.

    Nothing in a file is executed. Raises CheckpointError if the checkpoint is damaged, or of another model or optimizer, and
    RankError if a rank dies: some weights may be loaded then. Raises InputError if the parameters of an optimizer's group were
    saved in no group or in several, and for LBFGS.
    """
    with unstepped(optimizers):
        weights, steps = get_state_dict(parallel, list(optimizers))
    reader = CheckpointReader(folder)
    drop_state(steps, unsaved(steps, reader.read_metadata().state_dict_metadata, "optimizer"))
    load_checkpoint({"model": weights, "optimizer": steps, "random": parallel.autopar.rng_state}, reader)
    set_model_state_dict(parallel, weights)
    names = {parameter: name for name, parameter in parallel.named_parameters()}
    for optimizer in optimizers:
        optimizer.load_state_dict(state_of(optimizer, names, steps))


def steps_of(optimizers: Sequence[torch.optim.Optimizer], module: nn.Module) -> OptimizerGroup:
    """The states of optimizers by parameter name; `state_of` converts them back.

    An optimizer that has not stepped, or keeps no state, has none: torch's `get_optimizer_state_dict` steps it with gradients
    of zero, which changes the weights unless `lr` scales all of the step. Raises InputError for LBFGS, and for text in a state.
    """
    refuse_lbfgs(optimizers)
    names = {parameter: name for name, parameter in module.named_parameters()}
    steps: OptimizerGroup = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        found = optimizer.state_dict()
        own = dict(enumerate(names[one] for group in optimizer.param_groups for one in group["params"]))
        steps["state"] |= {own[number]: state for number, state in found["state"].items()}
        steps["param_groups"] += [{**group, "params": [own[n] for n in group["params"]]} for group in found["param_groups"]]
    for name, state in steps["state"].items():
        if any(isinstance(one, str) for one in tree_leaves(state)):
            raise InputError(f"the optimizer's state of {name} has text, which torch cannot load", fix="a number instead")
    return steps


def refuse_lbfgs(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise InputError for LBFGS, whose state has no parts."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise InputError(
            "the state of LBFGS is not saved in parts: it grows from step to step, and its first one needs a closure",
            fix="another optimizer, or save optimizer.state_dict() of every rank; it is loaded on as many ranks",
        )


@contextmanager
def unstepped(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[list[torch.optim.Optimizer]]:
    """The optimizers that have not stepped; their state is cleared again on exit. Asked for it, torch creates it by a step of
    zeros, which would count as one more step. That step may change the weights: load them afterwards. Gradients are set aside:
    where there are any, torch creates no state, and there would be nothing to load into.

    Raises InputError for LBFGS, which torch cannot ask.
    """
    refuse_lbfgs(optimizers)
    fresh = [optimizer for optimizer in optimizers if not optimizer.state]
    parameters = [one for optimizer in fresh for group in optimizer.param_groups for one in group["params"]]
    gradients = [one.grad for one in parameters]
    for one in parameters:
        one.grad = None
    try:
        yield fresh
    finally:
        for optimizer in fresh:
            optimizer.state.clear()
        for one, gradient in zip(parameters, gradients, strict=True):
            one.grad = gradient


def unsaved(steps: Mapping[str, Any], saved: Collection[str], place: str) -> list[str]:
    """The parameters whose optimizer state a checkpoint lacks."""
    known = {name[: end + 1] for name in saved for end, sign in enumerate(name) if sign == "."}
    known |= {f"{name}." for name in saved}
    state: Mapping[str, Mapping[str, object]] = steps.get("state", {})
    return [name for name, own in state.items() if known.isdisjoint(f"{place}.state.{name}.{key}." for key in own)]


def drop_state(steps: Mapping[str, Any], names: Sequence[str]) -> None:
    """Drop the optimizer state of some parameters."""
    for name in names:
        steps.get("state", {}).pop(name, None)


def name_groups(groups: Sequence[OptimizerGroup], parallel: ParallelModule) -> None:
    """Give each group its parameter names over all stages: one rank's are written, and each rank finds its groups by name."""
    if not isinstance(parallel, PipelineModule):
        return
    every: list[list[list[str]]] = parallel.autopar.stages.rank.described_by_all([group["params"] for group in groups])
    if len(numbers := sorted({len(own) for own in every})) > 1:
        found = " and ".join(map(str, numbers))
        raise InputError(
            f"the optimizers of the pipeline's stages have {found} groups of parameters", fix="the same groups on every rank"
        )
    for group, names in zip(groups, zip(*every, strict=True), strict=True):
        group["params"] = [*dict.fromkeys(name for own in names for name in own)]


def state_of(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], steps: Mapping[str, Any]) -> OptimizerGroup:
    """Convert a state with parameters by name to the form that an optimizer loads.

    A group that is empty on this rank keeps its settings: torch's own `set_state_dict` supports at most one such group. A group
    also keeps settings that were not saved.
    """
    numbers: dict[str, int] = {}
    groups: list[OptimizerGroup] = []
    for group in optimizer.param_groups:
        own = [names[parameter] for parameter in group["params"]]
        saved = next((one for one in steps["param_groups"] if not set(own).isdisjoint(one["params"])), None)
        if left := set(own).difference(saved["params"] if saved else ()):
            what = f"no group of parameters that was saved has {next(name for name in own if name in left)}"
            what += f", and {own[0]}" if saved and own[0] not in left else ""
            raise InputError(what, fix="an optimizer with the groups of parameters that were saved")
        numbers |= {name: number for number, name in enumerate(own, len(numbers))}
        kept = {key: group[key] for key in ("param_names",) if key in group}  # of an optimizer that was given names
        groups.append({**group, **(saved or {}), **kept, "params": [numbers[name] for name in own]})
    return {"state": {numbers[name]: one for name, one in steps["state"].items() if name in numbers}, "param_groups": groups}


def load_weights(parallel: ParallelModule, folder: str | Path) -> None:
    """Read only this rank's parts of the weights; every rank calls it. Raises CheckpointError if they cannot be read."""
    reader = CheckpointReader(folder)
    reader.read_metadata()
    load_checkpoint({"model": parallel.state_dict()}, reader)


__all__ = [
    "drop_state",
    "load_training_state",
    "load_weights",
    "name_groups",
    "save_training_state",
    "state_of",
    "steps_of",
    "unsaved",
    "unstepped",
]
