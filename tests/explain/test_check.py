"""The check of plan costs: a regression fails with its reason, an improvement is reported, incomparable plans are refused."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import autopar.explain.check as checking
from autopar.cost_models import links
from autopar.explain import main
from autopar.explain.baseline import BaselineError, files, found_from, read, seen_from, write
from autopar.ir.program import Op
from autopar.operators import OpSharding
from autopar.plan.plan import Plan
from autopar.search_space import domains as offers
from autopar.search_space.candidates import Candidate

ROOT = Path(__file__).parents[2]
OURS = ROOT / "baselines"
SOURCE = """
import torch
from torch import nn

WIDTH = 256

def mlp():
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64)), torch.empty(32, 64)

def deep():
    layers = [nn.Linear(64, 64) for _ in range(4)]
    return nn.Sequential(*layers), torch.empty(32, 64)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models.py, and baselines/ with those of `mlp` on two meshes and of `deep` on one."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.chdir(folder)
        (folder / "models.py").write_text(SOURCE)
        assert command("models.py:mlp --mesh dp=2,tp=4 --device h100 --check baselines/a.json --update") == 0
        assert command("models.py:mlp --mesh 8 --device h100 --strategy ddp --check baselines/b.json --update") == 0
        assert command("models.py:deep --mesh 4 --device l4 --budget 1GiB --check baselines/c.json --update") == 0
    sys.modules.pop("models", None)
    return folder


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of `made`, in which the command runs."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    yield tmp_path
    sys.modules.pop("models", None)


def command(line: str) -> int:
    return main(line.split())


def cheaper(path: Path, part: float = 0.5, **more: object) -> None:
    """Make a baseline say that its plan cost less."""
    old = json.loads(path.read_text())
    path.write_text(json.dumps({**old, "step_time": old["step_time"] * part, **more}))


