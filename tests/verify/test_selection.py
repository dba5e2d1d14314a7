"""Reductions and losses over a selection by mask have equal numbers on a mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.plan.options import Options
from autopar.verify.verification import verify
from tests.support import table
from tests.support.threads import Threads

Body = Callable[["Does", torch.Tensor, torch.Tensor], torch.Tensor]
X = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0))


class Does(nn.Module):
    """A layer, and a body that gets the module, its input and the layer's output."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x, self.layer(x))


def chosen(x: torch.Tensor) -> torch.Tensor:
    """Some of the places of a batch of sequences."""
    return x[..., 0] > 0


def cross_entropy(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = chosen(x)
    return F.cross_entropy(m.head(y)[mask], x.argmax(-1).clamp(max=3)[mask])


def weighted(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Targets out of range where the mask is false, a mask that is computed twice, and a weight for each class."""
    labels = torch.where(chosen(x), x.argmax(-1).clamp(max=3), -7)
    given = torch.arange(1, 5, dtype=x.dtype, device=x.device)
    return F.cross_entropy(m.head(y)[labels != -7], labels[labels != -7], weight=given, label_smoothing=0.1)


def probabilities(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = chosen(x)
    return F.cross_entropy(m.head(y)[mask], x[mask][:, :4].softmax(-1))


def one_by_one(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = chosen(x)
    each = F.nll_loss(m.head(y)[mask].log_softmax(-1), x.argmax(-1).clamp(max=3)[mask], reduction="none")
    return (each * x[mask][:, 1].square()).sum() / mask.sum()


def per_element(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = chosen(x)
    return F.mse_loss(y[mask], x[mask]) + F.smooth_l1_loss(y[x > 0.5], x[x > 0.5], reduction="sum")


def logarithm(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Defined only where the mask is true; a layer comes after it."""
    return m.head(y.where(x > 0, -1.0).square()[chosen(x)].log()).square().mean()


def undefined_elsewhere(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    positive = y > 0
    return y[positive].log().sum() + torch.masked_select(y, positive).sqrt().mean()


def by_places(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    places = chosen(x).flatten().nonzero().squeeze(-1)
    return m.head(y.flatten(0, 1)[places]).relu().mean(0).square().sum()


def counted(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    picked = m.head(y)[chosen(x)]
    right = (picked.argmax(-1) == x[chosen(x)].argmax(-1)).float().mean()
    return picked.square().sum() / picked.shape[0] + picked.sum() / (2 * picked.shape[0] + 1) + 0 * right


def along_another_dim(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kept = y[:, x[0, :, 0] > 0]
    return F.layer_norm(m.head(kept), (4,)).square().mean((0, 1)).sum() + kept.mean(-1).sum()


def products(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = y[chosen(x)]
    return (rows.t() @ m.head(rows)).square().sum()


def put_back(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Rows of both kinds go through layers of their own, and back to where they were."""
    mask = chosen(x)
    y = y.masked_scatter(mask.unsqueeze(-1), m.layer(y[mask]).sin())
    return y.masked_scatter(~mask.unsqueeze(-1), F.layer_norm(y[~mask], (6,))).square().mean()


def alignments(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """CTC as transformers calls it: the targets of all sequences one after the other, and how many each has."""
    labels = torch.where(x[:, :4, 1] > 0, x[:, :4].argmax(-1).clamp(1, 3), -100)
    mask = labels >= 0
    steps = torch.full((4,), 8, device=x.device)
    scores = m.head(y).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, labels.masked_select(mask), steps, mask.sum(-1), zero_infinity=True)


def with_as_many(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Rows whose number follows from what is added to them, put back in place; their order is the mask's."""
    mask, more = x[..., 0].argsort(-1).argsort(-1) < 3, y[:, :3].reshape(12, 6)
    changed = y.clone()
    changed[mask, :] = changed[mask, :] + more.sin()
    changed[~mask] = m.layer(changed[~mask]).sin()
    places = mask.flatten().nonzero() * more[:, :1]
    return changed.square().mean() + (y[mask].relu().cumsum(0) * more).mean() + places.mean()


def by_where(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The places of a mask as an index: of what is written and of what is read."""
    changed = y * 2
    changed[torch.where(x[..., 0] > 0)] = 0.5
    return changed.square().mean() + y[torch.where(chosen(x))].mean()


def written(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Rows that are written in place, and some that are added to in place."""
    rows, changed = y[chosen(x)], y * 2
    rows.mul_(2).sin_()
    changed[chosen(x)] += m.layer(x[chosen(x)])
    return rows.sum() + changed.square().mean()


def distinct(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Rows by the distinct places of what is largest, which are as many as there are columns, or fewer."""
    found = torch.unique(x.argmax(-1))
    return m.head(y[0][found]).square().sum() + y[1, found].mean()


def joined(m: Does, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = torch.cat([y[chosen(x)], y[0].sin(), y[chosen(x)].exp()])
    ones = y.new_ones(y[chosen(x)].shape[0]).cos().sum()
    return m.head(rows).square().mean() + ones + torch.cat([y[0, :, :2].T, y[0][x[0, :, 0] > 0].T[:2]], 1).square().sum()


BODIES = (
    joined,
    distinct,
    written,
    by_where,
    with_as_many,
    put_back,
    alignments,
    cross_entropy,
    weighted,
    probabilities,
    one_by_one,
    per_element,
    logarithm,
    undefined_elsewhere,
    by_places,
    counted,
    along_another_dim,
    products,
)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("plan", ["fsdp", 0, 1])
@pytest.mark.parametrize("body", BODIES)
def test_what_a_mask_selects_has_equal_numbers(threads: Threads, body: Body, plan: str | int) -> None:
    model, on = Does(body), table.mesh((4,))
    if isinstance(plan, int):
        made = autopar.testing.random_plan(model, X, on, seed=plan)
    else:
        made = autopar.plan(model, X, on, strategy=plan)
    report = verify(model, X, on, made, Options(), threads)
    assert report.ok, str(report)


def test_a_mean_of_nothing_is_as_in_torch() -> None:
    parallel = autopar.parallelize(Does(cross_entropy), X, (1,), device="h100")
    assert parallel(-X.abs()).isnan()
    total = autopar.parallelize(Does(lambda m, x, y: m.head(y)[chosen(x)].sum()), X, (1,), device="h100")
    assert total(-X.abs()) == 0


def written_between(y: torch.Tensor) -> torch.Tensor:
    """Two masks that read the same view of a tensor, which another name of it changes."""
    copied = y.detach().clone()
    seen = copied.view(-1)
    first = y.view(-1)[seen > 0]
    copied.add_(1)
    return (first * y.view(-1)[seen > 0]).sum()


REFUSED: dict[str, Body] = {
    "a running sum": lambda m, x, y: y[chosen(x)].cumsum(0).sum(),
    "the largest": lambda m, x, y: y[chosen(x)].amax(0).sum(),
    "a norm over the rows": lambda m, x, y: y[chosen(x)].softmax(0).sum(),
    "two masks": lambda m, x, y: (y[chosen(x)].t() @ x[chosen(-x)]).sum(),
    "rows that are cut": lambda m, x, y: y[chosen(x)].view(-1).view(-1, 3).sum(),
    "the first of them": lambda m, x, y: y[chosen(x)][0].sum(),
    "the rows themselves": lambda m, x, y: y[chosen(x)],
    "a selection of a selection": lambda m, x, y: y[chosen(x)][~chosen(x)[chosen(x)]].sum(),
    "numbers for them in turn": lambda m, x, y: (
        y[chosen(x)][:, 0] * torch.arange(y[chosen(x)].shape[0], device=x.device)
    ).sum(),
    "another order of as many rows": lambda m, x, y: (torch.cat([y[chosen(x)], y[0]]) * torch.cat([y[0], y[chosen(x)]])).sum(),
    "a write of a part": lambda m, x, y: y[chosen(x)].narrow(1, 0, 2).mul_(2).sum(),
    "masks of what is written between": lambda m, x, y: written_between(y),
    "rows put elsewhere": lambda m, x, y: y.masked_scatter(chosen(-x).unsqueeze(-1), y[chosen(x)]).sum(),
    "targets of other lengths": lambda m, x, y: F.ctc_loss(
        m.head(y).log_softmax(-1).transpose(0, 1),
        x.argmax(-1).clamp(1, 3).masked_select(chosen(x)),
        torch.full((4,), 8, device=x.device),
        chosen(-x).sum(-1),
    ),
    "unique values": lambda m, x, y: y[0][torch.unique(x.argsort(-1) * 2)].sum(),
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_mixes_the_rows_that_a_mask_selects_is_refused(body: str) -> None:
    with pytest.raises(CaptureError, match="depend") as refusal:
        capture(Does(REFUSED[body]), X)
    assert __file__ in refusal.value.details["at"]
    assert "fix" in refusal.value.details
