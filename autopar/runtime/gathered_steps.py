"""Optimizer steps on whole tensors, one weight at a time: for optimizers that look at a weight as a matrix, such as Adafactor.

In a step each weight is gathered with its gradient, stepped alone and whole, and cut again: every rank computes the same. State
of a weight's own shape is sharded like the weight between steps; the rest (means of rows and columns) is whole on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import optim
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.runtime.step_hooks import check_class, hooked
from autopar.runtime.storage import full_tensor, given_like, with_own_storage
from autopar.runtime.whole_weights import GATHERED, WEIGHT_BY_WEIGHT


def step_gathered(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Make an optimizer step on whole weights, gathered one at a time with their gradients; returns it.

    The numbers are those of one process. A step needs the memory of the largest weight with its gradient and state in addition
    to what is stored, and sends as much as two all-gathers of all weights; torch has no other way to run Adafactor on split
    weights.

    Args:
        optimizer: Adafactor of torch.optim or of transformers, or one of timm.optim that steps each weight by itself (Mars,
            AdamP, NvNovoGrad, most with `caution`), over the parameters of a parallel module; without a closure.

    Raises:
        InputError: the optimizer is of another class. In its step: it was given a closure.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> step_gathered(optim.Adafactor([weight], lr=0.5)).defaults["lr"]
    0.5
    """
    fix = "autopar.step_locally for those of torch.optim that compute element by element; others step on DTensors"
    found = [getattr(sys.modules.get(module), name, None) for module, name in WEIGHT_BY_WEIGHT.items()]
    check_class(optimizer, [kind for kind in found if kind is not None], "step each weight by itself", fix)
    GATHERED.add(optimizer)
    return hooked(optimizer, _GatheredSteps())


class _GatheredSteps:
    """The hooks of one optimizer."""

    def __init__(self) -> None:
        self._groups: list[list[torch.Tensor]] = []  # the parameters of each group while a step runs
        self._alone = False  # whether one weight is being stepped

    @torch.no_grad()
    def before(self, optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Step split weights one by one; the step itself handles the rest."""
        if self._alone:
            return
        if any(given is not None for given in (*args[1:], kwargs.get("closure"))):
            raise InputError("a gathered step takes no closure", fix="compute the gradients, then step()")
        groups = [list(group["params"]) for group in optimizer.param_groups]
        self._alone = True
        try:
            for group in optimizer.param_groups:
                group["params"] = []
            for group, held in zip(optimizer.param_groups, groups, strict=True):
                for parameter in held:
                    if isinstance(parameter, DTensor) and parameter.grad is not None:
                        _step(optimizer, group, parameter)
        except BaseException:
            self._restore(optimizer, groups)
            raise
        finally:
            self._alone = False
        self._groups = groups
        for group, held in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [parameter for parameter in held if not isinstance(parameter, DTensor)]

    def after(self, optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Put all parameters back."""
        if not self._alone:
            self._restore(optimizer, self._groups)

    def _restore(self, optimizer: optim.Optimizer, groups: list[list[torch.Tensor]]) -> None:
        for group, held in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = held


def _step(optimizer: optim.Optimizer, group: dict[str, object], parameter: DTensor) -> None:
    """Step one weight of a group, whose other weights are elsewhere."""
    whole = torch.nn.Parameter(full_tensor(parameter))
    assert isinstance(parameter.grad, torch.Tensor)
    whole.grad = full_tensor(parameter.grad)
    kept = optimizer.state.pop(parameter, {})
    optimizer.state[whole] = {name: full_tensor(v) if isinstance(v, torch.Tensor) else v for name, v in kept.items()}
    group["params"] = [whole]
    counted = _numbers(group)
    try:
        optimizer.step()
    finally:
        group["params"] = []
        found = optimizer.state.pop(whole)
        optimizer.state[parameter] = {name: _cut(value, parameter) for name, value in found.items()}
    if _numbers(group) != counted:
        what = f"{type(optimizer).__name__} counts in a group of weights, not by weight, and cannot be stepped weight by weight"
        raise InputError(what, fix="another version of it, or a plan that splits no weights: strategy='ddp'")
    parameter.copy_(given_like(whole.detach(), parameter))


def _numbers(group: Mapping[str, object]) -> dict[str, object]:
    """The numbers of a group, but the learning rate, which relative steps set for each weight."""
    return {name: value for name, value in group.items() if isinstance(value, int | float) and name != "lr"}


def _cut(value: object, parameter: DTensor) -> object:
    """The state to keep for a weight: a tensor of its shape is cut like it, everything else stays."""
    return with_own_storage(given_like(value, parameter)) if isinstance(value, torch.Tensor) and value.dim() else value


__all__ = ["step_gathered"]
