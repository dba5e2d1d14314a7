"""`torch.utils.checkpoint` around a parallel module: the second run draws the same numbers as the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import InputError
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool


class Dropping(nn.Module):
    """Layers whose loss is linear in each weight: by the same masks, it is the product of the weight with its gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Dropout(0.5)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def repeated(options: dict[str, Any]) -> list[float]:
    """Losses of calls in a checkpoint and of one that is not, and how far gradients are from them; the calls have one input."""
    x, anchor = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.ones(1, requires_grad=True)
    parallel = autopar.parallelize(Dropping(), x, device="h100", **options)
    found = []
    for reentrant in (True,) if "pipeline" in options else (True, False):
        before = torch.get_rng_state()
        losses = [parallel(x)]
        assert torch.equal(torch.get_rng_state(), before)
        losses += [checkpoint(lambda x, _: parallel(x), x, anchor, use_reentrant=reentrant) for _ in range(2)]
        for loss in losses:  # the first one first: not in the order in which autograd would take them
            parallel.zero_grad()
            loss.backward()
            sums = [(full_tensor(p.grad) * full_tensor(p.detach())).sum() for p in parallel.parameters()]
            found += [float(loss), max(float((found - loss).abs()) for found in sums)]
    with torch.no_grad():
        before = torch.get_rng_state()
        parallel.eval()(x)
        assert torch.equal(torch.get_rng_state(), before)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": (2,), "strategy": "ddp"},
        {"mesh": (2,), "strategy": "fsdp", "microbatches": 2},
        {"mesh": {"pp": 2}, "pipeline": "pp", "microbatches": 2},
    ],
    ids=str,
)
def test_a_checkpoint_around_the_module_draws_the_same_masks_again(options: dict[str, Any], pool: WorkerPool) -> None:
    """The count of calls went on in the recomputation: gradients were of other masks than the loss."""
    ranks = pool.run(f"{__name__}:repeated", options, ranks=2, keep=True)
    assert ranks[0][::2] == ranks[1][::2]  # type: ignore[index]
    assert len({*ranks[0][::2]}) == len(ranks[0]) / 2, "each call draws by itself"  # type: ignore[index,arg-type]
    for found in ranks:
        assert found[1::2] == pytest.approx([0.0] * len(found[1::2]), abs=1e-5)  # type: ignore[index]


def test_stages_are_not_called_in_a_checkpoint_that_would_call_them_in_their_own_backward() -> None:
    """Their ranks waited for each other without end."""
    x = torch.randn(8, 8, requires_grad=True)
    parallel = autopar.parallelize(Dropping(), x.detach(), {"pp": 1}, device="h100", pipeline="pp", stages=2, microbatches=2)
    with pytest.raises(InputError, match=r"pipeline stages cannot be called in torch\.utils\.checkpoint"):
        checkpoint(parallel, x, use_reentrant=False)