def test_what_costs_as_before_passes_and_each_target_is_captured_once(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[object] = []
    read_program = checking.read_program
    monkeypatch.setattr(checking, "read_program", lambda *built: captured.append(built) or read_program(*built))
    capsys.readouterr()
    assert command("--check baselines") == 0
    out = capsys.readouterr().out
    assert [line.split()[:5] for line in out.splitlines()] == [
        ["ok", "../models.py:mlp", "on", "dp=2,tp=4", "of"],
        ["ok", "../models.py:mlp", "on", "axis0=8", "of"],
        ["ok", "../models.py:deep", "on", "axis0=4", "of"],
        ["3", "compared:", "3", "ok"],
    ]
    assert "h100 as ddp: step time " in out
    assert len(captured) == 2


@pytest.mark.parametrize(
    "file, start",
    [
        ("sizes.py", "from sizes import WIDTH"),
        ("sizes/__init__.py", "from sizes import WIDTH"),
        ("models_of/sizes.py", "from models_of.sizes import WIDTH"),
        ("src/sizes.py", "import sys; sys.path.insert(0, __file__.replace('models.py', 'src')); from sizes import WIDTH"),
    ],
    ids=["a file", "a package", "a folder", "a path of its own"],
)
def test_targets_of_two_folders_have_neighbours_of_one_name(
    file: str, start: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, width in (("one", 128), ("two", 1024)):
        (home / name / file).parent.mkdir(parents=True)
        (home / name / file).write_text(f"WIDTH = {width}\n")
        (home / name / "models.py").write_text(start + SOURCE.replace("WIDTH = 256", ""))
        assert command(f"{name}/models.py:mlp --mesh 2 --device h100 --check all/{name}.json --update") == 0
    one, two = (read(home / "all" / f"{name}.json")[0].summary for name in ("one", "two"))
    assert two.peak_memory > 4 * one.peak_memory
    assert command("--check all") == 0
    assert "2 compared: 2 ok" in capsys.readouterr().out


def test_a_worse_plan_fails_and_says_by_how_much_and_update_writes_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "baselines/a.json"
    was = read(path)[0]
    cheaper(path, stored={**was.summary.stored, "0.weight": "I, S(1)"})
    capsys.readouterr()
    assert command("--check baselines") == 1
    out = capsys.readouterr().out
    now = was.summary.step_time * 1e3
    assert f"WORSE   ../models.py:mlp on dp=2,tp=4 of h100: step time {now:.3f} ms, was {now / 2:.3f} ms (+100.0%)\n" in out
    assert f"          0.weight  {was.summary.stored['0.weight']}  (was I, S(1))\n" in out
    assert "3 compared: 2 ok, 1 WORSE\nif this change is intended: --update" in out
    assert command("--check baselines --tolerance 1.1") == 0
    assert command("--check baselines --update") == 0
    assert read(path)[0] == was
    out = capsys.readouterr().out
    assert "WORSE" in out
    assert out.count("written ") == 1


def test_a_better_plan_is_told_and_update_keeps_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "baselines/b.json"
    was = read(path)[0]
    cheaper(path, 2.0)
    capsys.readouterr()
    assert command("--check baselines/b.json") == 0
    out = capsys.readouterr().out
    assert out.startswith("better  ../models.py:mlp on axis0=8 of h100 as ddp: step time ")
    assert "(-50.0%)" in out
    assert read(path)[0] != was
    assert command("--check baselines/b.json --update") == 0
    assert read(path)[0] == was


def test_a_target_that_cannot_be_imported_fails_with_the_reason(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "models.py").write_text("import nowhere_to_be_found\n")
    capsys.readouterr()
    assert command("--check baselines/a.json") == 1
    assert "cannot be imported: ModuleNotFoundError: No module named 'nowhere_to_be_found'\n" in capsys.readouterr().out


@pytest.mark.parametrize("figure", ["step_time", "peak_memory", "bytes"])
def test_each_of_step_time_peak_memory_and_bytes_is_compared_with_the_baseline(
    home: Path, capsys: pytest.CaptureFixture[str], figure: str
) -> None:
    path = home / "baselines/b.json"
    data = json.loads(path.read_text())
    if figure == "bytes":
        data["collectives"] = [{**entry, "bytes": 1} for entry in data["collectives"]]
    else:
        data[figure] = type(data[figure])(data[figure] * 0.98)
    path.write_text(json.dumps(data))
    assert command("--check baselines") == 1
    assert f"ddp: {figure.replace('_', ' ')}" in capsys.readouterr().out
    assert command(f"--check baselines --tolerance {0.05 if figure != 'bytes' else 1e9}") == 0


def test_a_file_may_hold_many_baselines_and_keeps_them(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = [json.loads(path.read_text()) for path in files(home / "baselines")]
    path = home / "baselines/all.json"
    path.write_text(json.dumps([{**entry, "step_time": entry["step_time"] / 2} for entry in whole]))
    capsys.readouterr()
    assert command("--check baselines/all.json") == 1
    assert "3 compared: 3 WORSE" in capsys.readouterr().out
    assert command("--check baselines/all.json --update") == 0
    assert json.loads(path.read_text()) == whole


def test_a_target_is_compared_with_a_saved_plan_which_stays_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "models.py:mlp --mesh 2,4 --device h100"
    assert command(f"{asked} --strategy ddp --save plan.json") == 0
    ddp = Plan.load("plan.json")
    assert command(f"{asked} --strategy ddp --check plan.json") == 0
    capsys.readouterr()
    assert command(f"{asked} --strategy fsdp --check plan.json") == 1
    out = capsys.readouterr().out
    assert out.startswith("WORSE   models.py:mlp on axis0=2,axis1=4 of h100 as fsdp: ")
    assert "strategy    fsdp, was ddp" in out
    assert command(f"{asked} --strategy fsdp --check plan.json --update") == 0
    assert Plan.load("plan.json").options["strategy"] == "fsdp"
    assert ddp.hash == Plan.load("plan.json").hash
    assert command("plan.json --check plan.json") == 0


def test_a_changed_model_is_told_and_compared_nonetheless(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "models.py").write_text(SOURCE.replace("WIDTH = 256", "WIDTH = 2560"))
    assert command("--check baselines") == 1
    out = capsys.readouterr().out
    assert "the model or its sample changed: the program is " in out
    assert out.count("WORSE   ../models.py:mlp") == 2
    assert "ok      ../models.py:deep" in out


def test_what_cannot_be_planned_fails_and_the_rest_is_checked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads((home / "baselines/c.json").read_text())
    data["options"]["budget"] = "1KB"
    (home / "baselines/c.json").write_text(json.dumps(data))
    (home / "models.py").write_text(SOURCE.replace("def mlp", "def perceptron"))
    capsys.readouterr()
    assert command("--check baselines --update") == 1
    out = capsys.readouterr().out
    assert out.count("FAILED  ../models.py:mlp on ") == 2
    assert "has no function 'mlp'\n          functions  perceptron, deep" in out
    assert "FAILED  ../models.py:deep on axis0=4 of l4: no plan fits into 1000 B" in out
    assert "3 compared: 3 FAILED" in out
    assert "written" not in out


@pytest.mark.parametrize(
    "line, code, said",
    [
        ("--check missing", 1, "there is no baseline missing\n  fix  python -m autopar.explain TARGET --mesh ..."),
        ("--check empty", 1, "there is no baseline in empty"),
        ("--check models.py", 1, "the baseline models.py is damaged\n  error  Expecting value"),
        ("--check list.json", 1, "the baseline list.json is damaged"),
        ("--check none.json", 1, "there is no baseline in none.json"),
        ("--check later.json", 1, "later.json has format 3, but this autopar reads 2"),
        ("--check half.json", 1, 'the baseline half.json is damaged\n  error  it has no entry "hash"'),
        ("--check plan.json", 2, "plan.json does not name a TARGET"),
        ("--check baselines --mesh 2 --device h100", 2, "--mesh, --device only with a TARGET"),
        ("--check baselines --why 0 --json", 2, "--check prints no report: --why, --json cannot be combined with it"),
        ("models.py:mlp --mesh 2 --check baselines", 2, "baselines is a folder, whose baselines name targets"),
        ("models.py:mlp --mesh 2 --check two.json", 2, "two.json holds 2 baselines"),
        ("models.py:mlp --mesh 2 --check missing.json", 1, "there is no baseline missing.json"),
        ("models.py:mlp --check baselines/a.json", 2, "no mesh given"),
        ("models.py:mlp --mesh 2 --update", 2, "nothing is checked: --update only with --check"),
        ("models.py:mlp --mesh 2 --tolerance 0.1", 2, "nothing is checked: --tolerance only with --check"),
        ("models.py:mlp --mesh 2 --device h100 --check models.py/a.json --update", 1, "cannot write models.py/a.json"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    line: str, code: int, said: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "empty").mkdir()
    one = json.loads((home / "baselines/a.json").read_text())
    (home / "list.json").write_text("[1]")
    (home / "none.json").write_text("[]")
    (home / "two.json").write_text(json.dumps([one, one]))
    (home / "later.json").write_text(json.dumps({**one, "baseline": 3}))
    (home / "half.json").write_text(json.dumps({"baseline": 2, "target": "models.py:mlp"}))
    if "plan.json" in line:
        assert command("models.py:mlp --mesh 2 --device h100 --save plan.json") == 0
    capsys.readouterr()
    assert command(line) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("text", ["-1", "inf", "nan", "some"])
def test_a_tolerance_is_a_finite_part(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--check", "baselines", f"--tolerance={text}"])
    assert "--tolerance" in capsys.readouterr().err


def test_the_options_of_a_baseline_are_those_that_its_plan_was_made_with(home: Path) -> None:
    constraints = ["--constraint", "0.weight=*, S(0)", "--constraint", "2.*=I, I"]
    asked = "models.py:mlp --mesh 2,4 --device h100 --budget 1000000000 --optimizer sgd --check d.json --update".split()
    assert main([*asked, *constraints]) == 0
    options = read(home / "d.json")[0].options
    assert options.constraints == {"0.weight": "*, S(0)", "2.*": "I, I"}
    assert (options.budget, options.optimizer, options.outputs) == ("1000000000", "sgd", None)
    assert command("--check d.json") == 0


def test_damaged_options_are_refused(home: Path) -> None:
    found = read(home / "baselines/a.json")[0]
    for wrong in ({"constraints": "no layout"}, {"speed": "fast"}):
        damaged = replace(found, summary=replace(found.summary, options={**found.summary.options, **wrong}))
        with pytest.raises(BaselineError, match="options"):
            _ = damaged.options


def test_a_target_in_a_file_is_named_from_the_folder_of_its_baseline(tmp_path: Path) -> None:
    assert seen_from("baselines/models.py:gpt2", Path("baselines")) == "models.py:gpt2"
    assert seen_from("models.py:gpt2", Path("baselines")) == "../models.py:gpt2"
    assert seen_from("package.models:gpt2", Path("baselines")) == "package.models:gpt2"
    assert seen_from("plan.json", Path("baselines")) == ""
    assert found_from("../models.py:gpt2", Path("baselines")) == "baselines/../models.py:gpt2"


SPY = "from pathlib import Path\nPath(__file__).with_name('run').touch()\ndef mlp(): ...\n"


@pytest.mark.parametrize("target", ["../spy.py:mlp", "link.py:mlp", "spy:mlp", "os:getcwd", "/dev/null.py:mlp", "mlp"])
def test_a_baseline_runs_no_code_but_of_files_below_its_folder_or_the_working_directory(
    target: str, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = home / "work"
    inside.mkdir()
    (home / "spy.py").write_text(SPY)
    (inside / "link.py").symlink_to(home / "spy.py")
    monkeypatch.chdir(inside)
    monkeypatch.setattr(sys, "path", [*sys.path, str(home)])
    data = json.loads((home / "baselines/a.json").read_text())
    (inside / "a.json").write_text(json.dumps(data | {"target": target}))
    capsys.readouterr()
    assert command("--check a.json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "BaselineError: a baseline in . names " in captured.err or "is damaged" in captured.err
    assert not (home / "run").exists()


@pytest.mark.parametrize("ends", ["raise SystemExit(0)", "def mlp(): raise SystemExit(0)", "import sys\ndef mlp(): sys.exit()"])
def test_a_target_that_exits_has_failed(ends: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "models.py").write_text(ends)
    assert command("--check baselines/a.json") == 1
    out = capsys.readouterr().out
    assert "SystemExit" in out
    assert out.endswith("1 compared: 1 FAILED\n")


def test_the_baselines_of_the_repository_watch_six_models_on_several_meshes_and_devices() -> None:
    found = [read(path)[0] for path in files(OURS)]
    assert len(found) >= 10
    assert len({baseline.target for baseline in found}) >= 6
    assert {(2, 4), (8,), (2, 2, 2), (8, 8)} <= {baseline.summary.sizes for baseline in found}
    assert {"h100", "a100-80gb", "v100-32gb"} <= {baseline.summary.device for baseline in found}


def test_the_simulator_agrees_with_the_prices_of_the_plans_on_record() -> None:
    """Within 3%; the check says that they are the plans of today.

    Of ViT on (8, 8) messages take three times as long as computing: the first reduce-scatter and the last all-reduce of the
    backward, 0.3 of 9 ms, have nothing left to run beside, where the law has both links busy all the time.
    """
    paths = [*files(OURS), *files(OURS / "thorough")]
    off = {str(baseline): baseline.summary.off for path in paths for baseline in read(path)}
    within = {"models.py:vit on axis0=8,axis1=8 of h100": 0.035}
    assert [name for name, by in off.items() if abs(by) > within.get(name, 0.03)] == []


def test_a_worsened_planner_fails_our_check_and_the_message_says_what_why_and_by_how_much(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    candidates = offers.candidates

    def fewer(op: Op, fitted: OpSharding | None, *rest: object) -> list[Candidate]:
        """Products can no longer be split by their out-features."""
        found = list(candidates(op, fitted, *rest))  # type: ignore[arg-type]
        if "linear" not in op.target or fitted is None:
            return found
        names = [factor.name for factor in fitted.factors]
        return [c for c in found if not any(kind == "S" and names[which] == "n" for kind, which, _ in c.forms)]

    monkeypatch.setattr(offers, "candidates", fewer)
    assert main(["--check", str(OURS / "llama-8x8-h100.json")]) == 1
    out = capsys.readouterr().out
    first, *rest = out.splitlines()
    assert first.startswith("WORSE   models.py:llama on node=8,gpu=8 of h100: step time ")
    assert " ms, was " in first
    assert "%)" in first
    text = "\n".join(rest)
    assert "changed layouts" in text
    assert re.search(r"\.weight +\S+, \S+  \(was \S+, \S+\)", text)
    assert "changed splits" in text
    assert "(was batch, out-features)" in text
    assert text.endswith("1 compared: 1 WORSE\nif this change is intended: --update writes the new costs")


@pytest.mark.thorough
def test_a_slower_link_fails_our_check_even_where_no_layout_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = links.LINKS["nvlink2"]
    assert link.bus
    slower = replace(link.bus, ring={size: rate / 20 for size, rate in link.bus.ring.items()})
    monkeypatch.setitem(links.LINKS, "nvlink2", replace(link, bus=slower))
    assert main(["--check", str(OURS / "gpt2-8-v100.json")]) == 1
    out = capsys.readouterr().out
    assert out.startswith("WORSE   models.py:gpt2 on axis0=8 of v100-32gb: step time ")
    assert "  communication  " in out
    assert "changed communication" in out


def test_baselines_are_written_and_read_back(home: Path, tmp_path: Path) -> None:
    found = [baseline for path in files(home / "baselines") for baseline in read(path)]
    write(tmp_path / "new/some.json", found)
    assert list(read(tmp_path / "new/some.json")) == found
