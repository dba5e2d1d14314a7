"""Optimizers given as instance or class: their state is counted after one step on a small weight."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from autopar.cost_models.optimizers import OPTIMIZERS, Optimizer, with_states
from autopar.errors import InputError

SIDE = 64  # of the weight that is stepped
SMALL = 0.05  # of the weight: what an optimizer keeps per row and column is left out


def counted(given: torch.optim.Optimizer | Callable[..., object]) -> Optimizer:
    """The costs of an optimizer given as an instance, a class, or a function from parameters to it (`functools.partial(AdamW,
    ...)`).

    State smaller than the parameter, as in 8-bit optimizers, is rounded up to whole tensors. Temporary memory is that of the
    table's optimizer with this name, else that of Adam.

    Raises InputError if it cannot take a step on a matrix on the CPU.

    >>> counted(torch.optim.SGD([nn.Parameter(torch.zeros(2))], momentum=0.9)).name
    'sgd-momentum'
    """
    weight = nn.Parameter(torch.zeros(SIDE, SIDE))
    weight.grad = torch.ones_like(weight)
    try:
        made = _again(given, weight) if isinstance(given, torch.optim.Optimizer) else given([weight])
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"{type(made).__name__} is not a torch.optim.Optimizer")
        made.step(lambda: 0.0)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise InputError(
            f"the optimizer {_name(given)} cannot be stepped to see what it keeps: {str(error).splitlines()[0]}",
            optimizers=", ".join(OPTIMIZERS),
            fix="give one of these names, or an autopar.cost_models.optimizers.Optimizer with your own numbers",
        ) from error
    held = [kept for kept in made.state[weight].values() if isinstance(kept, torch.Tensor) and kept.dim()]
    share = sum(kept.numel() * kept.element_size() for kept in held) / (weight.numel() * weight.element_size())
    return _known(type(made).__name__, math.ceil(share - SMALL))


def _again(given: torch.optim.Optimizer, weight: nn.Parameter) -> torch.optim.Optimizer:
    """An optimizer of the same class and options over another parameter."""
    takes = inspect.signature(type(given)).parameters
    options = {name: value for name, value in given.defaults.items() if name in takes and name != "capturable"}
    return type(given)([weight], **options)


def _known(name: str, states: int) -> Optimizer:
    """The entry of the table with so many states, or one made from it."""
    same = [entry for key, entry in OPTIMIZERS.items() if key.partition("-")[0] == name.lower()]
    if exact := [entry for entry in same if entry.states == states]:
        return exact[0]
    source = f"one step of {name} on a {SIDE} x {SIDE} matrix"
    return with_states(replace(same[0] if same else OPTIMIZERS["adam"], name=name.lower(), source=source), states)


def _name(given: object) -> str:
    return type(given).__name__ if isinstance(given, torch.optim.Optimizer) else getattr(given, "__name__", str(given))


__all__ = ["counted"]
