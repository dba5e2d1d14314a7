"""Several calls of one model, each planned over the parameters of the first, train them like the sequential model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool


class Net(nn.Module):
    """With labels it has a loss, with a mask it leaves some of it out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        found = self.body(x) if mask is None else self.body(x) * mask
        return {"y": found} if labels is None else {"y": found, "loss": functional.mse_loss(found, labels)}


def trained(_: None) -> None:
    """Two steps by two calls of different arguments, and a third call without labels."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    mask = (x > 0).float()
    plain = Net()
    first = autopar.parallelize(Net(), {"x": x, "labels": x}, (2,), device="h100", strategy="fsdp")
    masked = autopar.parallelize(Net(), {"x": x, "labels": x, "mask": mask}, (2,), device="h100", over=first)
    scored = autopar.parallelize(Net().eval(), {"x": x}, (2,), device="h100", mode="inference", over=first)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.05) for module in (plain, first)]
    for given in ({}, {"mask": mask}):
        losses = [called(x=x, labels=x, **given)["loss"] for called in (plain, masked if given else first)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(full_tensor(scored(x=x)["y"]), plain(x)["y"], rtol=1e-4, atol=1e-5)


def test_calls_with_other_arguments_train_the_same_parameters(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:trained", ranks=2, keep=True)
