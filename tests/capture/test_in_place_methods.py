"""Every in-place method of a tensor computes what it does in eager mode."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import capture
from tests.capture import interpreter

X = torch.linspace(0.5, 1.0, 16, dtype=torch.float64).view(4, 4)
OTHERS = re.compile(
    "set_|resize_|resize_as_|requires_grad_|share_memory_|apply_|map_|map2_|rename_|sparse_.*|retain_grad"
)  # no values
DRAWING = re.compile("bernoulli_|cauchy_|exponential_|geometric_|log_normal_|normal_|random_|uniform_")
OWN = re.compile("polygamma_|logical_.*")  # arguments in another order; torch's own keep the gradient of what they overwrite
METHODS = sorted(name for name in dir(torch.Tensor) if re.fullmatch(r"[a-z]\w*_", name) and not OTHERS.fullmatch(name))
ALIKE, PLACES, MASK = "alike", "places", "mask"  # tensors that are made beside x
GIVEN: list[tuple[Any, ...]] = [
    *[(), (2.0,), (2,), (0.5,), (0,), (0, 1), (ALIKE,), (0.1, 0.9)],
    *[(MASK, 2.0), (ALIKE, ALIKE), (0, PLACES, ALIKE), (MASK, ALIKE)],
]


class Writes(nn.Module):
    def __init__(self, name: str, given: tuple[Any, ...]) -> None:
        super().__init__()
        self.lin, self.name, self.given = nn.Linear(4, 4, dtype=torch.float64), name, given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x).sigmoid()
        beside = {
            ALIKE: torch.ones_like(y) * 0.75,
            PLACES: torch.zeros(4, 4, dtype=torch.int64, device=y.device),
            MASK: y > 0.5,
        }
        found = y.clone()
        getattr(found, self.name)(*(beside.get(one, one) if isinstance(one, str) else one for one in self.given))
        return found + y


def ways(name: str) -> Iterator[Callable[[], nn.Module]]:
    """Modules that run in eager mode, by the arguments of the method."""
    for given in GIVEN:
        try:
            Writes(name, given)(X).sum().backward()
        except Exception:
            continue
        yield lambda given=given: Writes(name, given)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore")
def test_what_a_method_writes_is_in_the_program(name: str) -> None:
    found = list(ways(name))
    for made in found:
        if DRAWING.fullmatch(name):
            capture(made(), X)
        elif not OWN.fullmatch(name):
            interpreter.check(made(), X)


def test_most_methods_run_with_these_arguments() -> None:
    assert sum(any(True for _ in ways(name)) for name in METHODS) > 100


IN_PLACE = sorted(
    name
    for name, made in vars(nn).items()
    if isinstance(made, type) and issubclass(made, nn.Module) and "inplace" in inspect.signature(made.__init__).parameters
)


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_module_that_works_in_place_is_the_one_that_does_not(name: str) -> None:
    given, rank = {"Threshold": (0.1, 0.2)}.get(name, ()), {"Dropout3d": 5, "Dropout2d": 4}.get(name, 3)
    x = torch.zeros([4] * rank, dtype=torch.float64)
    in_place, other = (
        capture(nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), made), x).program
        for made in (getattr(nn, name)(*given, inplace=True), getattr(nn, name)(*given))
    )
    assert [op.target for op in in_place.ops] == [op.target for op in other.ops]
