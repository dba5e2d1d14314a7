"""Frozen parameters that forward writes are kept like buffers; writes that autograd would not see are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.plan.options import Options
from autopar.runtime.workers import WorkerPool
from autopar.verify.verification import verify
from tests.capture import interpreter

X = torch.linspace(-1, 1, 64).reshape(8, 8)


class Taught(nn.Module):
    """A student, and a frozen teacher that averages it in forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for taught, own in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                taught.mul_(0.9).add_(own, alpha=0.1)
            target = self.teacher(x)
        return (self.student(x) - target).square().mean()


class Afterwards(Taught):
    """It is read before it is written, in parts too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.student(x) - self.teacher(x)).square().mean()
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
            self.teacher.bias[:4] += self.student.bias[4:]
        return loss


class ByData(Taught):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for taught, own in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            taught.data.mul_(0.9).add_(own.data, alpha=0.1)
        return (self.student(x) - self.teacher(x)).square().mean()


MODELS = [Taught, Afterwards, ByData]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", ["fsdp", "megatron", "auto"])
def test_numbers_and_what_is_written_are_the_users(model: type[Taught], strategy: str, pool: WorkerPool) -> None:
    report = verify(model(), X, (2,), None, Options(strategy=strategy), pool)
    assert report.ok
    assert {row.name for row in report.rows if row.what == "buffer"} == {"teacher.weight", "teacher.bias"}


@pytest.mark.parametrize("model", MODELS)
def test_steps_of_training_go_on_from_what_was_written(model: type[Taught]) -> None:
    user = model()
    parallel = autopar.parallelize(copy.deepcopy(user), X, (1,))
    for one in (user, parallel):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            one(X).backward()
            optimizer.step()
    assert list(dict(parallel.named_parameters())) == list(dict(user.named_parameters()))
    for name, tensor in user.state_dict().items():
        torch.testing.assert_close(parallel.state_dict()[name], tensor)


class Does(nn.Module):
    def __init__(self, body: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(8, 8), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer, self.layer(x))


def clamped(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        layer.weight.clamp_(-0.1, 0.1)
    return y


def by_data(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    layer.weight.data.clamp_(-0.1, 0.1)
    return y


def other_data(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    layer.weight.data = layer.weight.data * 0.5
    return y


def negative_log_likelihood(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """It clamps a copy of the variance under no_grad."""
    return nn.functional.gaussian_nll_loss(y, torch.zeros_like(y), y.square(), eps=0.05)


def limited(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """What was read of it before, and a view of it, have the values that are written, and the gradients of the others."""
    part = y[:, :3]
    with torch.no_grad():
        y.clamp_(-0.1, 0.1).mul_(2)
    return y.sin() * part.sum()


def detached(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    y.detach().mul_(2)
    return y * 1


def in_part(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y[:2].clamp_(-0.1, 0.1)
    return y * 1


@pytest.mark.parametrize("body", [negative_log_likelihood, limited, detached, in_part])
def test_a_write_of_which_autograd_does_not_hear_leaves_the_gradient(
    body: Callable[..., torch.Tensor], pool: WorkerPool
) -> None:
    assert verify(Does(body), X, (2,), None, Options(strategy="fsdp"), pool).ok


def of_a_part(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    y.data[:, :2] = 0
    return y * 1


@pytest.mark.parametrize(
    "body, what, fix",
    [
        (clamped, "aten.clamp_.default changes the parameter layer.weight", "freeze the parameter"),
        (by_data, "aten.clamp_.default changes the parameter layer.weight", "freeze the parameter"),
        (other_data, r"a tensor of shape \(8, 8\) is given other .data", "x.data.copy_"),
        (of_a_part, "writes through .data into a tensor with a gradient", "torch.where"),
    ],
)
def test_what_autograd_would_not_see_is_refused(body: Callable[..., torch.Tensor], what: str, fix: str) -> None:
    with pytest.raises(CaptureError, match=rf"{what}[^\n]*\n(.*\n)*.*{fix}"):
        capture(Does(body), X)


def test_data_that_is_set_to_itself_is_no_write() -> None:
    """As losses of pytorch-metric-learning do, to have their weights where the batch is."""

    def moved(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
        layer.weight.data = layer.weight.data.to(y.device, y.dtype)  # type: ignore[union-attr]
        return y @ layer.weight  # type: ignore[operator]

    interpreter.check(Does(moved), X)


def test_data_that_is_read_is_a_detached_tensor() -> None:
    interpreter.check(Does(lambda layer, y: y * y.data.mean() + layer.weight.data), X)
