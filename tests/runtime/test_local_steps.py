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
from autopar.runtime.local_steps import ELEMENTWISE, step_locally
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


def test_an_optimizer_that_needs_whole_tensors_is_refused() -> None:
    with pytest.raises(InputError, match="Adafactor is not known to compute each element by itself"):
        step_locally(optim.Adafactor([nn.Parameter(torch.zeros(2, 2))]))
