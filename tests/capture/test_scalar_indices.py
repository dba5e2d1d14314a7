"""Indices of one number that a tensor holds: planned as gathers and scatters, with the numbers of the user's own module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar


def put(y: Any, index: object, value: object) -> torch.Tensor:
    """A copy in which something is assigned."""
    y = y.clone()
    y[index] = value
    return y  # type: ignore[no-any-return]


def cursor(m: Any, h: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A queue as of contrastive losses, whose place goes on with every call."""
    with torch.no_grad():
        m.queue[m.at] = h.mean(0)
        m.at.add_(1).remainder_(4)
    return h + m.queue[t - 2].mean(0)


USES: dict[str, Callable[[Any, Any, Any], torch.Tensor]] = {
    "row": lambda m, h, t: h * m.table[t, 0].mean(),
    "last dim": lambda m, h, t: h * m.table[..., t].mean(),
    "after a new dim": lambda m, h, t: h + m.table[:, None, t].mean((0, 1)),
    "after a slice": lambda m, h, t: h + m.table[1:, t].mean(0),
    "before an ellipsis": lambda m, h, t: h + m.table[t, ..., 0],
    "two": lambda m, h, t: h + m.table[t, t],
    "two apart": lambda m, h, t: h + m.table[t, :, t],
    "from the end": lambda m, h, t: h + m.table[t - 4, t.int()],
    "of an activation": lambda m, h, t: h[:, t].square()[:, None] + h,
    "assigned": lambda m, h, t: put(h, t, 2 * h[0]),
    "assigned column": lambda m, h, t: put(h, (slice(None), t), 2 * h[:, 0]),
    "assigned number": lambda m, h, t: put(h, (..., t), 0.5),
    "assigned in another form": lambda m, h, t: put(h, t, 2 * h[None, :1].float()),
    "assigned to two": lambda m, h, t: put(h, (t, t), 3 * h[0, 0]),
    "assigned to two apart": lambda m, h, t: put(h.view(2, 4, 8), (t - 2, slice(1, None), t), h[0, :3]).view(8, 8),
    "assigned and spread": lambda m, h, t: put(h, (slice(1, 3), t), h[0, :1]),
    "cursor": cursor,
}


class Using(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.layer = use, nn.Linear(6, 8, dtype=torch.float64)
        self.register_buffer("table", torch.randn(4, 8, 8, dtype=torch.float64))
        self.register_buffer("queue", torch.zeros(4, 8, dtype=torch.float64))
        self.register_buffer("at", torch.tensor(2))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return USES[self.use](self, self.layer(x), t).square().mean()


@pytest.mark.parametrize("use", USES)
def test_one_program_serves_all_numbers(use: str) -> None:
    torch.manual_seed(0)
    model, x = Using(use), torch.randn(8, 6, dtype=torch.float64)
    parallel = autopar.parallelize(copy.deepcopy(model), {"x": x, "t": torch.tensor(3)}, mesh=1)
    for number in (3, 2, 3):
        expected, found = model(x, torch.tensor(number)), parallel(x, torch.tensor(number))
        expected.backward()
        found.backward()
        torch.testing.assert_close(found, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).grad, parameter.grad)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(parallel.get_buffer(name), buffer)


def test_a_number_out_of_range_is_the_modules_own_error() -> None:
    model, x = Using("row"), torch.randn(8, 6, dtype=torch.float64)
    parallel = autopar.parallelize(model, {"x": x, "t": torch.tensor(3)}, mesh=1)
    for module in (model, parallel):
        with pytest.raises(IndexError, match="index 4 is out of bounds for dimension 0 with size 4"):
            module(x, torch.tensor(4))


def test_a_number_that_sizes_say_stays_a_number() -> None:
    class Sized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[torch.tensor(x.shape[0]) - 1].sum()

    parallel = autopar.parallelize(Sized(), torch.randn(4, 3), mesh=1)
    assert "aten.index" not in parallel.code
    assert "select.int(x, 0, 3)" in parallel.code or "select.int(x, 0, -1)" in parallel.code
