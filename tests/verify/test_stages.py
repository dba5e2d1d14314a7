"""Verification of plans in stages: the outputs and gradients of each rank, and the communication of each stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.passes.microbatches import microbatches
from autopar.passes.stage_regions import fine_starts
from autopar.plan.options import Options
from autopar.planning.pipeline_plan import staged, written
from autopar.planning.pipeline_space import PipelineAxis
from autopar.planning.pipeline_stages import StageCuts
from autopar.planning.planner import connected_mesh, read_program
from autopar.runtime.workers import WorkerPool
from autopar.solver.settings import DEFAULTS
from autopar.verify import verification
from tests.support import models, planning, table
from tests.support.random_stages import random_stages
from tests.support.threads import Threads

CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("gpt2", {"pp": 2, "dp": 2}, {"strategy": "fsdp", "schedule": "1f1b", "microbatches": 2}),
    ("gpt2", {"pp": 2, "dp": 2}, {"strategy": "fsdp", "schedule": "zb-h1+1", "microbatches": 4}),
    ("gpt2", {"pp": 2, "tp": 2}, {"strategy": "megatron", "schedule": "zb-h1", "microbatches": 2, "recompute": "blocks"}),
    ("t5", {"pp": 2}, {"stages": 4, "microbatches": 2}),
    ("t5", {"pp": 2}, {"schedule": str(Path(__file__).parents[1] / "support" / "v_shaped.csv")}),
    ("bert", {"pp": 2}, {"microbatches": 1}),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name, mesh, options", CASES)
def test_stages_are_verified_like_whole_models(
    name: str, mesh: dict[str, int], options: dict[str, Any], threads: Threads
) -> None:
    model, sample = models.make(name)
    plan = autopar.plan(model, sample, mesh, device="h100", pipeline="pp", **options)
    report = verification.verify(model, sample, mesh, plan, Options(), threads)
    assert report.ok, report
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    named = {row.name for row in report.rows if row.what == "gradient"}
    assert named == trained
    assert {"loss", "logits"} <= {row.name for row in report.rows if row.what == "output"}


@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
@pytest.mark.parametrize("start", ["transformer.h.0.attn.c_proj", "transformer.h.1.mlp.c_proj"])
def test_stages_that_begin_between_two_products_are_verified(start: str, strategy: str, threads: Threads) -> None:
    """Where only a cut by what stages take may begin: behind attention, and within a feed-forward network."""
    model, sample = models.make("gpt2")
    options = Options(device="h100", strategy=strategy, pipeline="pp", microbatches=2, schedule="1f1b")
    mesh, captured = connected_mesh({"pp": 2, "tp": 2}, options), read_program(model, sample, options)
    cuts, over = StageCuts(microbatches(captured.program, 2), mesh.device), PipelineAxis.of(mesh, "pp", options, DEFAULTS)
    place = next(at for at in fine_starts(cuts.step.program) if cuts.step.program.ops[at].name.startswith(f"{start}:"))
    cut = replace(cuts.chosen(mesh, "pp", options, 2), starts=(0, place), modules=("transformer.wte", start))
    plan = written(staged(cuts.steps(cut.starts), mesh, "pp", cut, over.planner), over.planner, options, "")
    assert plan.pipeline is not None
    assert len(plan.pipeline.crossings) == 2
    report = verification.verify(model, sample, {"pp": 2, "tp": 2}, plan, Options(), threads)
    assert report.ok, report


class Windows(nn.Module):
    """Attention in windows of 4 x 4, as in Swin: all layers look up the offsets in one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Linear(8, 8)) for _ in range(2))
        self.register_buffer("offsets", torch.arange(256) % 31)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 31))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape[1] // 4, x.shape[2] // 4
        for layer in self.layers:
            h = x.unflatten(2, (columns, 4)).unflatten(1, (rows, 4)).transpose(2, 3).reshape(-1, 16, 8)
            q, k, v = layer[0](h).chunk(3, -1)
            h = (q @ k.transpose(1, 2) + self.bias[self.offsets].view(16, 16)).softmax(-1) @ v
            h = layer[1](h).view(-1, rows, columns, 4, 4, 8).transpose(2, 3)
            x = x + h.reshape(x.shape)
        return x.square().mean()


