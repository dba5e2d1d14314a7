"""Plans as data: text without loss, printed, equal to the decisions that it was made from."""

from __future__ import annotations

import functools
import json
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.table import Table

import autopar
from autopar.analysis.analysis import Analysis, analyse
from autopar.capture import Captured
from autopar.errors import PlanError
from autopar.ir.layout import I
from autopar.ir.mesh import Mesh
from autopar.ir.training_step import TrainingStep
from autopar.plan import resolved as reading
from autopar.plan.assignment_text import describe, resolve
from autopar.plan.options import Options
from autopar.plan.plan import Collective, Plan
from autopar.plan.resolved import ResolvedPlan, read_plan
from autopar.plan.text import folded, size_text
from autopar.planning.planner import connected_mesh, read_program, resolve_program
from autopar.search_space.schemes import strategies_for
from autopar.verify.testing import random_plan_of
from tests.capture.models import MODELS

MESH = (2, 2)
NAMED = [  # the 17 patches and class tokens of the ViT cannot be split over two devices
    (name, strategy)
    for name in ("gpt2", "llama", "vit")
    for strategy in strategies_for(Mesh.of(MESH))
    if (name, strategy) != ("vit", "fsdp+tp")
]


@functools.cache
def captured(name: str) -> Captured:
    torch.manual_seed(0)
    return read_program(*MODELS[name]())


@functools.cache
def analysed(name: str) -> Analysis:
    return analyse(TrainingStep(program=captured(name).program), Mesh.of(MESH))


@functools.cache
def resolved(name: str, strategy: str = "auto") -> ResolvedPlan:
    options = Options(device="h100", strategy=strategy)
    return resolve_program(captured(name).program, connected_mesh(MESH, options), options)


def plan(name: str, strategy: str = "auto") -> Plan:
    return resolved(name, strategy).plan


def check_round_trips(name: str, made: Plan) -> None:
    """JSON gives back the plan; its texts give back an assignment that has the same texts."""
    assert Plan.from_json(made.to_json()) == made
    program, analysis = captured(name).program, analysed(name)
    fits, assignment = analysis.fits, resolve(made, analysis.step, analysis.fits)
    assert describe(program, assignment, fits, made.sizes) == (made.choices, made.layouts, made.routes, made.recompute)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name, strategy", NAMED)
def test_the_text_of_a_plan_reads_back_into_the_assignment_that_was_planned(name: str, strategy: str) -> None:
    found = resolved(name, strategy)
    check_round_trips(name, found.plan)
    assert read_plan(found.plan, captured(name).program, found.plan.mesh).assignment == found.assignment


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_the_text_of_a_random_plan_reads_back_into_the_same_text(name: str, seed: int) -> None:
    options = Options(device="h100", strategy="random")
    check_round_trips(name, random_plan_of(captured(name), connected_mesh(MESH, options), seed, options))


def test_the_process_that_planned_emits_its_assignment_without_reading_it_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the plan was turned to text, or its text was read")

    monkeypatch.setattr(reading, "resolve", refuse)
    monkeypatch.setattr(Plan, "to_json", refuse)
    monkeypatch.setattr(Plan, "from_json", refuse)
    model, x = torch.nn.Linear(8, 4), torch.randn(2, 8)
    torch.testing.assert_close(autopar.parallelize(model, x, (1,))(x), model(x))


def test_the_json_has_the_fields_that_others_may_rely_on(tmp_path: Path) -> None:
    made = plan("gpt2", "ddp")
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    data = json.loads((tmp_path / "plan.json").read_text())
    assert set(data) == {
        "version",
        "searched",
        "hash",
        "mesh",
        "device",
        "options",
        "status",
        "gap",
        "step_time",
        "peak_memory",
        "once",
        "choices",
        "layouts",
        "routes",
        "recompute",
        "padded",
        "collectives",
        "breakdown",
        "microbatches",
        "dynamic",
        "pipeline",
        "stages",
    }
    assert data["mesh"] == {"axes": ["axis0", "axis1"], "sizes": [2, 2], "links": ["nvlink4", "nvlink4"]}
    assert data["hash"] == captured("gpt2").program.hash
    assert data["layouts"]["transformer.wte.weight"] == "I, I"
    assert set(data["collectives"][0]) == {"value", "more", "axis", "kind", "bytes", "pass", "seconds", "exposed"}
    assert {entry["pass"] for entry in data["collectives"]} <= {"forward", "backward"}


