"""Plans with a pipeline: their contents, printing and saving, and every error of their options."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, BudgetError, ConstraintError, MeshError, PlanError
from autopar.plan.plan import Plan
from autopar.plan.stages import read_pipeline
from autopar.planning.planner import read_program
from tests.support import models, pipeline_checkpoints, pipelines
from tests.support.golden import Golden

MESH = {"pp": 2, "dp": 2}
BY_ROUNDS = {"schedule": "interleaved"}
CHUNKS = ["encoder.block.1", "encoder.final_layer_norm", "decoder.block.1"]


def planned(model: str = "gpt2", mesh: object = None, **options: Any) -> Plan:
    asked = {"device": "h100", "pipeline": "pp", "strategy": "ddp", "microbatches": 4, "schedule": "1f1b"} | options
    return autopar.plan(*models.make(model), mesh or MESH, **asked)


@functools.cache
def usual() -> Plan:
    """The plan with nothing else asked for."""
    return planned()


def test_a_plan_has_a_plan_for_every_stage_and_prints_its_schedule(golden: Golden, tmp_path: Path) -> None:
    made = usual()
    assert made.pipeline is not None
    assert [stage.axes for stage in made.stages] == [("dp",)] * 2
    assert made.pipeline.tied == {"transformer.wte.weight": (0, 1)}
    assert len({stage.layouts["transformer.wte.weight"] for stage in made.stages}) == 1
    (crossing,) = made.pipeline.crossings
    assert made.stages[1].layouts[crossing.value] == made.stages[0].layouts[f"output:{crossing.value}"] == crossing.layout
    assert made.step_time == made.pipeline.timeline.seconds
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    golden.check("pipeline_plan.txt", str(made))


@pytest.mark.parametrize("strategy, state", [("ddp", "S(0)"), ("megatron", "P")])
def test_a_value_crosses_in_the_state_in_which_the_strategy_leaves_it(strategy: str, state: str) -> None:
    pipeline = planned(strategy=strategy).pipeline
    assert pipeline is not None
    assert {crossing.layout for crossing in pipeline.crossings} == {state}


def test_chunks_are_interleaved_and_stages_begin_where_the_user_says() -> None:
    pipeline = planned("t5", {"pp": 2}, stages=CHUNKS, schedule="interleaved").pipeline
    assert pipeline is not None
    assert pipeline.schedule == "interleaved"
    assert [module.split(".layer")[0] for module in pipeline.modules[1:]] == CHUNKS
    assert [pipeline.order.rank_of[stage] for stage in range(4)] == [0, 1, 0, 1]


def test_interleaved_stages_need_no_number() -> None:
    """They are the fastest of two to four a rank."""
    made = planned("gpt2", {"pp": 2}, schedule="interleaved")
    two_a_rank = planned("gpt2", {"pp": 2}, schedule="interleaved", stages=4)
    assert len(made.stages) >= 4
    assert made.step_time <= two_a_rank.step_time


def test_memory_counts_the_micro_batches_in_flight() -> None:
    by_schedule = {name: planned(schedule=name, microbatches=4).stages for name in ("gpipe", "1f1b")}
    first, last = ([stages[place].peak_memory for stages in by_schedule.values()] for place in (0, 1))
    assert first[0] > first[1]
    assert last[0] > last[1]
    one = planned(microbatches=4, schedule="gpipe", budget="4MiB").stages[0].peak_memory
    assert one <= 4 << 20


@pytest.mark.parametrize("schedule", [pytest.param("interleaved", marks=pytest.mark.thorough), "zb-v"])
def test_the_stages_of_a_rank_share_its_memory_as_they_need_it(schedule: str) -> None:
    """What holds so many bytes fits into them: the first stage of a rank has more micro-batches in flight than the last."""
    asked: dict[str, Any] = {"model": "t5", "mesh": {"pp": 2}, "microbatches": 8, "stages": 4}
    free = planned(**asked, schedule=schedule, budget="1TB")
    tight = planned(**asked, schedule=schedule, budget=free.peak_memory)
    assert max(stage.peak_memory for stage in free.stages) > free.peak_memory / 2
    assert tight.step_time == free.step_time
    assert tight.peak_memory <= free.peak_memory


class Two(nn.Module):
    """Two scalars, neither of which is called the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for layer in self.layers:
            x = layer(x)
        return x.sum(), x.square().sum()


