"""What differs between training and evaluation follows the module's mode, whichever operator it stands in.

Where only flags differ that the emitted code switches, one graph serves both modes; else evaluation has a plan of its own.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import autopar
from autopar.plan.options import Options
from autopar.planning.planner import connected_mesh


class Flagged(nn.Module):
    """Recurrent dropout, alpha dropout, and norms with and without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, 2, dropout=0.5)
        self.kept = nn.InstanceNorm1d(8, track_running_stats=True)
        self.own = nn.BatchNorm1d(8, track_running_stats=False)
        self.drop = nn.AlphaDropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.kept(self.rnn(x)[0].transpose(1, 2)).transpose(1, 2)
        return self.drop(self.own(kept.flatten(0, 1))).square().mean()  # type: ignore[no-any-return]


def test_every_flag_of_training_follows_the_module() -> None:
    torch.manual_seed(0)
    model, x = Flagged(), torch.randn(4, 6, 8)
    parallel = autopar.parallelize(copy.deepcopy(model), (x,), connected_mesh((1,), Options(device="cpu")), device="cpu")
    assert not torch.equal(parallel(x), parallel(x)), "training draws"
    parallel.eval()
    model.load_state_dict(parallel.state_dict())
    torch.testing.assert_close(parallel(x), model.eval()(x))
    torch.testing.assert_close(parallel(x), parallel(x), rtol=0, atol=0)
