"""`dead` removes unused ops."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import capture
from autopar.passes.dead_code_elimination import dead
from tests.passes.programs import program, targets


def test_what_is_not_read_is_dropped_and_the_order_stays() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        (x.exp() + 1).sin()
        left, _ = (x * 2).split(2)
        return left

    assert targets(dead(program(body, torch.ones(4)))) == ["mul.Tensor", "split.Tensor"]


def test_a_parameter_that_only_dead_ops_read_is_unused() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.idle = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (x * self.idle).sum()
            return x * self.weight

    found = dead(capture(Idle(), torch.ones(4)).program)
    assert {p.value.name: p.used for p in found.parameters} == {"weight": True, "idle": False}


def test_the_count_of_batches_is_kept() -> None:
    found = dead(capture(nn.BatchNorm1d(3), torch.ones(4, 3)).program)
    assert targets(found) == ["add_.Tensor", "batch_norm.default"]


def test_statistics_are_kept_where_nothing_reads_what_is_normalised() -> None:
    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norm(x).relu()
            return x * 2

    found = dead(capture(Unread(), torch.ones(4, 3)).program)
    assert targets(found) == ["add_.Tensor", "batch_norm.default", "mul.Tensor"]