class Squares(nn.Module):
    """The sum of squares."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum()


WRONG: list[tuple[dict[str, Any], type[AutoparError], str, str]] = [
    ({"pipeline": "tp"}, MeshError, "the mesh has no axis 'tp' for the pipeline", "one of pp, dp"),
    ({"pipeline": "auto", "stages": 2}, ConstraintError, "stages=2 are of the ranks of an axis", "the name of the axis"),
    ({"pipeline": "auto", "stages": ["transformer.h.1"]}, ConstraintError, "are of the ranks of an axis", "no stages="),
    (
        {"pipeline": "auto", "constraints": {"*.weight": "S(0), I"}},
        ConstraintError,
        "the constraint '*.weight' names a layout on the outermost axis",
        "* for that axis",
    ),
    (
        {"mesh": {"pp": 6, "dp": 2}},
        ConstraintError,
        "the model can be cut into 5 stages at most, not into 6",
        "stages=5 at most",
    ),
    ({"microbatches": 3}, ConstraintError, "a step cannot run in 3 micro-batches: the batch is 8", "a divisor of 8"),
    ({"microbatches": "some"}, ConstraintError, "microbatches='some' is not a number", "1 or more"),
    ({"schedule": "1f1b+x"}, ConstraintError, "'1f1b+x' is not a pipeline schedule", "interleaved"),
    ({"stages": 3}, ConstraintError, "3 stages cannot be shared by the 2 ranks", "a multiple of 2 stages"),
    ({"stages": 0}, ConstraintError, "stages=0 is not a number of stages", "their number"),
    ({"stages": "two"}, ConstraintError, "stages='two' is not a number of stages", "their number"),
    (
        {"stages": ["transformer.h.7"]},
        ConstraintError,
        "no stage of the pipeline can begin at 'transformer.h.7'",
        "a stage can begin",
    ),
    ({"stages": 2.0}, ConstraintError, "stages=2.0 is not a number of stages", "their number"),
    ({"stages": {"transformer.h.1"}}, ConstraintError, "stages={'transformer.h.1'} is not a number of stages", "a list"),
    ({"schedule": ["1f1b"]}, ConstraintError, "schedule=['1f1b'] is neither the name of a pipeline schedule", "'1f1b'"),
    ({"schedule": "zb-h1", "microbatches": 1}, ConstraintError, "takes more than one micro-batch", "two, or 1f1b"),
    ({"schedule": "zb-v", "stages": 2}, ConstraintError, "no pipeline schedule zb-v of 2 ranks", "stages=4, or interleaved"),
    ({"schedule": "2f2b"}, ConstraintError, "'2f2b' is not a pipeline schedule", "interleaved"),
    ({"schedule": "interleaved", "stages": 2}, ConstraintError, "no pipeline schedule interleaved of 2 ranks", "stages=4"),
    ({"dynamic": {"batch": 7}}, ConstraintError, "dynamic['batch'] is not a dim of any input", "a dim, a mapping"),
    ({"constraints": {"nothing": "I"}}, ConstraintError, "the constraint 'nothing' names nothing", "a parameter"),
    ({"budget": "20KiB"}, BudgetError, "stage 0 of the pipeline: no plan fits", "budget"),
]


NO_SCHEDULE = {"schedule": "auto", "budget": "20KiB"}, BudgetError, "stage 0 of the pipeline: no plan fits", "larger budget"


@pytest.mark.parametrize(
    "options, kind, what, fix",
    [*WRONG, pytest.param(*NO_SCHEDULE, marks=pytest.mark.thorough)],
    ids=[what for *_, what, _ in [*WRONG, NO_SCHEDULE]],
)
def test_what_is_asked_for_and_cannot_be_is_an_error_with_a_way_out(
    options: dict[str, Any], kind: type[AutoparError], what: str, fix: str
) -> None:
    with pytest.raises(kind) as caught:
        planned(**options)
    assert what in caught.value.what
    assert fix in caught.value.details["fix"]


def test_a_budget_of_fewer_bytes_than_a_rank_has_stages_is_refused_like_any() -> None:
    options = {"pipeline": "pp", "stages": 4, "microbatches": 4, "schedule": "interleaved", "budget": 1}
    with pytest.raises(BudgetError, match="stage 0 of the pipeline: no plan fits into 1 B per device"):
        autopar.plan(pipeline_checkpoints.model(), pipeline_checkpoints.batch(), {"pp": 2}, device="h100", **options)


class Skipping(nn.Module):
    """What the stem makes crosses every cut, beside what the blocks make."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return (x + first).square().sum()


