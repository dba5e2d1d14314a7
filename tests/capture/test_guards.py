"""Tracing leaves torch unchanged, in other threads and after every error too."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Distribution

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError

X = torch.ones(4, 6)
OWNERS = (
    *(torch, torch.Tensor, torch._C.TensorBase, torch.autograd, torch.autograd.Function, nn.functional),
    *(
        nn.utils.rnn,
        nn.modules.transformer,
        torch.amp,
        torch.autocast,
        torch.inference_mode,
        torch.utils.checkpoint,
        torch.fx.proxy,
        Distribution,
        np.random,
    ),
)


class Does(nn.Module):
    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.body(x))


def contents() -> list[dict[str, int]]:
    """What each class and module of torch holds, by identity."""
    return [{name: id(held) for name, held in vars(owner).items()} for owner in OWNERS]


def replaced(before: list[dict[str, int]], after: list[dict[str, int]]) -> set[str]:
    """The names that hold something else than before; a module that was imported since does not count."""
    pairs = zip(OWNERS, before, after, strict=True)
    return {f"{owner.__name__}.{name}" for owner, then, now in pairs for name in then if then[name] != now.get(name)}


def indexed(x: torch.Tensor) -> torch.Tensor:
    return x[[1, 0, 2, 3]] * torch.tensor([1.0, 2, 3, 4])[:, None]


def branched(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def interrupted(x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


@pytest.mark.parametrize("body, error", [(indexed, None), (branched, CaptureError), (interrupted, KeyboardInterrupt)])
def test_planning_leaves_torch_as_it_was(body: Callable[[torch.Tensor], torch.Tensor], error: type[BaseException]) -> None:
    before, modes = contents(), torch._C._len_torch_function_stack()
    if error is None:
        autopar.plan(Does(body), X, mesh=2, device="h100")
    else:
        with pytest.raises(error):
            autopar.plan(Does(body), X, mesh=2, device="h100")
    assert not replaced(before, contents())
    assert torch._C._len_torch_function_stack() == modes
    assert torch.tensor([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]


def test_only_how_an_autocast_is_made_and_inference_entered_is_changed_in_a_class_while_a_model_is_traced() -> None:
    seen: SimpleQueue[list[dict[str, int]]] = SimpleQueue()  # a list would be taken back

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.put(contents())
        return x

    before = contents()
    capture(Does(look), X)
    unseen = ("from_numpy", "get_autocast_dtype", "is_autocast_enabled", "is_grad_enabled")  # by function modes
    others = {"autocast.__init__", "inference_mode.__enter__", "inference_mode.__exit__", "torch.fx.proxy.CapturedTraceback"}
    others |= {f"numpy.random.{name}" for name in ("rand", "random", "random_sample", "uniform")}
    assert replaced(before, seen.get()) == {f"torch.{name}" for name in unseen} | others


def test_another_thread_does_not_notice_that_a_model_is_traced() -> None:
    found: list[object] = []
    stacks: list[traceback.StackSummary] = []

    def load() -> None:
        x = torch.from_numpy(np.ones(2)).requires_grad_()
        x.register_hook(lambda gradient: 2 * gradient)
        x[[0]].sum().backward()
        found.append((x.device.type, x.grad))
        stacks.append(torch.fx.proxy.CapturedTraceback.extract().summary())

    def beside(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        return x

    capture(Does(beside), X)
    assert str(found) == "[('cpu', tensor([2., 0.], dtype=torch.float64))]"
    assert "load" in [frame.name for frame in stacks[0]]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


def test_an_autograd_function_that_computes_nothing_is_seen() -> None:
    program = capture(Does(Reversed.apply), X.clone().requires_grad_()).program
    assert "Reversed" in program.ops[0].target
