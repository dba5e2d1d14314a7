"""Optimizer steps on local tensors: the numbers of the sequential optimizer, and DTensors again between steps."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.nn import functional

import autopar
from autopar.errors import InputError
from autopar.runtime.local_steps import step_locally
from autopar.runtime.step_hooks import ELEMENTWISE
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from tests.support.optimizer_steps import Make, model, sample, stepped_alike

LAYOUTS = {"0.weight": "S(1), S(0)", "0.bias": "I, S(0)", "2.weight": "I, S(1)", "2.bias": "I, I"}
FUSED: list[Make] = [functools.partial(kind, lr=0.1, fused=True) for kind in (optim.SGD, optim.AdamW, optim.Adagrad)]
MOMENTUM: Make = functools.partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True)


def compared(_: None) -> None:
    """Three steps of every optimizer beside the sequential ones; before the last its state is saved, and loaded by another."""
    parallel = autopar.parallelize(model(), sample(), (2, 2), device="h100", constraints=LAYOUTS, outputs="whole")
    start = {name: full_tensor(p.detach()).clone() for name, p in parallel.named_parameters()}
    for make in (*ELEMENTWISE, *FUSED, MOMENTUM):
        parallel.load_state_dict(start)
        optimizer = stepped_alike(parallel, make, step_locally, rtol=1e-9, atol=1e-11)
        assert {*optimizer.state} <= {*parallel.parameters()}
        kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        assert all(isinstance(value, DTensor) for value in kept if value.dim())


def test_every_optimizer_has_the_sequential_numbers_over_weights_that_are_split(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:compared", ranks=4, keep=True)


def failing(_: None) -> None:
    """A step that raises, and one with a closure: the next one is right, and the parameters are DTensors again."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, parallel = model(), autopar.parallelize(model(), x, (2,), device="h100", strategy="fsdp", outputs="whole")
    pair = [(plain, MOMENTUM(plain.parameters())), (parallel, step_locally(MOMENTUM(parallel.parameters())))]
    for module, optimizer in pair:

        def closure(module: nn.Module = module, optimizer: optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(module(x), x.sin())
            loss.backward()
            return loss

        closure()
        momentum = optimizer.param_groups[0].pop("momentum")
        with pytest.raises(KeyError):
            optimizer.step()
        optimizer.param_groups[0]["momentum"] = momentum
        optimizer.step()
        optimizer.step(closure)
        closure()
        optimizer.step()
    for own, expected in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(own.detach()), expected.detach())


def test_a_step_that_raised_or_has_a_closure_changes_nothing_for_the_next(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:failing", ranks=2, keep=True)


class Thirds(nn.Module):
    """A layer whose result is used in three parts, so that rows may be split within each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return functional.mse_loss(q.tanh() * k, v.sin())


def another_layout(_: None) -> None:
    """Steps of an optimizer whose state was taken over from that of another plan, beside those of one process."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def made(layout: str) -> tuple[nn.Module, optim.Optimizer]:
        constraints = {"qkv.weight": layout, "qkv.bias": layout}
        module = autopar.parallelize(Thirds().double(), x, (2,), device="h100", constraints=constraints)
        return module, step_locally(optim.AdamW(module.parameters(), lr=0.1))

    def stepped(module: nn.Module, optimizer: optim.Optimizer) -> None:
        for _ in range(2):
            module(x).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = Thirds().double()
    reference = optim.AdamW(plain.parameters(), lr=0.1)
    stepped(plain, reference)
    weights = {name: tensor.detach().clone() for name, tensor in plain.state_dict().items()}
    stepped(plain, reference)
    for before, after in (("S(0)", "S(0/3)"), ("S(0/3)", "S(0)")):
        first, second = made(before), made(after)
        stepped(*first)
        second[0].load_state_dict(weights)
        second[1].load_state_dict(first[1].state_dict())
        stepped(*second)
        for own, expected in zip(second[0].parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full_tensor(own.detach()), expected.detach())


def test_state_of_another_plan_is_moved_to_where_its_weights_lie(pool: WorkerPool) -> None:
    """Before, rows were paired with others where parts were of the same size."""
    pool.run(f"{__name__}:another_layout", ranks=2, keep=True)


def test_an_optimizer_that_needs_whole_tensors_is_refused() -> None:
    with pytest.raises(InputError, match="Adafactor is not known to compute each element by itself"):
        step_locally(optim.Adafactor([nn.Parameter(torch.zeros(2, 2))]))
    with pytest.raises(InputError, match="Muon is not known to compute each element by itself"):
        step_locally(optim.Muon([nn.Parameter(torch.zeros(2, 2))]))
