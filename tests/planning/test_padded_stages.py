"""Dims that the mesh does not divide, in pipeline stages: padded in every stage, true in storage, checkpoints and outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.stages import read_pipeline
from autopar.planning.planner import read_program
from autopar.verify.verification import verify
from tests.support.random_stages import random_stages
from tests.support.threads import Threads

TABLE, SCORES = "transformer.wte.weight", "lm_head:linear"
MESH = {"pp": 2, "tp": 4}
Built = tuple[nn.Module, dict[str, torch.Tensor]]


def gpt2(words: int = 101, *, width: int = 16, heads: int = 4, rows: int = 8, length: int = 8) -> Built:
    """GPT-2 of three blocks, whose first stage and last one share the embedding; some targets are ignored."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=width, n_head=heads, vocab_size=words, n_positions=length, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(words, (rows, length))
    return model, {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(rows, length) < 0.4, -100)}


def asked(**options: Any) -> dict[str, Any]:
    return {"device": "h100", "pipeline": "pp", "microbatches": 2, "constraints": {TABLE: "S(0)", SCORES: "S(2)"}, **options}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("strategy", ["auto", "megatron"])
@pytest.mark.parametrize("schedule, stages", [("1f1b", 2), ("zb-h1", 2), ("interleaved", 4)])
def test_a_vocabulary_that_stages_share_is_padded_with_equal_numbers(
    threads: Threads, schedule: str, stages: int, strategy: str
) -> None:
    model, sample = gpt2()
    plan = autopar.plan(model, sample, MESH, **asked(schedule=schedule, stages=stages, strategy=strategy))
    assert plan.padded == {TABLE: "101 x 16 -> 104 x 16"}
    assert [dict(stage.padded) for stage in plan.stages if TABLE in stage.layouts] == [dict(plan.padded)] * 2
    assert Plan.from_json(plan.to_json()) == plan
    report = verify(model, sample, MESH, plan, Options(), threads)
    assert report.ok, report


@pytest.mark.parametrize("microbatches", [2, pytest.param("auto", marks=pytest.mark.thorough)])
def test_six_heads_are_split_over_four_ranks_in_every_stage(threads: Threads, microbatches: int | str) -> None:
    model, sample = gpt2(width=24, heads=6)
    options = asked(constraints={"*:scaled_dot_product_attention": "S(1)"}, microbatches=microbatches)
    plan = autopar.plan(model, sample, MESH, **options)
    heads, rows = {name: line for name, line in plan.padded.items() if "attention" in name}, 8 // plan.microbatches
    assert set(heads.values()) == {f"{rows} x 6 x 8 x 4 -> {rows} x 8 x 8 x 4"}
    assert len(heads) == 3
    report = verify(model, sample, MESH, plan, Options(), threads)
    assert report.ok, report


class Wide(nn.Module):
    """Blocks whose inner width no mesh divides, as the width of what goes from one stage to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(30, 22), nn.Tanh(), nn.Linear(22, 30)) for _ in range(4))
        self.rise, self.fall = nn.Linear(16, 30), nn.Linear(30, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.rise(x)
        for block in self.blocks:
            x = x + block(x)
        scores = self.fall(x)
        return {"scores": scores, "loss": scores.square().sum()}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 20))])
def test_random_layouts_of_padded_values_cross_between_stages(threads: Threads, seed: int) -> None:
    torch.manual_seed(0)
    model, sample = Wide(), {"x": torch.randn(8, 4, 16)}
    options = {"microbatches": 2, "constraints": {"rise.weight": "S(0)", "blocks.*.0.weight": "S(0)"}}
    plan = random_stages(model, sample, MESH, "pp", seed, **options)
    assert plan.padded["rise.weight"] == "30 x 16 -> 32 x 16"
    report = verify(model, sample, MESH, plan, Options(), threads)
    assert report.ok, report


@pytest.mark.thorough
def test_an_odd_vocabulary_takes_what_an_even_one_takes() -> None:
    options = asked(strategy="megatron", constraints={})
    odd, even = (autopar.plan(*gpt2(words, width=256, length=256), {"pp": 2, "tp": 8}, **options) for words in (50257, 50264))
    assert odd.padded == {TABLE: "50257 x 256 -> 50264 x 256"}
    assert not even.padded
    assert odd.step_time == pytest.approx(even.step_time, rel=1e-3)
    assert odd.peak_memory == pytest.approx(even.peak_memory, rel=1e-3)


def test_a_named_strategy_that_pads_nothing_has_whole_dims_in_stages() -> None:
    plan = autopar.plan(*gpt2(), {"pp": 2, "dp": 4}, **asked(strategy="fsdp", constraints={}))
    assert plan.padded == {}


def test_padding_that_a_plan_cannot_have_is_refused() -> None:
    model, sample = gpt2()
    plan = autopar.plan(model, sample, MESH, **asked(strategy="megatron"))
    for line in ("101 x 16 -> 512 x 16", "101 x 16 -> 100 x 16", "99 x 16 -> 104 x 16", "-> x", "101 x 16 -> 102 x 16"):
        damaged = replace(plan, padded={TABLE: line})
        with pytest.raises(PlanError):
            read_pipeline(Plan.from_json(damaged.to_json()), read_program(model, sample).program)
