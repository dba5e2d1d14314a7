"""Hooks around the steps of optimizers whose class is known to compute what the hooks assume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import optim

from autopar.errors import InputError

# Optimizers that compute element by element; others use norms or products of whole tensors.
ELEMENTWISE = (
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop,
    optim.Rprop, optim.SGD,
)  # fmt: skip


class StepHooks(Protocol):
    """The hooks that run before and after every step of one optimizer."""

    def before(self, optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None: ...
    def after(self, optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None: ...


def hooked(optimizer: optim.Optimizer, hooks: StepHooks) -> optim.Optimizer:
    """Install these hooks around the steps of an optimizer; returns the optimizer itself."""
    optimizer.register_step_pre_hook(hooks.before)
    optimizer.register_step_post_hook(hooks.after)
    return optimizer


def check_class(optimizer: optim.Optimizer, known: Sequence[type[optim.Optimizer]], does: str, fix: str) -> None:
    """Raise InputError if the optimizer's class is not known to do what `does` says."""
    if type(optimizer) not in known:
        names = ", ".join(f"{kind.__module__}.{kind.__name__}" for kind in known)
        raise InputError(f"{type(optimizer).__name__} is not known to {does}", known=names, fix=fix)


__all__ = ["ELEMENTWISE", "check_class", "hooked"]
