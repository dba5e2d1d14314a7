"""Connectionist temporal classification is captured, and gives equal numbers on a mesh."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.plan.options import Options
from autopar.verify.verification import verify
from tests.support import table
from tests.support.threads import Threads

STEPS, BATCH, CLASSES = 6, 4, 5


class Aligned(nn.Module):
    """A layer and its loss; lengths are numbers, or tensors that are given."""

    def __init__(self, *, reduction: str, numbers: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.reduction, self.numbers = nn.Linear(8, CLASSES), reduction, numbers

    def forward(self, x: torch.Tensor, targets: torch.Tensor, steps: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        given = ((STEPS,) * BATCH, (2, 1, 2, 1)) if self.numbers else (steps, lengths)
        scores = self.layer(x).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, targets, *given, reduction=self.reduction, zero_infinity=True)
        return loss.square().sum() if self.reduction == "none" else loss


@pytest.mark.one_in(3)
@pytest.mark.parametrize("plan", ["fsdp", 0, 1])
@pytest.mark.parametrize("reduction, numbers", [("mean", False), ("sum", True), ("none", False)])
def test_a_loss_of_alignments_has_equal_numbers(threads: Threads, reduction: str, numbers: bool, plan: str | int) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([2, 1, 2, 1]), torch.tensor([STEPS, 5, 4, STEPS])
    batch = torch.randn(BATCH, STEPS, 8), torch.randint(1, CLASSES, (BATCH, 2)), lengths[1], lengths[0]
    model, on = Aligned(reduction=reduction, numbers=numbers), table.mesh((2,))
    if isinstance(plan, int):
        made = autopar.testing.random_plan(model, batch, on, seed=plan)
    else:
        made = autopar.plan(model, batch, on, strategy=plan)
    report = verify(model, batch, on, made, Options(), threads)
    assert report.ok, report
