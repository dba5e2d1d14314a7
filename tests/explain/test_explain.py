"""The command line: an explanation on stdout, or an error on stderr and an exit code."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar import Plan
from autopar.explain import command, difference, main, parse_mesh
from autopar.explain.explanation import Explanation, explained
from autopar.explain.report import report
from autopar.explain.why import answer_parts
from autopar.ir.mesh import Mesh
from autopar.plan.options import Options
from autopar.plan.text import plain
from autopar.runtime import progress
from autopar.search_space.schemes import strategies_for

SOURCE = """
import torch
from torch import nn

import neighbour

def build():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.empty(32, 64)

def number():
    return 3

def pair():
    return 3, 4

def fails():
    raise ValueError("no such thing")

def on_meta():
    model, sample = build()
    assert sample.is_meta and model[0].weight.is_meta
    return model, sample
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    """The path of a file with functions that build models, and fail to."""
    (tmp_path / "neighbour.py").write_text("")
    path = tmp_path / "build_model.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("neighbour", "build_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_plan_is_printed_and_saved_and_the_saved_one_prints_alike(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "plan.json")
    asked = "--mesh dp=2,tp=4 --device h100 --budget 1GB --strategy ddp --optimizer sgd --dynamic batch=input:0 --save".split()
    assert main([f"{target}:build", *asked, path]) == 0
    printed = capsys.readouterr().out
    assert main([path]) == 0
    saved = capsys.readouterr().out
    assert printed.startswith(saved)
    assert re.search(r"^dynamic +batch \(dim 0 of input\): multiples of 8, planned at 32$", saved, re.M)
    proof = r"(proven optimal|within [\d.]+% of the optimum) under this cost model"
    assert re.search(rf"^step +[\d.]+ ms predicted: [\d.]+ compute, [\d.]+ communication; {proof}$", saved, re.M)
    assert re.search(r"^memory +[\d.]+ KiB of 953.67 MiB per device \(asked for\)$", saved, re.MULTILINE)
    assert re.search(r"^optimizer +sgd: no state \(torch.optim.SGD\)$", saved, re.MULTILINE)
    assert "ddp (this plan)" in printed.removeprefix(saved)


