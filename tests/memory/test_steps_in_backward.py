"""Optimizer steps during the backward, for weights stored on the host or the disk."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputError
from tests.memory.test_disk import with_disk
from tests.memory.test_host_memory import Products

PLACES = {"first.weight": "*, H", "second.weight": "*, D", "third.weight": "*, I"}
OFFLOAD = {"offload": "disk", "host_memory": "1GB", "disk_memory": "1GB"}


def made(**options: object) -> tuple[nn.Module, torch.Tensor, nn.Module]:
    """A model with a batch, and its parallel module with a weight in each place."""
    torch.manual_seed(0)
    model, batch = Products(), torch.randn(16, 32)
    return model, batch, autopar.parallelize(model, batch, (1,), device=with_disk(), constraints=PLACES, **OFFLOAD, **options)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("runs", [1, 4])
@pytest.mark.parametrize("local", [False, True])
def test_numbers_are_those_of_a_step_after_the_backward(runs: int, local: bool) -> None:
    model, batch, parallel = made(microbatches=runs)
    _, _, other = made(microbatches=runs)
    optimizers = [adamw(parallel), adamw(other)]
    if local:
        autopar.step_locally(optimizers[0])  # whose hooks have been there before
    autopar.step_in_backward(optimizers[0], parallel)
    rates = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    for _ in range(3):
        for module, optimizer, rate in zip((parallel, other), optimizers, rates, strict=True):
            optimizer.zero_grad()
            module.step(batch)
            optimizer.step()
            rate.step()
        for mine, theirs in zip(parallel.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)
    assert not torch.equal(parallel.first.weight, model.first.weight)
    assert [int(state["step"]) for state in optimizers[0].state.values()] == [3] * 6


def test_a_weight_is_stepped_when_its_backward_ends() -> None:
    model, batch, parallel = made()
    optimizer = autopar.step_in_backward(adamw(parallel), parallel)
    parallel(batch).backward()
    optimizer.step(None)
    stepped = {name for name, parameter in parallel.named_parameters() if parameter in optimizer.state}
    assert stepped == {name for name, _ in model.named_parameters()}

    _, _, parallel = made()
    optimizer = adamw(parallel)
    autopar.step_in_backward(optimizer, parallel)
    seen: list[bool] = []
    parallel.third.weight.register_post_accumulate_grad_hook(lambda _: seen.append(parallel.first.weight in optimizer.state))
    parallel(batch).backward()
    until = time.monotonic() + 60
    while not {parallel.first.weight, parallel.second.weight} <= optimizer.state.keys() and time.monotonic() < until:
        time.sleep(0.001)
    assert optimizer.state.keys() == {parallel.first.weight, parallel.second.weight}  # before the optimizer's own step
    assert seen == [False]


def test_what_changes_gradients_before_the_step_is_an_error() -> None:
    _, batch, parallel = made()
    optimizer = autopar.step_in_backward(adamw(parallel), parallel)
    parallel(batch).backward()
    nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
    with pytest.raises(InputError, match="gradients were changed after the backward, which had stepped their weights"):
        optimizer.step()
    parallel(batch).backward()
    for call in (parallel, parallel.step, parallel.eval()):
        with pytest.raises(InputError, match="a forward came before"):  # some weights are those of the next step
            call(batch)
    optimizer.step()
    losses = [parallel.train()(batch), parallel(batch)]
    losses[0].backward()
    with pytest.raises(InputError, match="a second backward came before"):
        losses[1].backward()


def test_what_cannot_be_stepped_in_the_backward_is_refused() -> None:
    model, batch, parallel = made()
    with pytest.raises(InputError, match="is not known to compute each element by itself"):
        autopar.step_in_backward(torch.optim.Adafactor(parallel.parameters()), parallel)
    plain = autopar.parallelize(model, batch, (1,))
    with pytest.raises(InputError, match="has trained weights on the host or the disk"):
        autopar.step_in_backward(adamw(plain), plain)
