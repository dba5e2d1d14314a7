"""Dims that the mesh does not divide, in whole plans: padded inside, true for whoever looks from outside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import autopar
from autopar.build import assemble, tensors_of
from autopar.capture import Captured
from autopar.mesh import Mesh
from autopar.passes.promote import promote
from autopar.passes.without_dropout import without_dropout
from autopar.plan import Plan
from autopar.planner import Options, located, plan_program, read_program
from autopar.runtime.storage import whole
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import connect
from autopar.verification import sequential, verify

WORDS, ROWS, LENGTH = 101, 4, 8
TABLE = "transformer.wte.weight"


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 with a vocabulary that no mesh divides, which its head shares; some targets are ignored."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=4, vocab_size=WORDS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(WORDS, (ROWS, LENGTH))
    return model, {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(ROWS, LENGTH) < 0.4, -100)}


def split(sizes: tuple[int, ...]) -> dict[str, str]:
    """The constraints that the table is stored, and scores are made, with the vocabulary split on the last axis."""
    free = ["*"] * (len(sizes) - 1)
    return {TABLE: ", ".join([*free, "S(0)"]), "lm_head:linear": ", ".join([*free, "S(2)"])}


@pytest.mark.parametrize("strategy", ["auto", "megatron"])
@pytest.mark.parametrize("sizes", [(4,), (2, 4)], ids=str)
def test_a_vocabulary_that_does_not_divide_is_split_with_equal_numbers(
    pool: WorkerPool, sizes: tuple[int, ...], strategy: str
) -> None:
    model, sample = gpt2()
    plan = autopar.plan(model, sample, sizes, device="h100", strategy=strategy, constraints=split(sizes))
    assert plan.padded[TABLE] == "101 x 16 -> 104 x 16"
    assert "S(2)" in plan.layouts["output:logits"]
    report = verify(model, sample, Mesh.of(sizes), plan, Options(), pool)
    assert report.ok, report
