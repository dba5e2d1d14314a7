"""Optimizer steps over parameters on the disk: one after the other, with its gradient and state, which lie there, too.

torch's optimizers create all of their state in memory, in their first step. A hook before each step makes the optimizer step
the parameters on the disk first, one at a time, and moves their new state to the disk; the step then continues with all others.
The numbers are those of one step, since an optimizer that computes element by element sees no other parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.errors import InputError
from autopar.runtime import steps_in_backward
from autopar.runtime.disk import File, check, file_of, note_writes, on_disk, seal, to_disk
from autopar.runtime.single_steps import check_single_steps, local, only


@cache
def install() -> None:
    """Make every optimizer step its parameters on the disk in this way."""
    steps_in_backward.install()  # whose hooks come first
    steps = _DiskSteps()
    register_optimizer_step_pre_hook(steps.before)
    register_optimizer_step_post_hook(steps.after)


class _DiskSteps:
    """The hooks of all optimizers."""

    def __init__(self) -> None:
        self._stepping = False
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}  # of parameters that were stepped before the others

    def before(self, optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Step the parameters on the disk, and remove their gradients until all others are stepped."""
        if self._stepping:
            return
        stored = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and on_disk(local(parameter))
        ]
        if not stored:
            return
        _check(optimizer, (*args[1:], kwargs.get("closure")))
        self._stepping = True
        try:
            for parameter in stored:
                with only(optimizer, parameter):
                    self._step(optimizer, parameter)
        finally:
            self._stepping = False
        for parameter in stored:
            self._gradients[parameter], parameter.grad = parameter.grad, None

    def after(self, optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Put the gradients back."""
        if not self._stepping:
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient
            self._gradients = {}

    def _step(self, optimizer: optim.Optimizer, parameter: torch.Tensor) -> None:
        """Step one parameter, and move its state to the disk."""
        own, state = local(parameter), optimizer.state[parameter]
        for tensor in (parameter, parameter.grad, *state.values()):
            if isinstance(tensor, torch.Tensor) and on_disk(local(tensor)):
                check(_noted(tensor), "a parameter, gradient or state")
        optimizer.step()
        file, state = file_of(own), optimizer.state[parameter]
        state.update({name: _moved(kept, file) for name, kept in _large(state, own)})
        for tensor in (parameter, *(kept for _, kept in _large(state, own))):
            seal(_noted(tensor))


def _check(optimizer: optim.Optimizer, closures: tuple[object, ...]) -> None:
    """Raise InputError for an optimizer that cannot step one parameter at a time."""
    if any(closure is not None for closure in closures):
        raise InputError("an optimizer over weights on the disk takes no closure", fix="compute the gradients before its step")
    check_single_steps(optimizer, "on the disk")


def _noted(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, with what was written through the DTensor around it noted."""
    note_writes(own := local(tensor), tensor._version if own is not tensor else 0)
    return own


def _large(state: Mapping[str, object], own: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The state that has the size of its parameter."""
    return (
        (name, kept) for name, kept in state.items()
        if isinstance(kept, torch.Tensor) and local(kept).shape == own.shape and (own.ndim or name != "step")
    )  # fmt: skip


def _moved(kept: torch.Tensor, file: File) -> torch.Tensor:
    """State on the disk."""
    if isinstance(kept, DTensor):
        return DTensor(to_disk(kept._local_tensor, file.folder, file.device), kept._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return to_disk(kept, file.folder, file.device)


__all__ = ["install"]
