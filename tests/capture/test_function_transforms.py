"""Transforms of `torch.func` in forward become operators; values and gradients are the module's, on a mesh too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp
from torch.nn import functional

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.plan.options import Options
from autopar.runtime.workers import WorkerPool
from autopar.verify.verification import verify
from tests.capture import interpreter

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Does(nn.Module):
    """A linear layer, and a body that gets it and its result."""

    def __init__(self, body: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.body = nn.Linear(6, 6), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer, self.layer(x))


def of_a_row(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row.softmax(-1).cumsum(0))(y)


def of_a_layer(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(layer)(y).relu()


def of_a_mask(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """As transformers makes masks: one level for each dim, and a function that reads a tensor from around it."""
    places = torch.arange(4, device=y.device)
    rule = torch.vmap(lambda row, column: (row >= column) & (y[0, row] > -9), in_dims=(None, 0))
    mask = torch.vmap(rule, in_dims=(0, None))(places, places)
    return (y @ y.t()).masked_fill(~mask, 0.0)


def of_two(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    products, sums = torch.vmap(lambda a, b, scale=1.0: (a @ b.t(), a.sum(0) * scale), in_dims=(0, None))(y.view(2, 2, 6), y)
    return products.sum((0, 1))[:, None] * sums.sum()


Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def pulled_back(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    out, pull, aux = vjp(lambda a: (layer(a).tanh(), a.sum()), y, has_aux=True)
    return out + pull(y.cos())[0] * aux


def pushed_forward(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """A softmax and a product with weights, in forward mode."""
    return sum(jvp(lambda a: layer(a).tanh().softmax(-1), (y,), (y.cos(),)))


def of_losses(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """Operators whose backward has results that are left out, or is spelt out."""
    labels = torch.arange(4, device=y.device)
    return grad(lambda a: functional.cross_entropy(functional.layer_norm(a, (6,)), labels))(y)


def of_weights(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """A step of an inner loop, as in meta-learning."""
    weights = dict(layer.named_parameters())
    found, loss = grad_and_value(lambda held: functional_call(layer, held, (y,)).tanh().square().sum())(weights)
    stepped = {name: weight - 0.1 * found[name] for name, weight in weights.items()}
    return functional_call(layer, stepped, (y,)) * loss


def of_an_energy(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """Forces of each sample, and what the function does not differentiate."""
    return torch.vmap(grad(lambda a: (layer(a).tanh() * a.detach()).sum()))(y)


def of_gradients(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return grad(lambda b: grad(lambda a: a.tanh().square().sum())(b).cos().sum())(y)


def of_jacobians(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    one, other = (torch.vmap(kind(lambda a: layer(a).tanh()))(y) for kind in (jacrev, jacfwd))
    return one.sum(1) + other.square().sum(2)


def of_a_hessian(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(hessian(lambda a: a.tanh().square().sum()))(y).sum(1)


BATCHED = [of_a_row, of_a_layer, of_a_mask, of_two]
DERIVED = [pulled_back, pushed_forward, of_losses, of_weights, of_an_energy, of_gradients, of_jacobians, of_a_hessian]


@pytest.mark.parametrize("body", [*BATCHED, *DERIVED])
def test_a_transform_is_captured_as_operators(body: Body) -> None:
    model = Does(body)
    interpreter.check(model, X)
    assert autopar.plan(model, X, (2,), device="h100", strict=True).step_time > 0


@pytest.mark.parametrize("body", [of_weights, of_an_energy])
def test_the_parallel_module_has_the_numbers_of_the_users(body: Body, pool: WorkerPool) -> None:
    assert verify(Does(body), X, (2,), None, Options(strategy="ddp"), pool).ok


def test_what_asks_for_numbers_says_what_does_not() -> None:
    with pytest.raises(
        CaptureError, match=r"torch.func.linearize folds.*\n  at .*test_function_transforms.*\n  fix  torch.func.jvp"
    ):
        capture(Does(lambda _, y: torch.func.linearize(torch.tanh, y)[1](y)), X)


def test_a_statistic_whose_gradient_would_be_lost_is_refused() -> None:
    """torch takes mean and deviation of a norm for constants where it differentiates a `jvp`."""
    body = Does(lambda _, y: jvp(lambda a: functional.layer_norm(a, (6,)), (y,), (y.cos(),))[1])
    with pytest.raises(
        CaptureError, match=r"layer_norm\.default inside of a transform of torch.func has results without a gradient"
    ):
        capture(body, X)
