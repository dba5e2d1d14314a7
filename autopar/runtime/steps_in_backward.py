"""Overlaps optimizer steps with the backward: weights stored on the host or the disk are stepped while the device computes.

A weight's step begins as soon as its gradient is complete, on a background thread, one weight after the other.
`optimizer.step()` waits for these steps and steps all other weights. ZeRO-Offload copies and steps in the same order within one
step of the loop.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch
from torch import optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.errors import InputError
from autopar.runtime.single_steps import check_single_steps, local, only

LATER = "leave step_in_backward out: then all are stepped after the backward"


class StepsInBackward:
    """The hooks of one optimizer and of the parameters that it steps in the backward.

    Args:
        optimizer: one that computes element by element.
        parameters: those that are stepped in the backward.
        more: whether gradients of further micro-batches are still to come.
        scaled: whether the loss is scaled, so that gradients are not final before the step.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        parameters: Iterable[torch.Tensor],
        more: Callable[[], bool],
        scaled: Callable[[], bool],
    ) -> None:
        check_single_steps(optimizer, "stepped in the backward")
        self._optimizer, self._more, self._scaled = weakref.ref(optimizer), more, scaled
        self._thread = ThreadPoolExecutor(1, "autopar-step")
        self._steps: dict[torch.Tensor, tuple[Future[None], torch.Tensor, int]] = {}  # step, gradient and its version
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
        install()
        _begun[optimizer] = self

    def _ready(self, parameter: torch.Tensor) -> None:
        """Step a parameter whose gradient is complete."""
        if self._more():
            return
        if parameter in self._steps:
            raise InputError("a second backward came before optimizer.step(), and the first has stepped weights", fix=LATER)
        if self._scaled():
            raise InputError("the loss is scaled: weights cannot be stepped before their gradients are checked", fix=LATER)
        assert parameter.grad is not None, "it was accumulated"
        version = local(parameter.grad)._version
        self._steps[parameter] = self._thread.submit(self._step, parameter), parameter.grad, version

    def _step(self, parameter: torch.Tensor) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None, "its parameters are trained"
        _inside.set(True)
        with only(optimizer, parameter):
            optimizer.step()

    def check_call(self) -> None:
        """Raise InputError if weights were stepped: a forward would read some weights before their step and others after it."""
        if self._steps:
            raise InputError("a forward came before optimizer.step(), and the backward has stepped weights", fix=LATER)

    def before(self) -> None:
        """Wait for the pending steps, and hide their gradients until all other weights are stepped."""
        steps, self._steps = self._steps, {}
        for step, _, _ in steps.values():
            step.result()
        for parameter, (_, gradient, version) in steps.items():
            if parameter.grad is not gradient or local(gradient)._version != version:
                what = "gradients were changed after the backward, which had stepped their weights: clipped, scaled or dropped"
                raise InputError(what, fix=LATER)
            self._gradients[parameter], parameter.grad = gradient, None

    def after(self) -> None:
        """Restore the hidden gradients."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._gradients = {}


_inside = contextvars.ContextVar("inside", default=False)  # true on the stepping thread: context variables are per thread
_begun = weakref.WeakKeyDictionary[optim.Optimizer, StepsInBackward]()


@cache
def install() -> None:
    """Make every optimizer's own step skip weights stepped in the backward, before other hooks see their gradients."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    if optimizer in _begun and not _inside.get():
        _begun[optimizer].before()


def _after(optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    if optimizer in _begun and not _inside.get():
        _begun[optimizer].after()


__all__ = ["StepsInBackward", "install"]