class Tied(nn.Module):
    """One weight, which the first layers use in thirds and the last ones whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4))
        self.weight = nn.Parameter(torch.linspace(-1, 1, 192).view(24, 8).sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.layers[0](x)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in nn.functional.linear(x, self.weight).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        for layer in self.layers[1:]:
            x = x + layer(x)
        return (x + nn.functional.linear(x, self.weight).tanh() @ self.weight).square().mean()


@pytest.mark.parametrize(
    "made, sizes, options",
    [
        pytest.param(
            Windows, (4, 8, 8, 8), {"stages": 2}, marks=pytest.mark.thorough
        ),  # the second stage receives merged windows, split along the rows of each image
        (Windows, (4, 8, 8, 8), {"stages": 4}),  # two stages of a rank look the offsets up
        (Tied, (4, 4, 8), {"stages": 2, "strategy": "megatron"}),  # the second stage stores thirds that it does not ask for
    ],
)
def test_a_stage_takes_what_another_one_splits_in_blocks_of_its_own(
    made: type[nn.Module], sizes: tuple[int, ...], options: dict[str, Any], threads: Threads
) -> None:
    model, sample, mesh = made(), torch.randn(sizes, generator=torch.Generator().manual_seed(0)), table.mesh((2, 2))
    plan = autopar.plan(model, sample, mesh, pipeline=mesh.axes[0], microbatches=2, **options)
    report = verification.verify(model, sample, mesh, plan, Options(), threads)
    assert report.ok, report
    for name in model.state_dict():
        assert len({stage.layouts[name] for stage in plan.stages if name in stage.layouts}) == 1


def test_what_a_stage_issues_beyond_its_plan_is_seen(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = models.make("gpt2")
    mesh = {"pp": 2, "dp": 2}
    plan = autopar.plan(model, sample, mesh, device="h100", pipeline="pp", microbatches=2, strategy="ddp")
    monkeypatch.setattr(verification, "collectives_of", lambda *of: ())
    report = verification.verify(model, sample, mesh, plan, Options(), pool)
    assert not report.ok
    assert {entry.partition(" dp ")[0] for entry in report.surplus} == {"pp=0: all_reduce", "pp=1: all_reduce"}
    assert all(row.ok for row in report.rows)


def test_a_tensor_that_no_rank_has_is_no_equal_tensor() -> None:
    assert verification._error([({}, []), ({("output", "loss"): 0.0}, [])], "output", "loss") == 0.0
    assert verification._error([({}, []), ({}, [])], "output", "loss") == math.inf


def test_a_plan_of_another_model_is_refused_before_any_process_is_started() -> None:
    model, sample = models.make("gpt2")
    plan = autopar.plan(model, sample, {"pp": 2}, device="h100", pipeline="pp", microbatches=2)
    with pytest.raises(PlanError, match="another model"):
        autopar.verify(model, sample, {"pp": 2}, plan=replace(plan, hash="0" * 16))


class Counting(torch.nn.Module):
    """It counts its calls in a buffer, which a step of several micro-batches computes once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(x).square().mean()


@pytest.mark.parametrize("mesh, options", [({"pp": 2, "dp": 2}, {"pipeline": "pp"}), ((2,), {})])
def test_calls_are_counted_beside_weights_that_are_sharded(mesh: Any, options: dict[str, Any], pool: WorkerPool) -> None:
    """In processes of their own, which store the buffer as a DTensor; threads have plain tensors."""
    model, sample = Counting(), torch.linspace(-1, 1, 64).reshape(8, 8)
    plan = autopar.plan(model, sample, mesh, device="h100", strategy="fsdp", microbatches=2, **options)
    report = verification.verify(model, sample, mesh, plan, Options(), pool)
    assert report.ok, report
    assert "calls" in {row.name for row in report.rows if row.what == "buffer"}


def linears() -> tuple[torch.nn.Module, object]:
    return planning.Layers((8, 16, 8, 16, 8), bias=True), torch.randn(8, 4, 8)


def untied() -> tuple[torch.nn.Module, object]:
    """A GPT-2 whose head is its own."""
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": 32, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(32, (8, 8))
    return model, {"input_ids": tokens, "labels": tokens}


SEEDS = (
    pytest.param(linears, (1, 10, 16), id="linears"),
    pytest.param(linears, range(200), id="200 of linears", marks=pytest.mark.thorough),
    pytest.param(untied, range(12), id="gpt2", marks=pytest.mark.thorough),
)


@pytest.mark.parametrize("made, seeds", SEEDS)
def test_random_plans_of_stages_that_send_in_every_state_have_equal_numbers(
    threads: Threads, made: Callable[[], tuple[torch.nn.Module, object]], seeds: Sequence[int]
) -> None:
    """A state says what a value and its gradient are, so that sending each rank's part as it lies is exact in all four."""
    states = set()
    for number, seed in enumerate(seeds):
        schedule = ("1f1b", "zb-h1", "gpipe")[number % 3]
        torch.manual_seed(seed)
        model, sample = made()
        mesh = {"pp": 2, "x": 2, "y": 2}
        plan = random_stages(model, sample, mesh, "pp", seed, schedule=schedule, microbatches=2, strategy="ddp")
        assert plan.pipeline is not None
        states |= {entry.strip()[0] for crossing in plan.pipeline.crossings for entry in crossing.layout.split(",")}
        report = verification.verify(model, sample, mesh, plan, Options(), threads)
        assert report.ok, (seed, str(report))
    assert states == {"I", "R", "S", "P"}
