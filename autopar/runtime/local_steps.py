"""Optimizer steps on this rank's parts as plain tensors: no dispatch of DTensors, and fused kernels that DTensor lacks.

Before a step the optimizer's parameters, gradients and state are replaced by their local tensors, behind it they are put back:
what a step writes in place is the memory of the DTensors. Between steps nothing differs for state dicts and schedulers. State
that lies otherwise than its parameter, as `optimizer.load_state_dict` takes it from another plan, is moved to where that lies.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import optim
from torch.distributed.tensor import DTensor

from autopar.runtime.step_hooks import ELEMENTWISE, check_class, hooked
from autopar.runtime.storage import stored_as


def step_locally(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Make an optimizer step on each rank's parts as plain tensors; returns it.

    The numbers are those of a step on DTensors; it takes less host time, and may be `fused`. Closures are left as they are.

    Args:
        optimizer: one of torch.optim that computes element by element, over the parameters of a parallel module.

    Raises:
        InputError: the optimizer is of another class, which might need whole tensors.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> step_locally(optim.SGD([weight], lr=0.5)).defaults["lr"]
    0.5
    """
    fix = "leave step_locally out: its steps are computed on DTensors; Adafactor's by autopar.step_gathered"
    check_class(optimizer, ELEMENTWISE, "compute each element by itself", fix)
    return hooked(optimizer, _LocalSteps())


class _LocalSteps:
    """The hooks of one optimizer."""

    def __init__(self) -> None:
        self._parts: dict[torch.Tensor, DTensor] = {}  # what stands for what while a step runs
        self._wrapped: dict[torch.Tensor, DTensor] = {}  # state by its local tensor

    @torch.no_grad()
    def before(self, optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Put local tensors in the place of DTensors."""
        if self._parts:  # a step that raised
            self.after(optimizer, args, kwargs)
        if (*args[1:], kwargs.get("closure")) not in ((None,), (None, None)):
            return
        for group in optimizer.param_groups:
            group["params"] = [self._local(optimizer, p) if isinstance(p, DTensor) else p for p in group["params"]]

    def _local(self, optimizer: optim.Optimizer, parameter: DTensor) -> torch.Tensor:
        local: torch.Tensor = parameter.to_local()
        self._parts[local] = parameter
        local.grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[local] = {name: self._inside(kept, parameter) for name, kept in state.items()}
        return local

    def _inside(self, kept: object, parameter: DTensor) -> object:
        if not isinstance(kept, DTensor):
            return kept
        kept = stored_as(kept, parameter)
        local: torch.Tensor = kept.to_local()
        self._wrapped[local] = kept
        return local

    @torch.no_grad()
    def after(self, optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Put the DTensors back."""
        for group in optimizer.param_groups:
            group["params"] = [self._parts.get(p, p) for p in group["params"]]
        for local, parameter in self._parts.items():
            local.grad = None
            if local in optimizer.state:
                state = optimizer.state.pop(local)
                optimizer.state[parameter] = {name: self._outside(kept, local, parameter) for name, kept in state.items()}
        self._parts, self._wrapped = {}, {}

    def _outside(self, kept: object, local: torch.Tensor, parameter: DTensor) -> object:
        if not isinstance(kept, torch.Tensor) or kept.shape != local.shape or not parameter.dim():
            return kept
        if kept in self._wrapped:
            return self._wrapped[kept]
        mesh, places, shape = parameter.device_mesh, parameter.placements, parameter.shape
        return DTensor.from_local(kept, mesh, places, run_check=False, shape=shape, stride=parameter.stride())


__all__ = ["step_locally"]
