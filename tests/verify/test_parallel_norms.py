"""Norms and distributions over a split dim: equal numbers on processes, and only statistics are communicated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.analysis.analysis import analyse
from autopar.formulation.prices import Prices
from autopar.ir.training_step import TrainingStep
from autopar.plan.assignment_text import resolve
from autopar.plan.options import Options
from autopar.planning.planner import collectives_of, read_program
from autopar.verify.verification import verify
from tests.support import planning, table
from tests.support.planning import form
from tests.support.threads import Threads


class Normal(nn.Module):
    """Two linear layers with a norm or a distribution between them."""

    def __init__(self, width: int, between: nn.Module) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(8, width), between, nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x))).square().sum()


class Over(nn.Module):
    """A norm over the last dims, which the features make up."""

    def __init__(self, norm: type[nn.LayerNorm] | type[nn.RMSNorm], *dims: int) -> None:
        super().__init__()
        self.dims, self.norm = dims, norm(dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(x.unflatten(-1, self.dims)).flatten(1)
        return found


BETWEEN = {
    "layer_norm": nn.LayerNorm,
    "rms_norm": nn.RMSNorm,
    "softmax": lambda width: nn.Softmax(-1),
    "log_softmax": lambda width: nn.LogSoftmax(-1),
    "batch_norm": nn.BatchNorm1d,
}
# What each sends for so many rows of so many features on so many ranks, elements in the forward and in the backward.


SENT = {
    "layer_norm": lambda rows, width, ranks: ([("all_gather", 2 * rows * ranks)], [("all_reduce", 2 * rows)]),
    "rms_norm": lambda rows, width, ranks: ([("all_reduce", rows)], [("all_reduce", rows)]),
    "softmax": lambda rows, width, ranks: ([("all_reduce", rows)] * 2, [("all_reduce", rows)]),
    "log_softmax": lambda rows, width, ranks: ([("all_reduce", rows)] * 2, [("all_reduce", rows)]),
    "batch_norm": lambda rows, width, ranks: ([("all_gather", 2 * width * ranks)], [("all_reduce", 2 * width)]),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", BETWEEN)
def test_a_norm_over_a_split_dim_gives_equal_numbers_and_sends_statistics_only(threads: Threads, name: str, ranks: int) -> None:
    torch.manual_seed(0)
    rows, width = (64, 9) if name == "batch_norm" else (8, 256)  # channels that cannot be split
    model, x, on = Normal(width, BETWEEN[name](width)), torch.randn(rows, 8), table.mesh((ranks,))
    plan = autopar.plan(model, x, on)
    assert form(plan, name) == ("sync_batch_norm" if name == "batch_norm" else name)
    forward, backward = SENT[name](rows, width, ranks)
    sent = Counter((c.where, c.kind, c.bytes) for c in plan.collectives if c.value == f"between:{name}#0")
    assert sent == Counter(
        (where, kind, 4 * size) for where, found in (("forward", forward), ("backward", backward)) for kind, size in found
    )
    report = verify(model, x, on, plan, Options(), threads)
    assert report.ok, report
    assert ("buffer" in {row.what for row in report.rows}) == (name == "batch_norm")


@pytest.mark.parametrize("name, norm", [("layer_norm", nn.LayerNorm), ("rms_norm", nn.RMSNorm)])
def test_a_norm_over_several_dims_sends_what_one_over_one_does(
    threads: Threads, name: str, norm: type[nn.LayerNorm] | type[nn.RMSNorm]
) -> None:
    torch.manual_seed(0)
    rows, on = 8, table.mesh((4,))
    model, x = Normal(256, Over(norm, 32, 8)), torch.randn(rows, 8)
    plan = autopar.plan(model, x, on)
    assert form(plan, name) == ("sync_batch_norm" if name == "batch_norm" else name)
    forward, backward = SENT[name](rows, 256, 4)
    sent = Counter((c.where, c.kind, c.bytes) for c in plan.collectives if c.value == f"between.norm:{name}#0")
    assert sent == Counter(
        (where, kind, 4 * size) for where, found in (("forward", forward), ("backward", backward)) for kind, size in found
    )
    report = verify(model, x, on, plan, Options(), threads)
    assert report.ok, report


class Planes(nn.Module):
    """A norm of channels over planes, between linear layers over the channels."""

    def __init__(self, channels: int, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, channels), norm, nn.Linear(channels, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x).mT).mT)).square().sum()


# A norm of so many channels and as long a plane, how many means there are, and the form of it that is best.


PLANES = {
    "group_norm": (lambda: nn.GroupNorm(3, 9), 9, 256, 3),
    "group_norm_channels": (lambda: nn.GroupNorm(1, 256), 256, 7, 1),
    "instance_norm": (lambda: nn.InstanceNorm1d(9, affine=True), 9, 256, 9),
    "sync_batch_norm_spatial": (lambda: nn.BatchNorm1d(9), 9, 256, 9),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PLANES)
def test_a_norm_of_split_planes_gives_equal_numbers_and_sends_statistics_only(threads: Threads, name: str, ranks: int) -> None:
    torch.manual_seed(0)
    make, channels, length, means = PLANES[name]
    model, x, on = Planes(channels, make()), torch.randn(1, length, 8), table.mesh((ranks,))
    plan = autopar.plan(model, x, on)
    assert form(plan, "_norm#") == name
    sent = Counter((c.kind, c.where, c.bytes) for c in plan.collectives if c.value.startswith("norm:"))
    assert sent == {("all_gather", "forward", 8 * means * ranks): 1, ("all_reduce", "backward", 8 * means): 1}
    report = verify(model, x, on, plan, Options(), threads)
    assert report.ok, report


class Called(nn.Module):
    """An operator over the last dim."""

    def __init__(self, name: str, *more: object) -> None:
        super().__init__()
        self.name, self.more = name, more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(torch.ops.aten, self.name)(x, -1, *self.more)
        return found


@pytest.mark.parametrize(
    "name, more, expected",
    [
        ("special_softmax", (), "softmax"),
        ("_softmax", (False,), "softmax"),
        ("_safe_softmax", (), "safe_softmax"),
        ("special_log_softmax", (), "log_softmax"),
        ("_log_softmax", (False,), "log_softmax"),
    ],
)
def test_a_distribution_over_a_split_dim_in_any_spelling_sends_the_same(
    threads: Threads, name: str, more: tuple[object, ...], expected: str
) -> None:
    torch.manual_seed(0)
    model, x, on = Normal(256, Called(name, *more)), torch.randn(8, 8), table.mesh((4,))
    plan = autopar.plan(model, x, on)
    assert form(plan, "softmax") == expected
    sent = Counter((c.kind, c.where, c.bytes) for c in plan.collectives if "softmax" in c.value)
    assert sent == {("all_reduce", "forward", 4 * 8): 2, ("all_reduce", "backward", 4 * 8): 1}
    report = verify(model, x, on, plan, Options(), threads)
    assert report.ok, report


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_data_parallelism_shares_the_statistics_of_batch_norm_and_gathers_no_batch(strategy: str) -> None:
    plan = autopar.plan(Normal(32, nn.BatchNorm1d(32)), torch.randn(64, 8), table.mesh((4,)), strategy=strategy)
    assert form(plan, "batch_norm") == "sync_batch_norm"
    assert not planning.of(plan, "up:linear#0")


@pytest.mark.parametrize("name", ["layer_norm", "softmax"])
def test_a_parallel_operator_can_be_recomputed_and_communicates_again(threads: Threads, name: str) -> None:
    torch.manual_seed(0)
    model, x, on = Normal(256, BETWEEN[name](256)), torch.randn(8, 8), table.mesh((2,))
    plan = autopar.plan(model, x, on)
    assert form(plan, name) == name
    plan = replace(plan, recompute={f"between:{name}#0": ("run",)})
    program = read_program(model, x).program
    analysis = analyse(TrainingStep(program=program), on)
    sent = Counter(
        c.where
        for c in collectives_of(analysis, resolve(plan, analysis.step, analysis.fits), Prices(mesh=on))
        if name in c.value
    )
    forward, backward = SENT[name](8, 256, 2)
    assert sent == {"forward": len(forward), "backward": len(forward) + len(backward)}
    report = verify(model, x, on, plan, Options(), threads)
    assert report.ok, report
