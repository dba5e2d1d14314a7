"""Steps an optimizer one parameter at a time, which is allowed if it computes element by element."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import optim
from torch.distributed.tensor import DTensor

from autopar.runtime.step_hooks import ELEMENTWISE, check_class


@contextmanager
def only(optimizer: optim.Optimizer, parameter: torch.Tensor) -> Iterator[None]:
    """Inside, the optimizer has only this parameter, in its group."""
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = [one for one in parameters if one is parameter]
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


def check_single_steps(optimizer: optim.Optimizer, where: str) -> None:
    """Raise InputError if stepping one parameter may need others; `where` says in the message which parameters are stepped."""
    does = f"compute each element by itself, as steps of what is {where} must"
    check_class(optimizer, ELEMENTWISE, does, "one of these, or weights on the device")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


__all__ = ["check_single_steps", "local", "only"]
