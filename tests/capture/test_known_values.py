"""Branches on numbers that sizes decide are resolved; branches on inputs, random numbers or written values are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.capture import interpreter

X = torch.linspace(-1, 1, 24).reshape(4, 6)
Body = Callable[[torch.Tensor], torch.Tensor]


class Does(nn.Module):
    """A linear layer, and then what a test says."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(6, 6), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer(x))


def of_a_mask(y: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(y.shape[:1], device=y.device)
    return y * 2 if (mask > 1).flatten().any().item() else y * 3


def of_no_mask(y: torch.Tensor) -> torch.Tensor:
    return y if torch.zeros_like(y).bool().any() else y.sin()


def of_steps(y: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(0, 6, 2, device=y.device)
    return y[:, : int(steps.amax())] * float(steps.sum())


def of_what_is_written(y: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(6, device=y.device)
    mask[:2].zero_()
    mask[mask == 1] = 3
    return y * 2 if mask.sum() > 11 else y


def of_an_empty_one_that_is_written(y: torch.Tensor) -> torch.Tensor:
    counts, starts = torch.arange(1, 4, device=y.device), torch.empty(3, dtype=torch.int64, device=y.device)
    starts[0] = 0
    starts[1:] = counts.cumsum(0)[:-1]
    return torch.stack([y[:, list(range(start, start + count))].sum(1) for start, count in zip(starts, counts, strict=True)])


def of_a_list(y: torch.Tensor) -> torch.Tensor:
    lengths = torch.arange(1, 4, device=y.device)
    return torch.cat([part.sum(1) for part in torch.split(y, lengths.tolist(), dim=1)])


def of_repeats(y: torch.Tensor) -> torch.Tensor:
    counts = torch.arange(4, device=y.device)
    rows, one = torch.repeat_interleave(y, counts, dim=0), torch.full((1,), 2, device=y.device)
    return (
        rows.sum(1) * counts.repeat_interleave(counts) + torch.repeat_interleave(counts)[:, None] + y.repeat_interleave(one)[:6]
    )


def of_repeats_of_a_given_length(y: torch.Tensor) -> torch.Tensor:
    counts = (y[:, 0] > 0).long() * 2 + (y[:, 0] <= 0).long() * 2  # values, but their sum is said
    return torch.repeat_interleave(y, counts, dim=0, output_size=8)


def of_distinct_values(y: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(6, device=y.device).mul(2) % 6
    runs, sorted_ = torch.unique_consecutive(steps // 4), steps.unique()
    _, counts = torch.unique_consecutive(torch.tensor([5, 5, 6, 5]), return_counts=True)
    each, of_each = torch.unique(torch.tensor([5, 5, 6, 5]), return_counts=True)
    y = y + torch.cat([y[: counts[0]], y[-len(each) :]]) * of_each[0]
    return y[:, sorted_] * 2 + torch.zeros(len(runs), 4, 3, device=y.device)[runs].sum() + torch.unique(steps).sum()


def of_tensors_in_a_list(y: torch.Tensor) -> torch.Tensor:
    counts = torch.arange(3, device=y.device)
    return y[:, :3] * torch.tensor([counts.sum(), 2, y.detach().sum()], device=y.device) + torch.as_tensor(
        [counts[1], counts[2], True]
    )


def of_a_mask_behind_what_is_written(y: torch.Tensor) -> torch.Tensor:
    mask = torch.triu(y.new_ones(4, 4), diagonal=1).bool()
    for _ in range(2):
        scores = y @ y.t()
        scores.mul_(0.5)  # computed from the mask, the second time, but elsewhere in memory
        if mask.any().item():
            scores, y = scores.masked_fill(mask, -1.0), y.sin()  # no repair of one tensor
        y = scores @ y
    return y


@pytest.mark.parametrize(
    "body",
    [
        *(of_a_mask, of_no_mask, of_steps, of_what_is_written, of_a_list, of_repeats, of_repeats_of_a_given_length),
        *(of_distinct_values, of_tensors_in_a_list, of_an_empty_one_that_is_written, of_a_mask_behind_what_is_written),
    ],
)
def test_a_number_that_sizes_decide_is_known(body: Body) -> None:
    interpreter.check(Does(body), X)


def given(y: torch.Tensor) -> torch.Tensor:
    return y * 2 if (torch.ones_like(y) > y).any() else y


def drawn(y: torch.Tensor) -> torch.Tensor:
    return y * 2 if torch.rand([], device=y.device) > 2 else y


def written(y: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(6, device=y.device)
    mask[:2] = y[0, :2]
    return y * 2 if mask.sum() > 5 else y


def written_under_another_name(y: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(6, device=y.device)
    view = mask.view(2, 3)
    view[0] = y[0, :3]
    return y * 2 if mask.all() else y


def written_behind_a_view(y: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(2, 3, device=y.device)
    view = mask.view(6)
    view[0] = y[0, 0]
    return y * 2 if mask.all() else y


@pytest.mark.parametrize("body", [given, drawn, written, written_under_another_name, written_behind_a_view])
def test_a_number_that_values_decide_is_refused(body: Body) -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Does(body), X)
