"""A plan or baseline file is untrusted data: any fault is refused at once, with a message of our own."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, PlanError
from autopar.explain.baseline import Baseline, BaselineError, read, write
from autopar.explain.difference import Difference, difference
from autopar.explain.report import report
from autopar.explain.summary import Summary, fold, unfold
from autopar.plan.plan import Plan
from autopar.plan.resolved import read_plan
from autopar.plan.stages import read_pipeline
from autopar.plan.text import plain
from autopar.planning.planner import read_program

MODEL, X = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), torch.zeros(8, 16)
WRONG: list[Any] = [None, True, -1, 0, 2**62, 1.5, 1e300, "x", "", "I -> R", "{0.__class__}", [], {}, [1], ["x"], {"a": 1}]
BOMBS = ["0-99999999", "h.0-9999.0-9999", "1" * 18 + "-" + "9" * 18]
NO_JSON = [
    "", "{", "\0", "[" * 100_000, '{"a": ' * 100_000, '{"version": NaN}', '{"version": -Infinity}', '{"version": 1e999}',
    '{"version": ' + "9" * 5000 + "}", '{"version": 9223372036854775808}', '{"version": 6, "version": 6}', '"\\ud800"', "null",
]  # fmt: skip


@pytest.fixture(scope="module")
def made() -> Plan:
    return autopar.plan(MODEL, X, (2, 2), device="h100", strategy="megatron")


def places(data: object, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside of JSON data, as the keys that lead there."""
    inside = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    for key, held in inside:
        yield (*at, key)
        yield from places(held, (*at, key))


def damaged(text: str, draw: random.Random) -> str:
    """The JSON text with one entry left out, renamed, or of another value."""
    data = json.loads(text)
    *path, last = draw.choice([*places(data)])
    held = data
    for key in path:
        held = held[key]
    match draw.randrange(8), held:
        case 0, _:
            del held[last]
        case 1, dict():
            held[draw.choice(["x", "output:x", ""])] = held.pop(last)
        case _:
            held[last] = draw.choice(WRONG)
    return json.dumps(data)


def test_a_plan_that_is_damaged_anywhere_is_refused_or_says_what_can_be_printed_compared_and_read(made: Plan) -> None:
    draw, captured, text = random.Random(0), read_program(MODEL, X), made.to_json()
    refused = 0
    for _ in range(150):
        try:
            found = Plan.from_json(damaged(text, draw))
        except PlanError:
            refused += 1
            continue
        plain(report(found))
        list(difference(made, found).lines())
        assert Plan.from_json(found.to_json()) == found
        try:
            read_plan(found, captured.program, made.mesh)
        except AutoparError:
            refused += 1
    assert 100 < refused < 150


class Blocks(nn.Module):
    """Two blocks that may be stages, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for h in self.h:
            x = h(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def staged() -> Plan:
    return autopar.plan(Blocks(), X, (2, 2), device="h100", pipeline="axis0", microbatches=4)


def test_a_plan_in_stages_that_is_damaged_anywhere_is_refused_or_can_be_printed_compared_and_read(staged: Plan) -> None:
    draw, captured, data = random.Random(0), read_program(Blocks(), X), json.loads(staged.to_json())
    for number in range(150):
        part = ("pipeline", "stages")[number % 2]
        text = json.dumps({**data, part: json.loads(damaged(json.dumps(data[part]), draw))})
        try:
            found = Plan.from_json(text)
            plain(report(found))
            list(difference(staged, found).lines())
            read_pipeline(found, captured.program)
        except AutoparError:
            continue


@pytest.mark.parametrize("name, value", [("seconds", 0.0), ("at_peak", -1.0)])
def test_kernels_that_take_no_time_are_refused(made: Plan, name: str, value: float) -> None:
    data = json.loads(made.to_json())
    data["breakdown"]["simulated"]["kernels"][0][name] = value
    with pytest.raises(PlanError, match="is damaged"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("sent", [1.5, True, "all_reduce", {"pass": "forward"}, None])
def test_collectives_that_are_no_list_are_refused(made: Plan, staged: Plan, sent: object) -> None:
    for plan in (made, staged):
        data = json.loads(plan.to_json())
        (data["stages"][-1] if data["stages"] else data)["collectives"] = sent
        with pytest.raises(PlanError, match="is damaged"):
            Plan.from_json(json.dumps(data))


def test_what_is_no_json_or_cut_off_is_refused(made: Plan, tmp_path: Path) -> None:
    text = made.to_json()
    for wrong in (*NO_JSON, *(text[: len(text) * part // 10] for part in range(10))):
        with pytest.raises(PlanError, match="is damaged"):
            Plan.from_json(wrong)
        (tmp_path / "a.json").write_text(wrong)
        with pytest.raises((BaselineError, PlanError), match="is damaged"):
            read(tmp_path / "a.json")


def baseline(made: Plan, path: Path) -> dict[str, Any]:
    write(path, [Baseline(target="models.py:mlp", summary=Summary.of(made))])
    data: dict[str, Any] = json.loads(path.read_text())
    return data


@pytest.mark.parametrize("step_time", [0, -1.0, "soon", None, True])
def test_a_baseline_whose_step_takes_no_time_is_refused(made: Plan, step_time: object, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(baseline(made, path) | {"step_time": step_time}))
    with pytest.raises(BaselineError, match="is damaged") as refusal:
        read(path)
    assert "step_time" in refusal.value.details["error"]


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_baseline_that_stands_for_more_names_than_any_model_has_is_refused_at_once(
    made: Plan, bomb: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(baseline(made, path) | {"stored": {bomb: "I, I"}}))
    with pytest.raises(BaselineError, match="is damaged") as refusal:
        read(path)
    assert "it stands for more than 1000000 names" in refusal.value.details["error"]


def test_a_baseline_that_is_damaged_anywhere_is_refused_or_can_be_compared(made: Plan, tmp_path: Path) -> None:
    draw, path = random.Random(0), tmp_path / "a.json"
    text = json.dumps(baseline(made, path))
    for _ in range(100):
        path.write_text(damaged(text, draw))
        try:
            for found in read(path):
                _ = found.options
                list(Difference(old=found.summary, new=Summary.of(made)).lines())
        except AutoparError:
            continue


def test_folding_keeps_names_that_look_folded() -> None:
    entries = {"h.0-1.w": "a", "h.0.x": "b", "h.1.x": "b", "3-4": "c", "\\q.\\1,2": "d", BOMBS[0]: "e", "1-0": "f"}
    assert unfold(fold(entries)) == entries
