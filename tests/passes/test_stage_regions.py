"""Where stages may begin: at blocks, within blocks if no more is sent, and where a module runs again."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import autopar
from autopar.analysis.regions import regions
from autopar.ir.program import Program
from autopar.passes.stage_regions import stage_starts
from autopar.passes.stages import cut
from autopar.plan.options import Options
from autopar.planning.planner import read_program
from tests.support import models, pipelines

WIDTH = 4096
LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"
MODELS = "bert cnn gpt2 llama opt t5 vit".split()


def starts(program: Program) -> list[str]:
    """The module of the op with which each region begins."""
    return [program.ops[first].name.partition(":")[0] for first in stage_starts(program)]


def albert(**options: object) -> Program:
    return read_program(*pipelines.albert(), Options(**options)).program  # type: ignore[arg-type]


def test_a_block_is_cut_between_attention_and_feed_forward_layers() -> None:
    assert starts(models.captured("gpt2").program)[1:] == [
        "transformer.h.0.ln_2",
        "transformer.h.1.ln_1",
        "transformer.h.1.ln_2",
        "transformer.ln_f",
    ]


def test_a_module_that_runs_again_begins_a_region() -> None:
    found = [name for name in starts(albert()) if name.startswith(LAYER)]
    assert [name.removeprefix(LAYER).split(".")[1] for name in found] == ["attention", "ffn", "attention", "ffn"]


class Again(nn.Module):
    """One layer that runs three times, within which more passes than where it begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.norm = nn.LayerNorm(8, elementwise_affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.norm(x + self.down(self.up(x).relu()))
        return x.square().mean()


@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
def test_a_call_begins_a_region_where_least_passes(precision: str | None) -> None:
    """In mixed precision before casts of what the call reads; there weights are casts of parameters."""
    program = read_program(Again(), torch.randn(4, 8), Options(precision=precision)).program
    firsts = stage_starts(program)
    assert [len(stage.sent) for stage in cut(program, firsts)] == [1, 1, 0]


@pytest.mark.parametrize("name", MODELS)
def test_no_more_is_sent_within_a_block_than_where_it_begins_or_ends(name: str) -> None:
    """As the stages themselves say, of which each has one region."""
    program = models.captured(name).program
    firsts, blocks = stage_starts(program), {0, *(end + 1 for end in regions(program))}
    assert blocks - {len(program.ops)} < set(firsts)
    sent = [sum(program.values[value].bytes for value in stage.sent) for stage in cut(program, firsts)[:-1]]
    between = [place for place, first in enumerate((*firsts, len(program.ops))) if first in blocks]
    for first, stop in itertools.pairwise(between):
        outside = [sent[place - 1] for place in (first, stop) if 0 < place < len(firsts)]
        assert all(sent[place - 1] <= max(outside) for place in range(first + 1, stop))


class Halves(nn.Module):
    """A block of two halves, each of which adds to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.one(x)
        return x + self.other(x)


class Headed(nn.Module):
    """Four blocks, and a head that is as dear as one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Halves() for _ in range(4))), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)).square().mean()  # type: ignore[no-any-return]


def test_stages_are_more_equal_than_whole_blocks_allow() -> None:
    how = {"device": "h100", "pipeline": "pp", "microbatches": 8, "schedule": "1f1b"}
    with torch.device("meta"):
        model, x = Headed(), torch.empty(1 << 17, WIDTH)
    found = autopar.plan(model, x, {"pp": 2}, **how)
    assert found.pipeline is not None
    assert found.pipeline.modules == ("blocks.0.one", "blocks.2.other")
    whole = (autopar.plan(model, x, {"pp": 2}, stages=[f"blocks.{block}"], **how).step_time for block in (2, 3))
    assert found.step_time < 0.95 * min(whole)
