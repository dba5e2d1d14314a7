"""Figures of a plan's simulated step: exposed messages add up, and the model's FLOPs are those that torch counts."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.cost_models import catalog
from autopar.plan.plan import Plan
from autopar.plan.tables import kernels, totals
from autopar.plan.text import plain
from tests.support.planning import Layers

BETA = 0.45
BATCH, WIDTHS = 4096, (512, 2048, 512, 1024)


class Stack(nn.Module):
    """Three equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(*WIDTHS[:2], bias=False), nn.GELU(), nn.Linear(*WIDTHS[1:3], bias=False)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@functools.cache
def plan(strategy: str, microbatches: int = 1) -> Plan:
    device = replace(catalog.device("h100", processes=4), interference=BETA)
    with torch.device("meta"):
        model, x = Layers(WIDTHS), torch.empty(BATCH, WIDTHS[0])
    return autopar.plan(model, x, (2, 2), device=device, strategy=strategy, microbatches=microbatches)


@pytest.mark.parametrize("strategy, microbatches", [("fsdp", 1), ("megatron", 1), ("ddp", 2), ("auto", 1)])
def test_the_parts_of_a_simulated_step_add_up(strategy: str, microbatches: int) -> None:
    made = plan(strategy, microbatches)
    step = made.breakdown.simulated
    assert sum(entry.exposed for entry in made.collectives) == pytest.approx(step.exposed, rel=1e-9, abs=1e-15)
    assert step.computing == pytest.approx(made.breakdown.local, rel=1e-9)
    assert max(step.at_peak, step.memory, *step.links.values()) < step.seconds
    over = [(sent.seconds, [made.axes[axis] for axis in made.mesh.axes_named(sent.axis)]) for sent in made.collectives]
    assert step.links == {axis: pytest.approx(sum(seconds for seconds, axes in over if axis in axes)) for axis in step.links}
    assert {axis for _, axes in over for axis in axes} == set(step.links)
    assert (step.samples, step.tokens) == (BATCH, 0)


@pytest.mark.parametrize("strategy, microbatches", [("fsdp", 1), ("ddp", 2), ("replicate", 1)])
def test_the_flops_of_a_model_are_those_that_torch_counts_whatever_its_plan(strategy: str, microbatches: int) -> None:
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        Layers(WIDTHS)(torch.empty(BATCH, WIDTHS[0])).backward()
    step, device = plan(strategy, microbatches).breakdown.simulated, catalog.device("h100", processes=4)
    assert step.at_peak * 4 * device.flops["float32"] == pytest.approx(counter.get_total_flops(), rel=1e-12)
    assert step.mfu == pytest.approx(step.at_peak / step.seconds)


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_kernels_compute_what_torch_counts_and_add_up_to_what_is_priced(recompute: str) -> None:
    with torch.device("meta"):
        model, x = Stack(), torch.empty(BATCH, WIDTHS[0])
    made = autopar.plan(model, x, (2, 2), device="h100", strategy="ddp", recompute=recompute)  # type: ignore[arg-type]
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        h = x
        for block in model.blocks:
            h = checkpoint(block, h, use_reentrant=False) if recompute == "blocks" else block(h)
        h.sum().backward()
    found, breakdown = {group.name: group for group in made.breakdown.simulated.kernels}, made.breakdown
    products = found["matrix products"]
    flops = products.at_peak * 4 * catalog.device("h100").flops["float32"]
    assert flops == pytest.approx(counter.get_total_flops(), rel=1e-12)
    assert sum(group.seconds for group in found.values()) == pytest.approx(
        breakdown.forward + breakdown.backward + breakdown.recomputed, rel=1e-12
    )
    assert bool(breakdown.recomputed) == (recompute == "blocks")
    assert f"{products.at_peak / products.seconds:.1%}" in plain(kernels(breakdown.simulated))


def test_a_report_says_what_the_simulator_found() -> None:
    made = plan("fsdp")
    step, text = made.breakdown.simulated, plain(totals(made))
    parts = f"{1e3 * step.computing:.3f} computing, {1e3 * step.slowdown:.3f} slowed down by messages beside it"
    total = f"{1e3 * step.seconds:.3f} ms ({step.seconds / made.step_time - 1:+.1%})"
    assert f"{total}: {parts}, {1e3 * step.exposed:.3f} waiting for messages" in text
    assert f"{BATCH / step.seconds:,.0f} samples/s, {step.mfu:.1%} of the devices' peak (MFU)" in text
    assert f"{1e3 * step.at_peak:.3f} ms by FLOPs at the peak, {1e3 * step.memory:.3f} by bytes of memory" in text


def test_a_saved_plan_says_the_same() -> None:
    made = plan("fsdp")
    assert Plan.from_json(made.to_json()) == made