def test_a_plan_whose_stages_send_values_of_several_modules_is_printed() -> None:
    made = autopar.plan(Skipping(), torch.randn(4, 8), {"pp": 2}, device="h100", pipeline="pp", microbatches=2)
    assert made.pipeline is not None
    assert {crossing.value for crossing in made.pipeline.crossings} == {"stem:linear#0", "layers.1.0:linear#0"}
    assert "stem:linear#0, layers.1.0:linear#0 as I" in str(made)


class Halving(Skipping):
    """Whose blocks begin with what the model itself does, and are wider within."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x / 2)
        return x.sum()


class Bare(nn.Module):
    """Of no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.first).relu() @ self.second).sum()


def test_where_blocks_begin_in_no_module_their_number_is_the_way_out() -> None:
    with pytest.raises(ConstraintError, match=r"can begin at 'layers\.2'") as caught:
        autopar.plan(Bare(), torch.randn(4, 8), {"pp": 2}, device="h100", pipeline="pp", stages=["layers.2"])
    assert caught.value.details == {"fix": "how many stages: regions begin in no module"}
    with pytest.raises(ConstraintError, match="can begin at ''"):  # of `--stages ""`
        autopar.plan(Halving(), torch.randn(4, 8), {"pp": 2}, device="h100", pipeline="pp", stages=[""])


class Sines(nn.Module):
    """What takes longer than a few layers, and has no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x.sin()
        return x.sum()


def test_every_rank_has_a_parameter_for_its_optimizer() -> None:
    """torch.optim refuses an empty list of them."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)), Sines())
    made = autopar.plan(model, torch.randn(4096, 8), {"pp": 3}, device="h100", pipeline="pp", microbatches=2)
    assert all(any(name.endswith(".weight") for name in stage.layouts) for stage in made.stages)


def test_stages_out_of_order_are_refused() -> None:
    with pytest.raises(ConstraintError, match="are not in the order of the program: encoder"):
        planned("t5", {"pp": 3}, stages=["decoder.block.1", "encoder.block.1"])


def test_interleaved_rounds_are_of_equal_length() -> None:
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(6)), Squares())
    with pytest.raises(ConstraintError, match="no pipeline schedule interleaved of 3 ranks, 10 micro-batches") as caught:
        autopar.plan(deep, torch.randn(10, 8), {"pp": 3}, device="h100", pipeline="pp", stages=6, microbatches=10, **BY_ROUNDS)
    assert caught.value.details["rounds"] == "3 of equal length"


def test_a_model_without_one_loss_is_refused() -> None:
    with pytest.raises(ConstraintError, match="a pipeline needs a loss, and 2 outputs of the model are scalars"):
        autopar.plan(Two(), torch.randn(4, 8), {"pp": 2}, device="h100", pipeline="pp", microbatches=2)


def test_a_model_that_mixes_samples_is_refused() -> None:
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))
    with pytest.raises(ConstraintError, match="a step cannot run in 2 micro-batches"):
        autopar.plan(
            nn.Sequential(*blocks, Squares()), torch.randn(4, 8), {"pp": 2}, device="h100", pipeline="pp", microbatches=2
        )


def test_a_constraint_on_a_tied_parameter_holds_in_all_of_its_stages() -> None:
    made = planned(strategy="auto", constraints={"transformer.wte.weight": "S(0)"})
    assert [stage.layouts["transformer.wte.weight"] for stage in made.stages] == ["S(0)"] * 2
    with pytest.raises(ConstraintError, match="names nothing"):
        planned(strategy="auto", constraints={"transformer.h.7.*": "I"})


def test_a_sample_with_a_gradient_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(ConstraintError, match="a pipeline computes no gradients of inputs"):
        autopar.plan(Two(), x, {"pp": 2}, device="h100", pipeline="pp", microbatches=2)


