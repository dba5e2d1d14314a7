"""Models built around one operator each are captured, planned and run: equal numbers, and the collectives of the plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.operators import fit
from autopar.plan.options import Options
from autopar.planning.planner import read_program
from autopar.verify.verification import verify
from tests.support import table
from tests.support.threads import Threads

Use = Callable[["Around", torch.Tensor], torch.Tensor]


class Around(nn.Module):
    """A layer, an operator, and a square error; rows of 6 words of width 8."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.layer, self.narrow = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.gru = nn.GRU(8, 6)
        self.register_buffer("words", torch.randint(10, (48,)))
        self.register_buffer("rows", torch.randint(4, (8,)))
        self.register_buffer("identity", torch.eye(4))
        self.register_buffer("signs", torch.tensor([1.0, -1.0]).repeat(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, self.layer(x)).square().sum()


def turned(x: torch.Tensor) -> torch.Tensor:
    """Pairs of features turned by an angle, as complex numbers."""
    pairs = torch.view_as_complex(x.reshape(8, 6, 4, 2))
    turn = torch.polar(torch.ones(6, 4, dtype=x.dtype), torch.ones(6, 4, dtype=x.dtype))
    return torch.view_as_real(pairs * turn).flatten(2)


USES: dict[str, tuple[str, Use]] = {
    "index_add": ("aten.index_add", lambda m, x: torch.zeros(4, 6, 8, dtype=x.dtype).index_add(0, m.rows, x)),
    "index_put": (
        "aten.index_put",
        lambda m, x: torch.zeros(10, 8, dtype=x.dtype).index_put((m.words,), x.flatten(0, 1), accumulate=True),
    ),
    "scatter_add": (
        "aten.scatter_add",
        lambda m, x: torch.zeros(4, 8, dtype=x.dtype).scatter_add(0, m.rows[:, None].expand(8, 8), x.mean(1)),
    ),
    "windows": ("aten.im2col", lambda m, x: F.fold(F.unfold(x.view(8, 2, 3, 8), (2, 3)), (3, 8), (2, 3))),
    "a grid": (
        "aten.grid_sampler",
        lambda m, x: F.grid_sample(x[:, :, :6].view(8, 2, 3, 6), m.layer(x).view(8, 6, 4, 2).tanh(), align_corners=False),
    ),
    "a resize": ("aten.upsample_bilinear2d", lambda m, x: F.interpolate(x.view(8, 2, 3, 8), scale_factor=2.0, mode="bilinear")),
    "channels": ("aten.pixel_unshuffle", lambda m, x: F.pixel_unshuffle(F.channel_shuffle(x.view(8, 4, 2, 6), 2), 2)),
    "lstm": ("aten.lstm", lambda m, x: m.lstm(x)[0]),
    "gru": ("aten.gru", lambda m, x: m.gru(x)[0]),
    "frequencies": ("aten.fft_rfft", lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1), 6, dim=1)),
    "complex numbers": ("aten.view_as_complex", lambda m, x: turned(x)),
    "sums of absolute values": ("aten.cdist", lambda m, x: torch.cdist(x, x.flip(1) + 1, p=1.0)),
    "a solution": ("aten.linalg_solve", lambda m, x: torch.linalg.solve(m.narrow(x)[:, :4] + 9 * m.identity, m.narrow(x).mT)),
    "a norm of weights": ("aten._weight_norm", lambda m, x: x @ torch._weight_norm(m.narrow.weight, m.signs[:4, None], 0).t()),
    "margins": ("aten.cosine_embedding_loss", lambda m, x: F.cosine_embedding_loss(x[:, 0], x[:, 1], m.signs, 0.1)),
    "triplets": ("aten.triplet_margin_loss", lambda m, x: F.triplet_margin_loss(x[:, :2], x[:, 2:4], x[:, 4:])),
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("plan", ["auto", 0, 1])
@pytest.mark.parametrize("name", USES)
def test_a_model_around_an_operator_has_equal_numbers(threads: Threads, name: str, plan: str | int) -> None:
    (target, use), batch, mesh = USES[name], torch.randn(8, 6, 8), table.mesh((2, 2))
    model = Around(use)
    program = read_program(model, batch).program
    op = next(op for op in program.ops if op.target.rpartition(".")[0] == target)
    fitted = fit(op, program.values)
    assert fitted is not None
    assert not all(factor.whole for factor in fitted.factors)
    if isinstance(plan, int):
        chosen = autopar.testing.random_plan(model, batch, mesh, seed=plan)
    else:
        chosen = autopar.plan(model, batch, mesh, strategy=plan)
    report = verify(model, batch, mesh, chosen, Options(), threads)
    assert report.ok, str(report)