def test_a_plan_for_another_model_or_another_mesh_is_refused() -> None:
    other = captured("llama").program
    with pytest.raises(PlanError, match="the plan was made for another model or sample"):
        resolve(plan("gpt2"), TrainingStep(program=other), analysed("llama").fits)
    short = replace(plan("gpt2"), axes=("axis0",), sizes=(4,))
    with pytest.raises(PlanError, match="the plan is damaged"):
        resolve(short, analysed("gpt2").step, analysed("gpt2").fits)


def test_replicate_keeps_everything_whole_and_sends_nothing() -> None:
    made = plan("llama", "replicate")
    assignment = resolve(made, analysed("llama").step, analysed("llama").fits)
    assert {state for layout in assignment.given.values() for state in layout} == {I}
    assert made.collectives == ()
    assert ", 0.000 communication; " in str(made)
    assert " over axis" not in str(made)


class Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_notebook_shows_what_is_printed_whatever_names_are() -> None:
    made = plan("gpt2", "ddp")
    made = replace(made, layouts={"</pre><script>&amp;": "I, I", **made.layouts})
    assert "<script>" in str(made)
    page = Page(made._repr_html_())
    assert page.tags == ["pre"]
    assert page.text == str(made)


def test_the_printed_plan_has_totals_layouts_and_communication() -> None:
    made = plan("gpt2", "fsdp")
    text = str(made)
    hidden = made.breakdown.hidden * 1e3
    sent = sum(entry.seconds for entry in made.collectives) * 1e3 - hidden
    assert f"plan        {made.hash}, strategy fsdp" in text
    assert "\n  axis1=2   nvlink4: bandwidth 360 GB/s, " in text
    whole = made.step_time * 1e3
    assert (
        f"{whole:.3f} ms predicted: {whole - sent:.3f} compute, {sent:.3f} exposed communication ({hidden:.3f} more hidden)"
        in text
    )
    assert f"memory      {size_text(made.peak_memory)} of 72.00 GiB per device" in text
    assert "transformer.h.0-1.mlp.c_fc.weight S(0) S(0)" in " ".join(text.split())
    assert "all-gather over axis0_axis1, forward" in text
    assert "median error of predicted steps (20 published runs on one node of h100; " in text
    waited = f"{1e3 * sum(entry.exposed for entry in made.collectives):.3f}"
    assert next(line for line in text.splitlines() if line.startswith("total")).split()[:5] == [
        "total",
        f"{whole:.3f}",
        "100.0%",
        waited,
        str(len(made.collectives)),
    ]
    assert all(len(line) <= 128 and line == line.rstrip() for line in text.splitlines())
    assert sum(isinstance(part, Table) for part in made.tables()) == 4


def test_blocks_are_folded_by_number_and_only_where_they_are_alike() -> None:
    assert folded(["h.0.w", "h.1.w", "h.2.w", "h.7.w"]) == "h.0-2,7.w"
    assert folded(["h.0.attn:split#0", "h.1.attn:split#0"]) == "h.0-1.attn:split#0"
    assert folded(["layer1.w"]) == "layer1.w"
    uneven = replace(plan("gpt2", "ddp"), layouts={"h.0.w": "I, I", "h.1.w": "S(0), I", "h.2.w": "I, I"})
    rows = [line.split() for line in str(uneven).splitlines() if line.startswith("h.")]
    assert rows == [["h.0,2.w", "I", "I"], ["h.1.w", "S(0)", "I"]]


def test_a_gap_is_told() -> None:
    assert "within 1.50% of the optimum under this cost model" in str(replace(plan("gpt2"), status="feasible", gap=0.015))


def test_the_fields_of_a_collective_are_those_of_its_row() -> None:
    assert [f.name for f in fields(Collective)] == ["value", "more", "axis", "kind", "bytes", "where", "seconds", "exposed"]


def test_plan_of_the_public_api_is_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, sample = MODELS["gpt2"]()
    assert autopar.plan(model, sample, MESH, device="h100") == plan("gpt2")
