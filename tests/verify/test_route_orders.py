"""A weight that is cut before it is gathered travels in the message of those that are cut behind it (`test_buckets`)."""

from __future__ import annotations

import json

import torch
from torch import nn

import autopar
from autopar.plan.options import Options
from autopar.runtime.workers import WorkerPool
from autopar.verify.verification import verify

MESH = (2, 2)
CUT = {"S(0), I -> R, I": "S(0), P -> R, P", "R, I -> R, P": "S(0), I -> S(0), P"}  # in place of gathering first


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()  # type: ignore[no-any-return]


def test_weights_that_share_a_message_in_other_orders_have_equal_numbers(pool: WorkerPool) -> None:
    model, x = Blocks(*(Block() for _ in range(3))), torch.randn(8, 4, 64)
    plan = autopar.plan(model, x, MESH, device="h100", strategy="fsdp+tp")
    said = json.loads(plan.to_json())
    biases = [name for name in said["routes"] if name.endswith("down.bias")]
    assert all(set(said["routes"][name]) == {*CUT} for name in biases)
    for name in biases:
        said["routes"][name] = [CUT[step] for step in reversed(said["routes"][name])]
        said["recompute"][name] = [CUT.get(step, step) for step in said["recompute"][name]]
    other = autopar.Plan.from_json(json.dumps(said))
    assert verify(model, x, MESH, other, Options(), pool).ok
