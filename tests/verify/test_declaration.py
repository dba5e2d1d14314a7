"""The user's own GPT-2, made parallel by a declaration, gives equal numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.workers import WorkerPool
from tests.support import models

RANKS = 4
CONFIGS: dict[str, dict[str, Any]] = {
    "zero1, sequence": {"parallel": {"tensor": {"size": 2, "mode": "sequence"}}, "zero": 1},
    "data 2, tensor 2": {"parallel": {"data": 2, "tensor": {"size": 2, "mode": "1d"}}},
    "2d": {"parallel": {"tensor": {"size": 4, "mode": "2d"}}},
    "auto": {"mesh": "auto", "zero": 1},
}
AXES = {"2d": [("row", "column")], "auto": [("device",), ("outer", "inner")]}


def gpt2() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, sample = models.gpt2()
    return model.double().eval(), sample


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def declared(config: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, torch.Tensor]]:
    model, sample = gpt2()
    parallel = autopar.parallelize(model, sample, config={**config, "device": "cpu"})
    return parallel.autopar.plan.axes, gradients(parallel, parallel(**sample)["loss"])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_declared_model_has_the_loss_and_gradients_of_the_users_own(pool: WorkerPool, name: str) -> None:
    model, sample = gpt2()
    wanted = gradients(model, model(**sample)["loss"])
    for axes, found in pool.run(f"{__name__}:declared", CONFIGS[name], ranks=RANKS, keep=True):  # type: ignore[misc]
        assert axes in AXES.get(name, [("data", "tensor")])
        assert found.keys() == wanted.keys()
        for tensor, value in wanted.items():
            torch.testing.assert_close(found[tensor], value, rtol=1e-9, atol=1e-9, msg=tensor)