def damaged(change: str) -> str:
    data = json.loads(usual().to_json())
    match change:
        case "an action twice":
            data["pipeline"]["ranks"][0] += ",0F0"
        case "one that lacks":
            data["pipeline"]["ranks"][1] = data["pipeline"]["ranks"][1].removesuffix(",1B3")
        case "order that hangs":
            first, *rest = data["pipeline"]["ranks"][1].split(",")
            data["pipeline"]["ranks"][1] = ",".join([rest[0], first, *rest[1:]])
        case "a stage less":
            data["stages"].pop()
        case "other axis":
            data["pipeline"]["axis"] = "tp"
        case "stage of other micro-batches":
            data["stages"][0]["microbatches"] = 2
        case "no pipeline":
            data["pipeline"] = None
        case "all on one rank":
            stage, count = "0F{0},1F{0},1B{0},0B{0}", data["microbatches"]
            data["pipeline"]["ranks"] = [",".join(stage.format(k) for k in range(count)), ""]
        case "time that runs backwards":
            data["pipeline"]["seconds"][0]["forward"] = -1.0
        case "stage on another mesh":
            data["stages"][0]["mesh"]["axes"] = ["pp"]
    return json.dumps(data)


@pytest.mark.parametrize(
    "change, said",
    [
        ("an action twice", "repeats 0F0"),
        ("one that lacks", "lacks 1B3"),
        ("order that hangs", "hangs"),
        ("a stage less", "one entry per stage"),
        ("other axis", "one line per rank of an axis"),
        ("stage of other micro-batches", "stages.0 is not a stage of this plan"),
        ("no pipeline", "stages are of a pipeline"),
        ("all on one rank", "a line that is not one rank's"),
        ("time that runs backwards", "pipeline.seconds are not negative"),
        ("stage on another mesh", "stages.0 is not a stage of this plan"),
    ],
)
def test_a_damaged_pipeline_is_refused(change: str, said: str) -> None:
    with pytest.raises(PlanError, match="damaged") as caught:
        Plan.from_json(damaged(change))
    assert said in str(caught.value)


class Tied(nn.Module):
    """A weight that the first and the last stage read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for h in self.h:
            x = h(x)
        return nn.functional.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), words.flatten())


@pytest.mark.parametrize("field", ["tied", "crossings"])
def test_a_plan_whose_stages_send_or_share_otherwise_than_it_says_is_refused(field: str) -> None:
    sample = torch.zeros(4, 8, dtype=torch.long)
    made = autopar.plan(Tied(), sample, {"pp": 2}, device="h100", pipeline="pp", microbatches=2)
    program = read_program(Tied(), sample).program
    assert read_pipeline(made, program).plan == made
    assert made.pipeline is not None
    other = {  # gradients that nobody adds up, and one that is not sent back
        "tied": {},
        "crossings": tuple(replace(one, gradient=False) for one in made.pipeline.crossings),
    }[field]
    assert getattr(made.pipeline, field) != other
    wrong = replace(made, pipeline=replace(made.pipeline, **{field: other}))
    with pytest.raises(PlanError, match=rf"its pipeline.{field} are not those of its stages"):
        read_pipeline(Plan.from_json(wrong.to_json()), program)


def test_what_knows_no_stages_says_so() -> None:
    model, sample = models.make("gpt2")
    plain = autopar.plan(model, sample, (1,), device="h100")
    with pytest.raises(PlanError, match="pipeline='axis0' is given, but the plan was made with another"):
        autopar.parallelize(model, sample, (1,), plan=plain, pipeline="axis0")


def test_a_pipeline_axis_of_one_rank_needs_no_processes() -> None:
    model, sample = models.make("gpt2")
    parallel = autopar.parallelize(model, sample, {"pp": 1}, device="h100", pipeline="pp", stages=2, microbatches=2)
    expected = model.eval()(**sample)["loss"]
    parallel.eval()
    torch.testing.assert_close(parallel.step(**sample), expected)
    with torch.no_grad():
        torch.testing.assert_close(parallel(**sample)["loss"], expected)
    autopar.initialize(parallel, model)  # nothing of it is on meta


def test_stages_of_one_rank_fit_where_their_smallest_peaks_together_do_not() -> None:
    """Those come at different times. Each stage is given what it needs at least, one after the other."""
    model, sample = pipelines.gpt2(4, n_layer=4)
    stages = [f"transformer.h.{block}" for block in (1, 2, 3)]
    how = {"pipeline": "pp", "stages": stages, "schedule": "interleaved", "microbatches": 4, "device": "h100"}
    plan = autopar.plan(model, sample, {"pp": 2}, budget=4_600_000, **how)
    assert plan.pipeline is not None
    own = [sum(stage.peak_memory for stage in plan.stages[rank::2]) for rank in range(2)]
    assert max(plan.pipeline.memory) <= 4_600_000 < min(own)
    again = autopar.plan(model, sample, {"pp": 2}, budget=max(plan.pipeline.memory), **how)
    assert again.step_time == plan.step_time
