"""A repository's own CheckpointFunction counts as a call of the function that it runs; if it does more, it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.capture import interpreter

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


class Listed(Function):
    """As in guided-diffusion and latent-diffusion: gradients of what it is given."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], length: int, *args: torch.Tensor) -> Any:
        ctx.run, ctx.inputs, ctx.parameters = run, list(args[:length]), list(args[length:])
        with torch.no_grad():
            return ctx.run(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            out = ctx.run(*(x.view_as(x) for x in inputs))
        return (None, None, *torch.autograd.grad(out, inputs + ctx.parameters, gradients, allow_unused=True))


class Reentrant(Function):
    """As torch's own was: its backward leaves gradients in whatever the callable reads."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *args: torch.Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return run(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.run(*inputs)
        torch.autograd.backward(out, gradients)
        return None, *(x.grad for x in inputs)


class Clamping(Reentrant):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return Reentrant.backward(ctx, *(gradient.clamp(-1, 1) for gradient in gradients))


class Scaling(Reentrant):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *args: torch.Tensor) -> Any:
        return Reentrant.forward(ctx, run, *args) * 2


class Does(nn.Module):
    def __init__(self, run: Callable[[Does, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.run = nn.Linear(6, 6).double(), nn.Linear(6, 6).double(), run

    def block(self, y: torch.Tensor) -> torch.Tensor:
        return self.layer(y).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, self.first(x)).square().sum()


def with_parameters(model: Does, y: torch.Tensor) -> Any:
    return Listed.apply(model.block, 1, y, *model.layer.parameters())


def nested(model: Does, y: torch.Tensor) -> Any:
    return Listed.apply(lambda z: with_parameters(model, z).sin(), 1, y, *model.layer.parameters())


def of_a_module(model: Does, y: torch.Tensor) -> Any:
    return Reentrant.apply(model.layer, y)


def of_two_results(model: Does, y: torch.Tensor) -> Any:
    one, other = Reentrant.apply(lambda z, w: (model.block(z) * w, z + w), y, y.cos())
    return one * other


@pytest.mark.parametrize("run", [with_parameters, nested, of_a_module, of_two_results])
def test_a_checkpoint_has_the_gradients_of_what_it_runs(run: Callable[[Does, torch.Tensor], Any]) -> None:
    model = Does(run)
    program = capture(model, X).program
    expected, found = trained(model, model(X)), trained(model, interpreter.outputs(program, model, [X])[0])
    assert expected.keys() == found.keys() == {name for name, _ in model.named_parameters()}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def trained(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients that a backward leaves in parameters."""
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def without_parameters(model: Does, y: torch.Tensor) -> Any:
    return Listed.apply(model.block, 1, y)


def of_what_needs_no_gradient(model: Does, y: torch.Tensor) -> Any:
    return Reentrant.apply(model.block, y.detach()) + y


def clamping(model: Does, y: torch.Tensor) -> Any:
    return Clamping.apply(model.block, y)


def scaling(model: Does, y: torch.Tensor) -> Any:
    return Scaling.apply(model.block, y)


@pytest.mark.parametrize("run", [without_parameters, of_what_needs_no_gradient, clamping, scaling])
def test_what_loses_or_changes_gradients_is_refused(run: Callable[[Does, torch.Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"the backward of .* would be lost"):
        capture(Does(run), X)
