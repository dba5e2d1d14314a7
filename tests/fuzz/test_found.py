"""Regressions found by fuzzing, unchanged."""

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


class Ignored(nn.Module):
    """A mean over no targets, which is NaN in torch as well."""

    def forward(self, x0: torch.Tensor, x1: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss0": nn.functional.cross_entropy(x0.cumsum(0).sum(dim=0, keepdim=True), x1, ignore_index=0)}


def test_what_is_nan_for_the_user_is_to_be_nan() -> None:
    with ThreadedRanks() as world:
        found = check(Ignored, lambda n: {"x0": torch.randn(n, 6), "x1": torch.tensor([0])}, Setting(plans=(0, 1)), world)
    assert found.equal == 2


class NearlyEqual(nn.Module):
    """A maximum whose two largest elements differ by less than a rounding of bfloat16: either may get the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.m0 = nn.LayerNorm((2,))
        self.m1 = nn.Linear(2, 12, bias=True)
        self.m2 = nn.Linear(2, 5, bias=True)
        self.m3 = nn.Parameter(torch.randn(4, 4, 6))

    def forward(self, x0: torch.Tensor, x1: torch.Tensor) -> dict[str, torch.Tensor]:
        v4 = self.m1(self.m0(x0))
        v6 = v4 @ v4.transpose(-1, -2) / 12
        v7 = torch.einsum("...ij,ijk->...jk", v6, self.m3)
        v10 = v6.amax(dim=0, keepdim=True)
        loss = nn.functional.cross_entropy(v10, x1, label_smoothing=0.1)
        return {"loss0": loss, "out0": v10, "out2": v7 / (1 + v7.abs().amax(1, keepdim=True))}


def nearly_equal(batch: int) -> dict[str, torch.Tensor]:
    return {"x0": torch.randn(batch, 2), "x1": torch.randint(0, 4, (1,))}


def test_in_bfloat16_another_element_may_be_the_largest() -> None:
    setting = Setting(plans=(4,), precision="bf16")
    with ThreadedRanks() as world:
        assert check(NearlyEqual, nearly_equal, setting, world).equal == 1
