"""Recomputed operations, counted: as many as the plan says."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.cost_models.compute import pricer
from autopar.operators import row_of
from autopar.operators.call import Call
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.planning.planner import connected_mesh, plan_program, read_program
from autopar.verify.testing import peak
from tests.support import models
from tests.support.planning import smallest

NAMES = ("gpt2", "llama", "vit")
OPTIONS = Options(device="cpu")
ON = connected_mesh((1,), OPTIONS)


def step(module: nn.Module, batch: models.Sample) -> int:
    """The operations of products and convolutions in a step, as torch counts them: of attention on a CPU it counts none, unless
    it has dropout, with which it is made of products."""
    with FlopCounterMode(display=False) as counter:
        module(**batch).loss.backward()
    return counter.get_total_flops()


def said(plan: Plan, model: nn.Module, batch: models.Sample) -> int:
    """The operations that a plan on one device computes again, as it prices them."""
    program, total = read_program(model, batch).program, 0
    for op in (program.op[name] for name in plan.breakdown.recompute):
        price = pricer(op, program.values, ON.device)
        row, call = row_of(op), Call.of(op)
        if row.contracts or (row.flops is not None and row.is_random(call)):
            whole = 2 if call.arguments.get("is_causal") else 1  # made of products, it computes what its mask hides as well
            total += whole * price.flops([program.values[n].shape for n in op.operands], [r.shape for r in op.results])
    return total


@functools.cache
def range_of(name: str) -> tuple[Plan, int]:
    """The plan with plenty of memory, and the least memory of any."""
    captured = models.captured(name)
    return plan_program(captured.program, ON, OPTIONS), smallest(captured, ON)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_as_much_is_computed_again_as_the_plan_says(name: str, share: float) -> None:
    model, batch = models.make(name)
    free, least = range_of(name)
    most = free.peak_memory
    plan = autopar.plan(model, batch, ON, device="cpu", budget=round(least + share * (most - least)))
    recompute = said(plan, model, batch)
    assert plan.breakdown.recompute or share > 0
    once, twice = (step(autopar.parallelize(model, batch, ON, plan=one), batch) for one in (free, plan))
    assert twice - once == pytest.approx(recompute, rel=0.01)


def test_in_less_memory_than_checkpoints_of_whole_blocks_less_is_computed_again() -> None:
    """Both measured: bytes of live tensors at the peak of a step, and its operations."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4,
        n_embd=128,
        n_head=4,
        vocab_size=128,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model, tokens = transformers.GPT2LMHeadModel(config), torch.randint(0, 128, (16, 128))
    model.loss_type, batch = "ForCausalLM", {"input_ids": tokens, "labels": tokens}
    wrapped = copy.deepcopy(model)
    for block in wrapped.transformer.h:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    blocks = peak_of(wrapped, batch)
    plan = autopar.plan(model, batch, ON, device="cpu", optimizer="sgd", budget=round(0.985 * blocks))
    parallel = autopar.parallelize(copy.deepcopy(model), batch, ON, plan=plan)
    assert peak_of(parallel, batch) <= blocks
    once, ours, theirs = (step(module, batch) for module in (model, parallel, wrapped))
    assert once < ours
    assert ours - once <= 0.8 * (theirs - once)


def peak_of(module: nn.Module, batch: models.Sample) -> int:
    """The most bytes alive in a step with plain descent."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def train() -> None:
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return peak(module, optimizer, batch.values(), train).bytes
