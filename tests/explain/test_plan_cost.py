"""The pytest plugin, in pytest runs within this one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
MODEL = """
import pytest
import torch
from torch import nn

import autopar

SAMPLE = torch.empty(32, 64, device="meta")

def model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to("meta")

def plan(**options):
    return autopar.plan(model(), SAMPLE, (2, 4), device="h100", **options)
"""
TESTS = """
def test_plan(plan_cost):
    made = plan()
    assert plan_cost(made, "ours") == made

@pytest.mark.parametrize("mesh", [(2, 4), (8,)])
def test_model(plan_cost, mesh):
    made = plan_cost(model(), SAMPLE, mesh=mesh, device="h100", strategy="ddp")
    assert (made.sizes, made.options["strategy"]) == (mesh, "ddp")
    plan_cost(model(), SAMPLE, mesh=mesh, device="l4", name=f"l4-{len(mesh)}", tolerance=0.45)
"""


RUN = ("-p", "pytest_autopar", "-p", "no:cacheprovider")


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*RUN, *arguments)


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """All of torch that planning imports: a run within this process forgets what it was the first to import."""
    autopar.plan(nn.Linear(8, 8).to("meta"), torch.empty(8, 8, device="meta"), (2,), device="h100")


@pytest.fixture(autouse=True)
def _alone(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from around the run, and autopar importable where it is not installed."""
    pytester.makeini("[pytest]")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


def change(path: Path, part: float) -> None:
    old = json.loads(path.read_text())
    path.write_text(json.dumps({**old, "step_time": old["step_time"] * part}))


def test_a_test_fails_without_its_baseline_and_when_its_plan_costs_more(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_cost=MODEL + TESTS)
    absent = run(pytester)
    absent.assert_outcomes(failed=3)
    absent.stdout.fnmatch_lines(["there is no baseline *plan_costs/ours.json", "  fix  pytest --update-plan-costs writes it"])

    written = run(pytester, "--update-plan-costs")
    written.assert_outcomes(passed=3)
    written.stdout.fnmatch_lines(["*= plan costs =*", "written *ours.json"])
    folder = pytester.path / "plan_costs"
    names = ["l4-1", "l4-2", "ours", "test_cost-test_model-mesh0", "test_cost-test_model-mesh1"]
    assert sorted(path.stem for path in folder.iterdir()) == names

    same = run(pytester)
    same.assert_outcomes(passed=3)
    same.stdout.no_fnmatch_line("*plan costs*")

    change(folder / "ours.json", 0.5)
    change(folder / "l4-1.json", 0.7)
    change(folder / "l4-2.json", 2.0)
    worse = run(pytester)
    worse.assert_outcomes(passed=2, failed=1)
    worse.stdout.fnmatch_lines(
        ["WORSE   ours: step time * ms, was * ms (+100.0%)", "if this change is intended: pytest --update*"]
    )
    worse.stdout.fnmatch_lines(
        ["better  l4-2: step time * (-50.0%)", "        pytest --update-plan-costs keeps the improvement"]
    )


REFUSED = """
def test_twice(plan_cost):
    made = plan()
    plan_cost(made, "ours")
    plan_cost(made, "ours")

def test_damaged(plan_cost):
    plan_cost(plan(), "damaged")

def test_many(plan_cost):
    plan_cost(plan(), "many")

def test_device(plan_cost):
    plan_cost(model(), SAMPLE, mesh=(2, 4), device="tpu")

def test_another_model(plan_cost):
    plan_cost(autopar.plan(nn.Linear(64, 64).to("meta"), SAMPLE, (2, 4), device="h100"), "ours", tolerance=1e9)
"""


def test_what_cannot_be_compared_fails_with_a_message(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_cost=MODEL + "def test_plan(plan_cost):\n    plan_cost(plan(), 'ours')\n")
    run(pytester, "--update-plan-costs").assert_outcomes(passed=1)
    folder = pytester.path / "plan_costs"
    (folder / "damaged.json").write_text("{")
    one = json.loads((folder / "ours.json").read_text())
    (folder / "many.json").write_text(json.dumps([one, one]))
    pytester.makepyfile(test_cost=MODEL + REFUSED)
    found = run(pytester)
    found.assert_outcomes(passed=1, failed=4)
    found.stdout.fnmatch_lines_random(
        [
            "one test has two plans named 'ours'",
            "the baseline *damaged.json is damaged",
            "*many.json holds 2 baselines, but a test compares with one",
            "*MeshError: no device is called 'tpu'*",
        ]
    )


def test_a_run_without_the_fixture_does_not_import_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_it():\n    assert 'pytest_autopar' in sys.modules and 'torch' not in sys.modules")
    pytester.runpytest_subprocess(*RUN).assert_outcomes(passed=1)
