"""What is computed again, counted in operations: as many as the plan says."""

from __future__ import annotations

import functools

import pytest
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.cost_models.compute import pricer
from autopar.plan import Plan
from autopar.planner import Options, located, plan_program, read_program
from tests import models
from tests.planning import smallest

NAMES = ("gpt2", "llama", "vit")
OPTIONS = Options(device="cpu")
ON = located((1,), OPTIONS)


def step(module: nn.Module, batch: models.Sample) -> int:
    """The operations of products and convolutions in a step, as torch counts them: of attention on a CPU it counts none."""
    with FlopCounterMode(display=False) as counter:
        module(**batch).loss.backward()
    return counter.get_total_flops()


def said(plan: Plan, model: nn.Module, batch: models.Sample) -> int:
    """The operations that a plan on one device computes again, as it prices them."""
    program, total = read_program(model, batch).program, 0
    for op in (program.op[name] for name in plan.evidence.again):
        price = pricer(op, program.values, ON.device)
        if price.product is not None:
            total += price.flops([program.values[n].shape for n in op.operands], [r.shape for r in op.results])
    return total


@functools.cache
def range_of(name: str) -> tuple[Plan, int]:
    """The plan with plenty of memory, and the least memory of any."""
    captured = read_program(*models.make(name))
    return plan_program(captured.program, ON, OPTIONS), smallest(captured, ON)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_as_much_is_computed_again_as_the_plan_says(name: str, share: float) -> None:
    model, batch = models.make(name)
    free, least = range_of(name)
    most = free.peak_memory
    plan = autopar.plan(model, batch, ON, device="cpu", budget=round(least + share * (most - least)))
    again = said(plan, model, batch)
    assert again > 0 or share > 0
    once, twice = (step(autopar.parallelize(model, batch, ON, plan=one), batch) for one in (free, plan))
    assert twice - once == pytest.approx(again, rel=0.01)
