"""Hooks around an optimizer's steps, of classes of which it is known what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import optim

from autopar.errors import InputError

# Those that compute each element by itself; others (norms of tensors, products) need whole ones.
ELEMENTWISE = (
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop,
    optim.Rprop, optim.SGD,
)  # fmt: skip


class StepHooks(Protocol):
    """What runs before and after every step of one optimizer."""

    def before(self, optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None: ...
    def after(self, optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None: ...


def hooked(optimizer: optim.Optimizer, hooks: StepHooks) -> optim.Optimizer:
    """The optimizer itself, with these hooks around its steps."""
    optimizer.register_step_pre_hook(hooks.before)
    optimizer.register_step_post_hook(hooks.after)
    return optimizer


def check_class(optimizer: optim.Optimizer, known: Sequence[type[optim.Optimizer]], does: str, fix: str) -> None:
    """Raise InputError for an optimizer of a class that is not known to do what is said."""
    if type(optimizer) not in known:
        names = ", ".join(f"{kind.__module__}.{kind.__name__}" for kind in known)
        raise InputError(f"{type(optimizer).__name__} is not known to {does}", known=names, fix=fix)


__all__ = ["ELEMENTWISE", "check_class", "hooked"]
