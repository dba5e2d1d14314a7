"""A tensor repaired under a condition on values becomes a `where`, with equal numbers whether the condition holds or not."""

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
from autopar.runtime.workers import WorkerPool
from autopar.verify.verification import verify
from tests.capture import interpreter
from tests.support import table

Body = Callable[[torch.Tensor], torch.Tensor]
FINITE = torch.linspace(-1, 1, 24).reshape(4, 6)
BROKEN = FINITE.clone().index_fill_(1, torch.tensor([2]), float("inf"))


class Does(nn.Module):
    """A linear layer around a body."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.last = body, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x) + self.first(torch.nan_to_num(x, posinf=0))).square().sum()


def clamped(h: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(h).all():
        h = torch.clamp(h, -3, 3)
    return h


def as_t5_has_it(h: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        if h.dtype == torch.float32 and (torch.isinf(h).any() or torch.isnan(h).any()):
            most = torch.finfo(h.dtype).max - 1000
            h = torch.clamp(h, min=-most, max=most) / most
        h = h + 1
        if torch.isinf(h).any():
            most = torch.finfo(h.dtype).max - 1000
            h = h.clamp(min=-most, max=most)
    return h


def by_a_function_in_python(h: torch.Tensor) -> torch.Tensor:
    if h.isinf().any().item():
        h = F.hardtanh(h, -2, 2)
    return h


def scaled(h: torch.Tensor) -> torch.Tensor:
    if bool(h.abs().max() > 5):
        h = h.sign()
    return h


def in_place(h: torch.Tensor) -> torch.Tensor:
    h = h * 1
    seen = h[1:]
    if not torch.isfinite(h).all():
        most = 3.0
        h.clamp_(-most, most)
    return torch.cat([h[:1], seen])  # a view of what was written


def of_what_is_chosen(h: torch.Tensor) -> torch.Tensor:
    h = h + 1
    if torch.isinf(h).any():
        h[torch.isinf(h)] = 0.5
    return h * 2


def a_column(h: torch.Tensor) -> torch.Tensor:
    h = h + 1
    if torch.isinf(h).any():
        h[:, 2] = h[:, 1]
    if (h > 100).any():
        h[0] = 0
    return h


def scaled_in_place(h: torch.Tensor) -> torch.Tensor:
    h = torch.nan_to_num(h, posinf=40.0)
    if h.max() > 30:
        h *= 0.25
    return h


BODIES = (in_place, of_what_is_chosen, a_column, scaled_in_place, clamped, as_t5_has_it, by_a_function_in_python, scaled)


@pytest.mark.parametrize("x", [FINITE, BROKEN], ids=["finite", "broken"])
@pytest.mark.parametrize("body", BODIES)
def test_a_repair_gives_equal_numbers_whether_it_happens_or_not(body: Body, x: torch.Tensor) -> None:
    interpreter.check(Does(body), x)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("x", [FINITE, BROKEN], ids=["finite", "broken"])
@pytest.mark.parametrize("body, plan", [(as_t5_has_it, 0), (as_t5_has_it, "fsdp"), (in_place, 0), (a_column, 1)])
def test_a_repaired_model_has_equal_numbers_on_a_mesh(pool: WorkerPool, body: Body, plan: int | str, x: torch.Tensor) -> None:
    model, on = Does(body), table.mesh((2,))
    if isinstance(plan, int):
        made = autopar.testing.random_plan(model, x, on, seed=plan)
    else:
        made = autopar.plan(model, x, on, strategy=plan)
    report = verify(model, x, on, made, Options(), pool)
    assert report.ok, report


def with_an_else(h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 0:
        h = 2 * h
    else:
        h = -h
        h = h.exp()
    return h


def of_two_tensors(h: torch.Tensor) -> torch.Tensor:
    scale = torch.ones_like(h)
    if h.sum() > 0:
        scale = 2 * scale
        h = h + 1
    return scale * h


def by_a_module(h: torch.Tensor) -> torch.Tensor:
    norm = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    if h.sum() > 0:
        h = norm(h)
    return h


def to_another_shape(h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 0:
        h = h.sum(0)
    return h


def by_a_function_of_its_own(h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 0:
        h = clamped(h)
    return h


def returned(h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 0:
        return 2 * h
    return h


def in_place_and_more(h: torch.Tensor) -> torch.Tensor:
    h = h + 1
    if h.sum() > 0:
        h.clamp_(-3, 3)
        h.mul_(2)
    return h


def of_another_tensor(h: torch.Tensor) -> torch.Tensor:
    parts = [h + 1, h]
    if h.sum() > 0:
        parts[0].clamp_(-3, 3)
    return parts[0]


def decided_by_a_flag_too(h: torch.Tensor, always: bool = True) -> torch.Tensor:
    if h.sum() > 0 or always:
        h = 2 * h
    return h


@pytest.mark.parametrize(
    "body",
    [
        with_an_else,
        of_two_tensors,
        by_a_module,
        to_another_shape,
        by_a_function_of_its_own,
        returned,
        decided_by_a_flag_too,
        in_place_and_more,
        of_another_tensor,
    ],
)
def test_what_does_more_than_repair_one_tensor_is_refused(body: Body) -> None:
    with pytest.raises(CaptureError, match=r"control flow of .* depends on the values") as refusal:
        capture(Does(body), FINITE)
    assert "torch.where" in refusal.value.details["fix"]
    assert __file__ in refusal.value.details["at"]
