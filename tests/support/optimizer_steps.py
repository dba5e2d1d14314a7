"""Optimizer steps of a parallel module, compared with those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import functional

from autopar.runtime.storage import full_tensor

Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]
Wrap = Callable[[optim.Optimizer], optim.Optimizer]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()


def sample() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def stepped_alike(parallel: nn.Module, make: Make, wrap: Wrap, *, rtol: float, atol: float) -> optim.Optimizer:
    """The wrapped optimizer of a parallel module after three steps, whose weights are then those of `model` in one process.

    Before the last step its state is saved, and loaded by another.
    """
    x, plain = sample(), model()
    pair = [(plain, make(plain.parameters())), (parallel, wrap(make(parallel.parameters())))]
    for step in range(3):
        if step == 2:
            state = get_optimizer_state_dict(parallel, pair[1][1])
            pair[1] = parallel, wrap(make(parallel.parameters()))
            set_optimizer_state_dict(parallel, pair[1][1], state)
        for module, optimizer in pair:
            functional.mse_loss(module(x), x.sin()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for own, expected in zip(parallel.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(full_tensor(own.detach()), expected, rtol=rtol, atol=atol), make
    return pair[1][1]
