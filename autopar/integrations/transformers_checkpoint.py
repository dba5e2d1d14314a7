"""Loads the optimizer state in a checkpoint of the library's own Trainer, one whole file, for a parallel module.

state         0: {step, exp_avg, exp_avg_sq}, 1: ...       numbers of parameters, group by group
param_groups  [{lr, ..., params: [0, 1]}, ...]             with decay, and without
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from autopar.codegen import ParallelModule
from autopar.errors import CheckpointError
from autopar.integrations.training_state import OptimizerGroup, state_of, unstepped
from autopar.runtime.storage import given_like

FIX = "the arguments and the model of that run, or a checkpoint of autopar's Trainer"


def load_whole_state(
    parallel: ParallelModule, optimizer: torch.optim.Optimizer, path: str | Path, model: nn.Module, decays: Sequence[str]
) -> None:
    """Load an optimizer's parts of the state from a file of the library's; every rank reads it, and nothing in it is executed.

    Args:
        parallel: the module with the optimizer's parameters.
        optimizer: has the same groups as the file.
        path: an `optimizer.pt`.
        model: the model that was passed to `autopar.parallelize`; the file has its order of parameters.
        decays: the names of parameters that decay.

    Raises:
        CheckpointError: the file is damaged, of another model or optimizer, or has states whose shapes differ from their
            parameters'.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    state, groups = _named(_read(path), trained, decays)
    own = dict(parallel.named_parameters())
    parts = {
        name: {key: given_like(value, own[name]) if _is_like(value, own[name]) else value for key, value in kept.items()}
        for name, kept in state.items()
        if name in own
    }
    with unstepped([optimizer]):
        known: Any = get_state_dict(parallel, [optimizer])[1].get("state", {})
    if odd := next((name for name in parts if name in known and parts[name].keys() != known[name].keys()), None):
        what = f"the optimizer's state of {odd} is {', '.join(parts[odd])}, that of another optimizer"
        raise CheckpointError(what, asked=", ".join(known[odd]), fix=FIX)
    names = {parameter: name for name, parameter in own.items()}
    optimizer.load_state_dict(state_of(optimizer, names, {"state": parts, "param_groups": groups}))


def _read(path: str | Path) -> OptimizerGroup:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(found["state"], dict) or not all(isinstance(one["params"], list) for one in found["param_groups"]):
            raise TypeError("it is no state of an optimizer")
    except (OSError, EOFError, RuntimeError, ValueError, TypeError, KeyError, pickle.UnpicklingError) as error:
        said = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read: {said}", fix="an older checkpoint") from error
    return found  # type: ignore[no-any-return]


def _named(
    saved: OptimizerGroup, trained: Mapping[str, nn.Parameter], decays: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], list[OptimizerGroup]]:
    """The states and groups of a file, by parameter name."""
    split = [[name for name in trained if (name in decays) == decay] for decay in (True, False)]
    lengths = [len(group["params"]) for group in saved["param_groups"]]
    groups = next((one for one in (split, [[*trained]]) if [*map(len, one)] == lengths), None)
    if groups is None:
        what = f"the optimizer's state has groups of {', '.join(map(str, lengths))} parameters"
        raise CheckpointError(what, asked=", ".join(str(len(group)) for group in split), fix=FIX)
    named = [{**one, "params": group} for one, group in zip(saved["param_groups"], groups, strict=True)]
    numbers = [number for one in saved["param_groups"] for number in one["params"]]
    by_number = dict(zip(numbers, (name for group in groups for name in group), strict=True))
    state = {by_number[number]: kept for number, kept in saved["state"].items() if number in by_number}
    for name, kept in state.items():
        if odd := next((key for key, value in kept.items() if not (_is_like(value, trained[name]) or _is_number(value))), ""):
            what = f"{odd} of {name} in the optimizer's state has another shape than the parameter"
            raise CheckpointError(what, parameter=tuple(trained[name].shape), fix=FIX)
    return state, named


def _is_like(value: object, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == parameter.shape


def _is_number(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or value.ndim == 0


__all__ = ["load_whole_state"]
