"""A loss whose backward has run: `loss.backward()` hands over the gradients that are there, times the gradient of the loss.

Gradients are linear in the gradient of the loss, so any later factor of the loss (a share of the labels, one of several
batches, a loss scale) scales them. They go through autograd, which adds them to `.grad` and calls hooks.

A step of several micro-batches hands its gradients over alike (`hooks_once`), to the parameters that have hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.storage import to_local

PerParameter = Sequence[torch.Tensor | None]


class ComputedGradients:
    """The gradients of a step that has run, until a backward takes them.

    Args:
        gradients: of `scale` times the loss, by parameter; None for parameters that do not lead to it.
        scale: the factor of the loss, shape ().
        told: called when they are taken.
    """

    def __init__(self, gradients: PerParameter, *, scale: torch.Tensor, told: Callable[[], None]) -> None:
        self._gradients: PerParameter | None = gradients
        self._scale, self._told = scale, told

    def attached(
        self, scalars: Mapping[int, torch.Tensor], loss: int, parameters: Sequence[nn.Parameter]
    ) -> dict[int, torch.Tensor]:
        """The scalars, of shape (), as results of these parameters; only the loss among them can be differentiated."""
        anchor = torch.ones((), requires_grad=True)  # for a rank whose parameters are all frozen: it has a backward like others
        found = _Attached.apply(self, [*scalars].index(loss), len(scalars), *scalars.values(), anchor, *parameters)  # type: ignore[no-untyped-call]
        return dict(zip(scalars, found, strict=True))

    def taken(self, factor: torch.Tensor) -> PerParameter:
        """The gradients times `factor`, the gradient of the loss; they are scaled in place, and can be taken once."""
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            raise RuntimeError("the loss of a pipeline has no second backward: the first has handed its gradients over")
        self._told()
        for gradient in gradients:
            if gradient is not None:
                to_local(gradient).mul_(factor / self._scale)
        return gradients


@contextmanager
def set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, parameters have no gradients and no hooks: these belong to the backward that hands the computed gradients
    over.
    """
    before = [(parameter.grad, parameter._backward_hooks, parameter._post_accumulate_grad_hooks) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
        parameter._backward_hooks, parameter._post_accumulate_grad_hooks = {}, {}
    try:
        yield
    finally:
        for parameter, (gradient, hooks, after) in zip(parameters, before, strict=True):
            parameter.grad, parameter._backward_hooks, parameter._post_accumulate_grad_hooks = gradient, hooks, after


@contextmanager
def hooks_once(parameters: Iterable[nn.Parameter], own: object) -> Iterator[None]:
    """Around the backwards of a step: hooks of parameters are called when it ends, with the gradient of the whole batch.

    A hook that is a method of `own` stays active: it handles micro-batches itself.
    """
    hooked = [parameter for parameter in parameters if parameter.requires_grad and _has_hooks(parameter, own)]
    with set_aside(hooked):
        yield
        found = [(parameter, parameter.grad) for parameter in hooked if parameter.grad is not None]
    if found:
        trained, gradients = zip(*found, strict=True)
        torch.autograd.backward(trained, gradients)


def _has_hooks(parameter: nn.Parameter, own: object) -> bool:
    after = (parameter._post_accumulate_grad_hooks or {}).values()
    return bool(parameter._backward_hooks) or any(own is None or getattr(hook, "__self__", None) is not own for hook in after)


class _Context(Protocol):
    computed: ComputedGradients
    loss: int
    scalars: int

    def set_materialize_grads(self, value: bool) -> None: ...


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, computed: ComputedGradients, loss: int, scalars: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.computed, ctx.loss, ctx.scalars = computed, loss, scalars
        ctx.set_materialize_grads(False)
        return tuple(scalar.clone() for scalar in tensors[:scalars])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Context, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        factor = gradients[ctx.loss]
        if factor is None or sum(gradient is not None for gradient in gradients) > 1:
            what = "a pipeline differentiates its loss alone, and another of its outputs was differentiated"
            raise InputError(what, fix="add it to the loss in the model's own forward")
        return (None,) * (3 + ctx.scalars + 1) + (*ctx.computed.taken(factor),)


__all__ = ["ComputedGradients", "hooks_once", "set_aside"]
