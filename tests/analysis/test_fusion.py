"""The costs that remain for ops in fused kernels, against the kernels that Inductor generates for the same module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.analysis.fusion import fused
from autopar.cost_models import catalog
from autopar.cost_models.compute import pricer
from autopar.plan.options import Options
from autopar.planning.planner import read_program
from benchmarks.fused_bytes import inductor_bytes, our_bytes

ROWS, WIDTH, INNER = 4096, 512, 2048
WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "w": (WIDTH, WIDTH),
    "v": (WIDTH, WIDTH),
    "u": (WIDTH, WIDTH),
    "up": (INNER, WIDTH),
    "gate": (INNER, WIDTH),
    "down": (WIDTH, INNER),
    "scale": (WIDTH,),
    "shift": (WIDTH,),
}


class Function(nn.Module):
    """A function of a batch and of some weights."""

    def __init__(self, function: Callable[..., torch.Tensor], *names: str) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterDict({name: torch.ones(WEIGHTS[name]) for name in names})

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.function(batch, **self.weights)


def gelu(batch: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(batch, up)), down)


def swiglu(batch: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(batch, gate)) * F.linear(batch, up), down)


def layer_norm(
    batch: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    return F.linear(F.layer_norm(F.linear(batch, w), (WIDTH,), scale, shift), up)


def rms_norm(batch: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    made = F.linear(batch, w)
    return F.linear(scale * (made * torch.rsqrt(made.pow(2).mean(-1, keepdim=True) + 1e-6)), up)


def dropout(batch: torch.Tensor, w: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.linear(F.dropout(F.linear(batch, w), 0.1) + batch, up)


def scores(batch: torch.Tensor, w: torch.Tensor, v: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    query, key, value = (F.linear(batch, weight).view(8, WIDTH, WIDTH) for weight in (w, v, u))
    return torch.bmm(F.softmax(torch.bmm(query, key) * 0.125, -1), value)


CASES = {
    "gelu": Function(gelu, "up", "down"),
    "swiglu": Function(swiglu, "up", "gate", "down"),
    "layer_norm": Function(layer_norm, "w", "scale", "shift", "up"),
    "rms_norm": Function(rms_norm, "w", "scale", "up"),
    "dropout": Function(dropout, "w", "up"),
    "softmax": Function(scores, "w", "v", "u"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch, which Inductor imports
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_of_fused_kernels_are_those_that_inductor_counts(name: str) -> None:
    module, batch = CASES[name], torch.ones(ROWS, WIDTH)
    program = read_program(module, batch).program
    (theirs, _), (ours, _), (apart, _) = inductor_bytes(module, batch), our_bytes(fused(program)), our_bytes(program)
    assert ours == pytest.approx(theirs, rel=0.005)
    assert name == "gelu" or sum(apart) != pytest.approx(sum(theirs), rel=0.005)  # there a kernel of its own does as well


class Loss(nn.Module):
    """The mean square of what a module returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.module(batch).square().mean()


def test_a_plan_of_what_is_compiled_says_so_and_runs_the_same_program() -> None:
    batch = torch.ones(2**14, WIDTH)
    apart, compiled = (
        autopar.plan(Loss(CASES["rms_norm"]), batch, (2, 2), device="h100", compiled=asked) for asked in (False, True)
    )
    assert compiled.step_time < apart.step_time
    assert compiled.hash == apart.hash
    assert Options.read(compiled.options).compiled
    assert Options().under(compiled).compiled
    assert not Options.read(apart.options).compiled


def test_an_operator_that_was_measured_costs_what_was_measured() -> None:
    batch = torch.ones(ROWS, WIDTH)
    program = fused(read_program(CASES["swiglu"], batch).program)
    silu = next(one for one in program.ops if one.target == "aten.silu.default")
    whole, rated = catalog.device("h100"), replace(catalog.device("h100"), rates={silu.target: (1e9, 1e9)})
    shapes = [(ROWS, INNER)], [(ROWS, INNER)]
    assert pricer(silu, program.values, whole).forward(*shapes).bytes < 2 * 4 * ROWS * INNER
    assert pricer(silu, program.values, rated).forward_seconds(*shapes) == 2 * 4 * ROWS * INNER / 1e9
