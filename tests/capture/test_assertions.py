"""Assertions on values do not prevent capture; branches on values that decide anything else do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import autocast, nn

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.capture import interpreter

X = torch.linspace(0.5, 1, 24).reshape(4, 6)


class Does(nn.Module):
    """What a test says, and then a linear layer."""

    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.body(x))


def refused(x: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(x).all():
        found = x.isnan().sum()
        raise ValueError(f"{found} are no numbers")
    return x


def refused_with_a_reason_more(x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 2 and not torch.isfinite(x).all():
        raise ValueError
    return x


def refused_for_one_of_two_reasons(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 3 or bool((x < 0).any()):
        raise ValueError
    return x


def asserted(x: torch.Tensor) -> torch.Tensor:
    fine = (x > 0).all()
    assert fine
    assert (x < 2).all() and not x.isnan().any(), "a number is missing"  # noqa: PT018
    return x


def checked_by_the_library(x: torch.Tensor) -> torch.Tensor:
    spread = torch.distributions.Normal(x, x.exp()).log_prob(x + 1)
    return nn.functional.gaussian_nll_loss(x, 2 * x, x.exp(), reduction="none") + spread


def refused_for_an_item(x: torch.Tensor) -> torch.Tensor:
    if x.isnan().any().item() or bool(x.isinf().any().item()):
        raise ValueError("not finite")
    return x


def asserted_for_an_item(x: torch.Tensor) -> torch.Tensor:
    assert x.isfinite().all().item()
    assert not bool(x.isnan().any())
    return x


def asked_for_autocast(x: torch.Tensor) -> torch.Tensor:
    lower = torch.get_autocast_dtype(x.device.type)
    with torch.amp.autocast(x.device.type, enabled=False):
        return x if torch.is_autocast_enabled(x.device.type) else x.to(lower).to(x.dtype)


def cast_by_an_imported_class(x: torch.Tensor) -> torch.Tensor:
    with autocast(x.device.type, enabled=False):
        return 2 * x


def looked_at(x: torch.Tensor) -> torch.Tensor:
    torch._check(x[x > 0].numel() == x.numel())
    return x


def encoded(x: torch.Tensor) -> torch.Tensor:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, device=x.device)
    for weight in layer.parameters():
        nn.init.constant_(weight, 0.1)
    causal = torch.triu(torch.ones(4, 4, dtype=torch.bool, device=x.device), 1)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)(x, mask=causal)


CHECKS = (
    refused,
    refused_with_a_reason_more,
    refused_for_one_of_two_reasons,
    asserted,
    refused_for_an_item,
    asserted_for_an_item,
    asked_for_autocast,
    cast_by_an_imported_class,
    checked_by_the_library,
    looked_at,
    encoded,
)


@pytest.mark.parametrize("body", CHECKS)
def test_checks_of_values_are_passed(body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    interpreter.check(Does(body), X)


def chosen(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 3:
        return 2 * x
    return x


def chosen_before_it_is_refused(x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 2:
        if x.sum() > 3:
            return x
        raise ValueError
    return x


def chosen_inside_of_a_check(x: torch.Tensor) -> torch.Tensor:
    if (2 if x.sum() > 3 else 1) > x.dim():
        raise ValueError
    return x


@pytest.mark.parametrize("body", [chosen, chosen_before_it_is_refused, chosen_inside_of_a_check])
def test_what_decides_more_than_an_error_is_refused(body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match="control flow of Does depends on the values"):
        capture(Does(body), X)
