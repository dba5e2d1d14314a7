"""The evidence of a plan: its seconds and bytes add up, and its sentences describe what the plan does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.analysis.analysis import analyse
from autopar.errors import PlanError
from autopar.explain import report
from autopar.files import typed
from autopar.formulation.cost_breakdown import told
from autopar.formulation.read_solution import assignment
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.training_step import TrainingStep
from autopar.operators.dim_labels import LabelSample
from autopar.plan.breakdown import CostBreakdown
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.text import plain
from autopar.planning.optimize import analysed, solved
from autopar.planning.planner import connected_mesh
from autopar.verify.testing import random_plan, random_plan_of
from tests.capture.models import MODELS
from tests.plan.test_plan import MESH, NAMED, captured, plan
from tests.support.planning import gpt2
from tests.support.prices import bill

NAMES = ("gpt2", "llama", "vit")


def check_adds_up(made: Plan) -> None:
    """Seconds to the step time, bytes to the peak."""
    breakdown = made.breakdown
    computed = (breakdown.forward, breakdown.backward, breakdown.recomputed)
    parts = (*computed, breakdown.offloaded, breakdown.conversions, breakdown.optimizer)
    sent = sum(entry.seconds for entry in made.collectives) - breakdown.hidden
    assert sum(parts) + sent == pytest.approx(made.step_time, rel=1e-12)
    assert sum(breakdown.memory.values()) == made.peak_memory
    assert [entry.bytes for entry in breakdown.fullest] == sorted((entry.bytes for entry in breakdown.fullest), reverse=True)
    assert sum(entry.bytes for entry in breakdown.fullest) <= made.peak_memory


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name, strategy", NAMED)
def test_the_cost_breakdown_of_a_strategy_adds_up_to_its_totals(name: str, strategy: str) -> None:
    check_adds_up(plan(name, strategy))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_the_cost_breakdown_of_a_random_plan_adds_up_to_its_totals(name: str, seed: int) -> None:
    options = Options(device="h100", strategy="random")
    check_adds_up(random_plan_of(captured(name), connected_mesh(MESH, options), seed, options))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
@pytest.mark.parametrize("name", NAMES)
def test_each_part_is_what_another_reckoning_says(name: str, strategy: str) -> None:
    made = plan(name, strategy)
    own = bill(made, TrainingStep(program=captured(name).program), connected_mesh(MESH, Options(device="h100")))
    breakdown = made.breakdown
    assert breakdown.forward + breakdown.backward == pytest.approx(own.ops, rel=1e-9)
    assert breakdown.optimizer == pytest.approx(own.optimizer, rel=1e-9)
    assert breakdown.conversions == pytest.approx(own.local + own.inputs + own.copied + own.joined, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_held_at_a_moment_is_what_the_walk_finds_there(name: str) -> None:
    options = Options(device="h100")
    mesh = connected_mesh(MESH, options)
    found = solved(analysed(TrainingStep(program=captured(name).program), mesh, options), mesh, options)
    chosen = assignment(found.formulated, found.solution)
    alive = found.memory_model.liveness.walk(chosen)
    for moment in range(0, len(alive), max(1, len(alive) // 16)):
        assert sum(held.bytes for held in found.memory_model.held(chosen, moment)) == alive[moment]


def test_every_figure_names_its_unit_and_its_source() -> None:
    cost_parameters = plan("gpt2").breakdown.cost_parameters
    assert {figure.of for figure in cost_parameters} == {"device", "axis0", "axis1", "optimizer", "budget", "accuracy"}
    assert all(figure.source and figure.value for figure in cost_parameters)
    assert {figure.unit for figure in cost_parameters} == {"op/s", "B", "B/s", "s", ""}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_from_its_json_is_reported_alike(name: str) -> None:
    made = plan(name, "megatron")
    text = plain(report(made))
    assert plain(report(Plan.from_json(made.to_json()))) == text
    assert all(len(line) <= 128 for line in text.splitlines())


@pytest.mark.parametrize(
    "damage", [{"breakdown": {}}, {"breakdown": None}, {"breakdown": {"cost_parameters": [{"of": "device"}]}}]
)
def test_a_plan_with_a_damaged_cost_breakdown_is_damaged(damage: dict[str, object]) -> None:
    data = json.loads(plan("gpt2").to_json()) | damage
    with pytest.raises(PlanError, match="the plan is damaged"):
        Plan.from_json(json.dumps(data))


def words(made: Plan, op: str) -> tuple[str, ...]:
    return made.breakdown.runs[op]


def test_splits_are_said_in_the_words_of_the_operator() -> None:
    made = plan("llama", "megatron")
    layer = "model.layers.0"
    assert words(made, f"{layer}.self_attn.q_proj:linear#0") == ("batch", "out-features")
    assert words(made, f"{layer}.self_attn:scaled_dot_product_attention#0") == ("batch", "heads")
    assert words(made, f"{layer}.self_attn.o_proj:linear#0") == ("batch", "in-features")
    assert words(made, f"{layer}.mlp.down_proj:linear#0") == ("batch", "in-features")
    assert made.breakdown.stored[f"{layer}.mlp.down_proj.weight"] == ("whole", "in-features")
    assert made.breakdown.stored["input:input_ids"] == ("batch", "whole")
    assert plan("gpt2", "fsdp").breakdown.stored["transformer.wte.weight"] == ("vocabulary", "vocabulary")
    assert plan("gpt2", "ddp").breakdown.stored["transformer.wte.weight"] == ("whole", "whole")
    assert words(plan("gpt2", "ddp"), "transformer.h.0.attn.c_attn:addmm#0") == ("batch", "batch")


def test_a_fused_projection_is_split_within_its_blocks() -> None:
    assert plan("gpt2", "megatron").breakdown.stored["transformer.h.0.attn.c_attn.weight"] == (
        "whole",
        "out-features of each of 3 blocks",
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_everything_that_is_told_has_a_word_for_every_axis(name: str) -> None:
    program: Program = captured(name).program
    analysis = analyse(TrainingStep(program=program), Mesh.of(MESH))
    made = random_plan_of(
        captured(name), connected_mesh(MESH, Options(device="h100")), 1, Options(device="h100", strategy="random")
    )
    assert set(made.breakdown.runs) == {op.name for op in program.ops if told(analysis, op)}
    assert all(len(found) == 2 and all(found) for found in (*made.breakdown.runs.values(), *made.breakdown.stored.values()))


def test_rows_of_batch_and_sequence_are_told_apart_by_their_stride() -> None:
    program = gpt2(8, 64, 256).program
    sample = LabelSample.of(program)
    assert sample == LabelSample(batch=8, length=64)
    rows = replace(program.ops[0].results[0], shape=(512, 256))
    assert [sample.role(rows, 0, stride) for stride in (256, 64, 32)] == ["batch", "batch", "sequence"]
    whole = replace(rows, shape=(8, 64, 256))
    assert [sample.role(whole, dim, 2) for dim in range(3)] == ["batch", "sequence", "features"]
    assert sample.role(replace(rows, shape=(7, 3)), 1, 1) == "dim 1 (size 3)"


class Joined(nn.Module):
    """Rows that are remembered from before, and new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, before: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([before, x]))  # type: ignore[no-any-return]


def test_an_empty_first_input_is_no_batch_by_which_others_are_told() -> None:
    plan = random_plan(Joined(), (torch.empty(0, 8), torch.empty(8, 8)), Mesh.of((4,)), seed=3)
    assert plan.breakdown.runs["layer:linear#0"] == ("dim 0 (size 8)",)


def test_a_cost_breakdown_without_cost_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match='it has no entry "cost_parameters"'):
        typed(CostBreakdown, {})
