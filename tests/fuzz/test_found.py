"""What fuzzing found, as it was found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.runtime.threaded_ranks import ThreadedRanks
from tests.fuzz.trial import Setting, check

pytestmark = pytest.mark.filterwarnings("ignore")


class Unread(nn.Module):
    """Weights of which operators run that do not lead to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.m0 = nn.Embedding(8, 4)
        self.m1 = nn.BatchNorm1d(4)
        self.m2 = nn.Embedding(6, 4)
        self.m3 = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x0: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor) -> dict[str, torch.Tensor]:
        v2 = self.m0(x1)
        v3 = v2.flatten(0, 1)
        v4 = self.m1(v3)
        v4.softmax(0)
        v7 = self.m2(x2)
        v8 = self.m3(v7, v7, v7, need_weights=True)[0]
        return {"loss0": v8.pow(2).mean(), "out1": v7}


def unread(batch: int) -> dict[str, torch.Tensor]:
    words = torch.randint(0, 6, (batch, 4))
    return {"x0": torch.randn(batch, 4, 4), "x1": words, "x2": words}


def test_a_bucket_of_weights_that_do_not_lead_to_the_loss_has_no_gradient() -> None:
    with ThreadedRanks() as world:
        assert check(Unread, unread, Setting(sizes=(2, 2), plans=(0, 1, 2, 3)), world).equal == 4