def test_the_model_is_built_on_meta_and_constraints_are_obeyed(target: str, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    constraints = ["--constraint", "0.weight=*, S(0)", "--constraint", "2.*=I, I"]
    assert main([f"{target}:on_meta", "--mesh", "2,4", "--device", "h100", "--save", path, *constraints]) == 0
    layouts = Plan.load(path).layouts
    assert layouts["0.weight"].endswith(", S(0)")
    assert layouts["2.weight"] == "I, I"


def test_a_target_may_be_an_importable_module(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(target).parent)
    assert main(["build_model:build", "--mesh", "2", "--device", "h100"]) == 0


@pytest.mark.parametrize(
    "place, arguments, code, said",
    [
        ("missing.py:build", ["--mesh", "2"], 2, "no such file: missing.py"),
        ("missing.json", [], 2, "no such file: missing.json"),
        ("missing.module:build", ["--mesh", "2"], 2, "no such module: missing.module"),
        ("model", ["--mesh", "2"], 2, "'model' does not name a function"),
        ("{}:biuld", ["--mesh", "2"], 2, "has no function 'biuld'\n  functions  build, number, pair, fails, on_meta"),
        ("{}:number", ["--mesh", "2"], 2, "number did not return (model, sample_input)\n  returned  int"),
        ("{}:pair", ["--mesh", "2"], 2, "pair did not return (model, sample_input)\n  returned  int, int"),
        ("{}:fails", ["--mesh", "2"], 2, "fails failed: ValueError: no such thing\n  at  "),
        ("{}:build", [], 2, "no mesh given\n  fix  --mesh 2,4 or --mesh dp=2,tp=4"),
        ("{}:build", ["--mesh", "2x4"], 2, "'2x4' is not a mesh"),
        ("{}:build", ["--mesh", "dp=2,4"], 2, "'dp=2,4' is not a mesh"),
        ("{}:build", ["--mesh", "dp=2,dp=4"], 2, "'dp=2,dp=4' is not a mesh"),
        ("{}:build", ["--mesh", "0"], 2, "a mesh needs axes of at least one device each"),
        ("{}:build", ["--mesh", "2", "--constraint", "0.weight"], 2, "'0.weight' is not a constraint\n  fix  NAME=LAYOUT"),
        ("{}:build", ["--mesh", "2", "--constraint", "a=I", "--constraint", "a=R"], 2, "two constraints for one name"),
        ("{}:build", ["--mesh", "2", "--dynamic", "batch"], 2, "'batch' does not name a size\n  fix  NAME=DIM, or"),
        ("{}:build", ["--mesh", "2", "--dynamic", "batch=input:x"], 2, "'batch=input:x' does not name a size"),
        ("{}:build", ["--mesh", "2", "--dynamic", "batch=x:0"], 1, "ConstraintError: dynamic['batch'] names 'x', which is no"),
        ("{}:build", ["--mesh", "2", "--device", "h100", "--save", "/missing/p.json"], 2, "cannot write /missing/p.json"),
        ("{}:build", ["--mesh", "2", "--device", "h100", "--trace", "/missing/t.json"], 2, "cannot write /missing/t.json"),
        ("{}:build", ["--mesh", "2", "--strategy", "fast"], 2, "UsageError: no strategy is called 'fast'"),
        ("{}:build", ["--mesh", "2", "--device", "tpu"], 2, "UsageError: no device is called 'tpu'"),
        ("{}:build", ["--mesh", "2", "--device", "h100", "--budget", "1KB"], 1, "BudgetError: no plan fits into 1000 B"),
        ("{}:build", ["--mesh", "2", "--constraint", "7=I"], 1, "ConstraintError: the constraint '7' names nothing"),
        ("{}:build", ["--mesh", "2", "--why", "0.wait"], 1, "InputError: nothing in the model is named '0.wait'\n  close"),
        ("{}:build", ["--mesh", "2", "--why-not", "0.weight"], 2, "'0.weight' is not a constraint\n  fix  NAME=LAYOUT"),
        ("{}:build", ["--mesh", "2", "--why-not", "a=I", "--why-not", "a=R"], 2, "two constraints for one name"),
        ("{}:build", ["--mesh", "2", "--why-not", "7=I"], 1, "ConstraintError: the constraint '7' names nothing"),
        ("{}:build", ["--mesh", "2", "--diff", "a", "b"], 2, "two saved plans: --mesh, target cannot be combined with it"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    place: str, arguments: list[str], code: int, said: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([place.format(target), *arguments]) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_a_saved_plan_cannot_be_changed_by_options(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    assert main([f"{target}:build", "--mesh", "2", "--device", "h100", "--save", path]) == 0
    assert main([path, "--mesh", "4", "--strategy", "ddp"]) == 2
    assert "is a saved plan: --mesh, --strategy cannot change it" in capsys.readouterr().err
    assert main([path, "--why", "0", "--code"]) == 2
    assert "is a saved plan: --why, --code cannot be answered without the model" in capsys.readouterr().err
    assert main([path, "--trace", "step.json"]) == 2
    assert "is a saved plan: --trace cannot be answered without the model" in capsys.readouterr().err
    Path(path).write_text("{}")
    assert main([path]) == 1
    assert "PlanError: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, mesh",
    [("8", Mesh.of(8)), (" 2 , 4 ", Mesh.of((2, 4))), ("dp=2, tp=4", Mesh.of({"dp": 2, "tp": 4}))],
)
def test_a_mesh_is_written_as_sizes_or_as_names_with_sizes(text: str, mesh: Mesh) -> None:
    assert parse_mesh(text) == mesh


def test_without_a_target_there_is_nothing_to_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mesh", "2"]) == 2
    assert "no TARGET given\n  fix  TARGET: file.py:function" in capsys.readouterr().err
    assert main(["--diff", "missing.json", "other.json"]) == 2
    assert "no such file: missing.json" in capsys.readouterr().err


def test_json_holds_what_the_text_says(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--json", "--why", "0", "--why-not", "0.weight=*, S(1)", "--code"]
    assert main([f"{target}:build", "--mesh", "2,4", "--device", "h100", *asked]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"plan", "phases", "why", "why_not", "code"}
    plan = Plan.from_json(json.dumps(data["plan"]))
    assert [answer["name"] for answer in data["why"]] == ["0:linear#0"]
    assert [entry["chosen"] for entry in data["why"][0]["alternatives"]].count(True) == 1
    other = Plan.from_json(json.dumps(data["why_not"]["plan"]))
    assert other.layouts["0.weight"].endswith(", S(1)")
    assert other.step_time >= plan.step_time * (1 - plan.gap)
    assert "torch.ops.aten.linear.default" in data["code"]
    assert main([f"{target}:build", "--mesh", "2,4", "--device", "h100", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"plan", "phases", "strategies"}
    assert [entry["strategy"] for entry in data["strategies"]] == list(strategies_for(Mesh.of((2, 4))))
    assert data["strategies"][0]["plan"] == data["plan"]


PRINTS = """
print("imported")
import torch

class Prints(torch.nn.Linear):
    def forward(self, x):
        print("captured")
        return super().forward(x)

def build():
    print("built")
    return Prints(64, 64), torch.empty(32, 64)
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_json_is_all_that_is_printed_where_a_model_prints(
    terminal: bool, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(target).write_text(PRINTS)
    if terminal:
        monkeypatch.setattr(sys, "stderr", Terminal())
        monkeypatch.setattr(progress, "PATIENCE", 0.0)
    assert main([f"{target}:build", "--mesh", "2", "--device", "h100", "--json"]) == 0
    printed = capsys.readouterr()
    assert set(json.loads(printed.out)) == {"plan", "phases", "strategies"}
    if not terminal:
        assert re.fullmatch("imported\nbuilt\n(captured\n)+", printed.err)


def test_the_trace_of_a_step_lasts_as_long_as_the_step(target: str, tmp_path: Path) -> None:
    path, plan = tmp_path / "step.json", tmp_path / "plan.json"
    asked = ["--mesh", "dp=2,tp=4", "--device", "cpu", "--strategy", "fsdp", "--save", str(plan), "--trace", str(path)]
    assert main([f"{target}:build", *asked]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} >= {"computing", "messages over dp"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in slices} >= {"forward", "backward", "optimizer", "all_gather", "reduce_scatter", "wait"}
    seconds = max(event["ts"] + event["dur"] for event in slices) / 1e6
    assert seconds == pytest.approx(Plan.load(plan).step_time, rel=1e-3)


def test_two_saved_plans_are_compared(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"{strategy}.json") for strategy in ("ddp", "fsdp")]
    for path in paths:
        asked = ["--mesh", "2", "--device", "h100", "--strategy", Path(path).stem, "--save", path]
        assert main([f"{target}:build", *asked]) == 0
    capsys.readouterr()
    assert main(["--diff", *paths]) == 0
    printed = capsys.readouterr().out
    assert printed == "\n".join(difference(*map(Plan.load, paths)).lines()) + "\n"
    assert main(["--json", "--diff", *paths]) == 0
    assert json.loads(capsys.readouterr().out) == {"difference": printed.splitlines()}


def test_a_terminal_is_told_what_is_being_done(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    assert main([f"{target}:build", "--mesh", "2", "--device", "h100"]) == 0
    assert "planning the named strategies" in terminal.getvalue()


@pytest.mark.parametrize(
    "asked, done",
    [
        ([], "planning the named strategies"),
        (["--why", "0"], "pricing the alternatives"),
        (["--why-not", "0.weight=S(1)"], "planning with the layouts forced"),
    ],
)
def test_the_line_of_progress_says_what_is_done_for_the_question(
    target: str, asked: list[str], done: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(command, "progress", lambda first: contextlib.nullcontext(told.append))
    assert main([f"{target}:build", "--mesh", "2", "--device", "h100", *asked]) == 0
    assert "solving" in told
    assert told[-1] == done


class Terminal(io.StringIO):
    """A text that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_module_runs_as_a_command(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own where it fails, which says whether its exit code and its messages arrive."""
    assert main([f"{target}:build", "--mesh", "2,4", "--device", "h100"]) == 0
    good = capsys.readouterr()
    headline, *_ = good.out.splitlines()
    assert headline == "nothing is split: every device does all of the work"
    assert "\nplan  " in good.out
    assert good.err == ""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "autopar.explain"]
    bad = subprocess.run([*command, f"{target}:build", "--mesh", "x"], capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("UsageError: 'x' is not a mesh\n")


class Named(nn.Module):
    """Layers, axes and outputs of any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(16, 16))
        self.h = nn.ModuleList(nn.ModuleDict({name: nn.Linear(16, 16)}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.get_submodule(self.name)(x)
        for block in self.h:
            x = torch.relu(block.get_submodule(self.name)(x))
        return {self.name: x.square().mean()}


def test_names_add_no_lines_to_what_is_printed() -> None:
    def printed(name: str) -> list[str]:
        found = explained(Named(name), torch.zeros(8, 16), {name: 2, f"{name}2": 2}, Options(device="h100", strategy="fsdp"))
        assert isinstance(found, Explanation)
        answers = plain(part for answer in found.why("*") for part in answer_parts(found.plan.axes, answer))
        return "\n".join([str(found.plan), plain(report(found.plan)), answers]).split("\n")

    lines = printed("a\nb")
    assert len(lines) == len(printed("a__b"))
    assert any(r"a\nb" in line for line in lines)
    assert not any(line.startswith(("b,", "b.", "b:", "b ", "b2")) for line in lines)
