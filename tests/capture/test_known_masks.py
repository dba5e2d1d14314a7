"""A selection by a mask that sizes decide has a static shape: it is taken by index."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError, InputError
from autopar.verify.testing import random_plan
from tests.capture import interpreter
from tests.capture.test_known_values import Body, Does

X = torch.linspace(-1, 1, 48).reshape(8, 6).sin()


def even(y: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(y), device=y.device) % 2 == 0


def contrastive(y: torch.Tensor) -> torch.Tensor:
    """Each row beside all others, as SimCLR's loss has it."""
    n, scores = len(y), y @ y.t()
    return scores[~torch.eye(n, dtype=torch.bool, device=y.device)].view(n, n - 1).logsumexp(1).mean()


def above_the_diagonal(y: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.where(torch.ones(len(y), len(y), device=y.device).triu(1) > 0)
    return (y @ y.t())[rows, columns].std()


def masked_select(y: torch.Tensor) -> torch.Tensor:
    return y.masked_select(torch.arange(6, device=y.device) < 4).reshape(8, 4).prod(1)


def nonzero(y: torch.Tensor) -> torch.Tensor:
    places, (rows,) = torch.nonzero(torch.eye(6, device=y.device)), even(y).nonzero(as_tuple=True)
    return y[:, places[:, 1]] @ y[rows].t()


def beside_slices_and_lists(y: torch.Tensor) -> torch.Tensor:
    inner = y.view(2, 4, 6)[:, even(y)[:4], 0]
    return torch.cat([y[even(y), 1:3].view(-1), y[even(y), [0, 1, 2, 3]], inner.reshape(-1)]).cumsum(0)


def none_and_all(y: torch.Tensor) -> torch.Tensor:
    return y[even(y) & ~even(y)].sum() + y[torch.ones_like(y, dtype=torch.bool)].view(8, 6).prod(1)


def of_a_product(y: torch.Tensor) -> torch.Tensor:
    return y[even(y)] @ y[~even(y)].t()


KNOWN = [contrastive, above_the_diagonal, masked_select, nonzero, beside_slices_and_lists, none_and_all, of_a_product]


@pytest.mark.parametrize("body", KNOWN)
def test_what_a_mask_of_sizes_selects_is_captured(body: Body) -> None:
    interpreter.check(Does(body), X)


@pytest.mark.parametrize("body", [contrastive, nonzero, of_a_product])
@pytest.mark.parametrize("seed", range(3))
def test_the_places_are_those_of_the_whole_on_every_rank(body: Body, seed: int) -> None:
    plan = random_plan(Does(body), X, (2,), seed)
    assert autopar.verify(Does(body), X, (2,), plan=plan).ok


class Keeps(nn.Module):
    """Some rows of a layer, by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("kept", torch.tensor([True, False, True, True, False, False, True, True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[self.kept].view(5, 2, 3).prod(1)


def test_a_buffer_that_selects_is_compared_in_every_call() -> None:
    model = Keeps()
    parallel = autopar.parallelize(model, X, mesh=1)
    torch.testing.assert_close(parallel(X), model(X))
    parallel.kept[1] = True
    with pytest.raises(InputError, match="kept"):
        parallel(X)


def test_a_mask_of_values_is_none_of_them() -> None:
    with pytest.raises(CaptureError):
        capture(Does(lambda y: y[y[:, 0] > 0].view(-1, 3).prod(1)), X)


@pytest.mark.parametrize("correction", [0, 1, 2])
@pytest.mark.parametrize("weights", [(), ("fweights",), ("aweights",), ("fweights", "aweights")])
@pytest.mark.parametrize("rows", ["matrix", "row", "complex"])
def test_covariances_are_torchs(correction: int, weights: tuple[str, ...], rows: str) -> None:
    def body(y: torch.Tensor) -> torch.Tensor:
        seen = {"matrix": y, "row": y[0], "complex": torch.complex(y[:4], y[4:])}[rows]
        counted = torch.arange(1, 7, device=y.device)
        by = {"fweights": counted, "aweights": counted / 7}
        found = torch.cov(seen, correction=correction, **{name: by[name] for name in weights})
        return torch.view_as_real(found) if found.is_complex() else found

    interpreter.check(Does(body), X)


@pytest.mark.parametrize("rows", ["matrix", "row", "complex"])
def test_correlations_are_torchs(rows: str) -> None:
    def body(y: torch.Tensor) -> torch.Tensor:
        seen = {"matrix": y, "row": y[0], "complex": torch.complex(y[:4], y[4:])}[rows]
        found = seen.corrcoef()
        return torch.view_as_real(found) if found.is_complex() else found

    interpreter.check(Does(body), X)
