"""Invalid jobs, clusters and goals raise errors that name the fix; files are read as data only."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import autopar
from autopar.allocate import main
from autopar.errors import AllocationError
from tests.support.planning import Layers

CURVE = {1: 1.0, 2: 0.6}
OWN = """
import torch
from tests.support.planning import Layers

def build():
    print("built")
    return Layers((256, 1024, 256)), torch.empty(512, 256)
"""
CLUSTER = """
devices = 4
device = "h100"
goal = "completion"

[[jobs]]
name = "own"
target = "{target}"
steps = 1000
counts = [1, 2]
options = {{ optimizer = "sgd", microbatches = 2 }}

[[jobs]]
name = "measured"
steps = 50
curve = {{ 1 = 0.9, 2 = 0.5, 4 = 0.3 }}
weight = 2
deadline = 60
present = 1
migration = 1.5
"""


def job(**changed: object) -> autopar.TrainingJob:
    return autopar.TrainingJob(**{"name": "a", "steps": 10, "curve": CURVE, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        *(({"name": name}, "a job is called") for name in ("", "  ", "a\nb", "\x1b[2Jx", "\ud800", "n" * 101, 7, None)),
        *(({"steps": steps}, "steps is") for steps in (0, -1, 1.5, True, "9", 10**5000, None)),
        *(({"weight": weight}, "weight is") for weight in (0, -1.0, math.nan, math.inf, "1", True)),
        *(({"migration": seconds}, "migration is") for seconds in (-1, math.nan, math.inf, 10**5000)),
        *(({"deadline": seconds}, "deadline is") for seconds in (0, -5, math.inf)),
        ({"present": -1}, "present is -1"),
        ({"samples": -1}, "samples is -1"),
        ({"counts": ()}, "counts names no numbers of devices"),
        ({"counts": "12"}, "counts names no numbers of devices"),
        ({"counts": (0,)}, "a number of devices is 0"),
        ({"counts": range(1, 200)}, "counts names no numbers of devices"),
        ({"curve": {}}, "curve names no numbers of devices"),
        ({"curve": {"1": 1.0}}, "curve: a number of devices is 1"),
        ({"curve": {0: 1.0}}, "curve: a number of devices is 0"),
        ({"curve": {1: -1.0}}, "curve: seconds of a step on 1 is -1.0"),
        ({"curve": {1: math.nan}}, "curve: seconds of a step on 1 is nan"),
        ({"curve": None}, "neither model, program nor curve is given"),
        ({"model": torch.nn.Linear(1, 1)}, "model and curve are given"),
        ({"options": {"device": "h100"}}, "the option 'device' is not a job's: the cluster says"),
        ({"options": {"time_limit": 5}}, "no clock decides"),
        ({"options": {"precison": "bf16"}}, "no option is called 'precison'"),
    ],
)
def test_what_no_job_is_is_refused(changed: dict[str, object], says: str) -> None:
    with pytest.raises(AllocationError, match=says) as refused:
        job(**changed)
    assert refused.value.details["fix"]
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize("changed", [{"devices": 0}, {"devices": -4}, {"devices": 2.0}, {"per_node": 0}, {"counts": (1, -2)}])
def test_what_no_cluster_is_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(AllocationError, match="the cluster's"):
        autopar.Cluster(**{"devices": 4, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("jobs", "goal", "says"),
    [
        ([job(), job()], "throughput", "two jobs are called 'a'"),
        ([job(), "b"], "throughput", "a job is a str"),
        (job(), "throughput", "the jobs are a TrainingJob"),
        ([job()], "speed", "goal='speed' is not known"),
        ([job()], ["throughput"], "is not known"),
        ([job()], "samples", "does not say how many samples"),
        ([job()], "deadlines", "no job has one"),
        ([job(deadline=5.9)], "deadlines", "'a' cannot meet its deadline in 5.9 s: on 2 devices, the fastest, it takes 6 s"),
        ([job(deadline=6.5, migration=1.0)], "deadlines", "it takes 7 s"),
        ([job(curve={8: 1.0, 16: 0.5})], "throughput", "may get is at most the 4 of the cluster"),
        ([job(counts=(3,))], "throughput", "'a' fits on no number of devices"),
        ([job(curve=None, model=Layers((4, 4)), sample=torch.empty(2, 5))], "throughput", "job 'a': "),
    ],
)
def test_what_jobs_cannot_have_together_is_refused(jobs: list[autopar.TrainingJob], goal: str, says: str) -> None:
    with pytest.raises(AllocationError, match=says):
        autopar.allocate(jobs, autopar.Cluster(devices=4), goal=goal)


def test_other_refusals_name_what_is_wrong() -> None:
    with pytest.raises(AllocationError, match="the cluster is a int"):
        autopar.allocate([job()], 4)  # type: ignore[arg-type]
    with pytest.raises(autopar.AutoparError, match="no device is called 'h1000'"):
        autopar.allocate([job()], autopar.Cluster(devices=4, device="h1000"))


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.format(target=f"{tmp_path}/own.py:build"))
    return path


def test_the_command_allocates_what_the_file_says(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(cluster), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["goal"], found["devices"]) == ("completion", 4)
    measured, own = found["jobs"]
    assert [step["devices"] for step in own["scaling"]] == [1, 2]
    with torch.device("meta"):
        model, batch = Layers((256, 1024, 256)), torch.empty(512, 256)
    plan = autopar.plan(model, batch, (2,), device="h100", optimizer="sgd", microbatches=2)
    assert own["scaling"][1]["step_time"] == plan.step_time
    fastest = min(own["scaling"], key=lambda step: step["step_time"])
    assert (own["devices"], own["completion"]) == (fastest["devices"], pytest.approx(1000 * fastest["step_time"]))
    assert (measured["devices"], measured["on_time"]) == (0, True)  # the other is done in a moment: the shortest first
    assert main([str(cluster), "--goal", "throughput"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split()[:3] == ["job", "devices", "mesh"]
    assert "goal throughput" in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("devices = ", 2, "Invalid value"),
        ("[" * 5000, 2, "cluster.toml: "),
        ("jobs = []", 2, 'it has no entry "devices"'),
        ("devices = 4", 2, 'it has no entry "jobs"'),
        ("devices = '4'\njobs = []", 2, 'devices is "4", not an integer'),
        ("devices = 1979-05-27\njobs = []", 2, 'devices is "1979-05-27", not an integer'),
        ("devices = 4\njobs = []\nhook = 'rm'", 2, 'it has an entry "hook", which nothing reads'),
        ("devices = 4\n[[jobs]]\nname='a'\nsteps=1\nmodel='x'", 2, 'jobs.0 has an entry "model", which nothing reads'),
        ("devices = 4\n[[jobs]]\nname='a'\nsteps=1\ncurve={x=1.0}", 2, "not an integer"),
        ("devices = 4\n[[jobs]]\nname='a'\nsteps=1\ncurve={1=nan}", 2, "a number that is not finite"),
        ("devices = 4\n[[jobs]]\nname='a'\nsteps=1\ncurve={1=1" + "0" * 400 + "}", 2, "too large"),
        ("devices = 4\nx" + ".x" * 50_000 + " = 1", 2, "dots"),
        ("devices = 4\n[[jobs]]\nname='a'\nsteps=1\ntarget='nowhere.py:build'", 2, "no such file: nowhere.py"),
        ("devices = 4\n[[jobs]]\nname='a'\nsteps=1\ntarget='__import__(\"os\")'", 2, "does not name a function"),
        ("devices = 4\n[[jobs]]\nname='a'\nsteps=1\ncurve={1=1.0}\ntarget='own.py:build'", 2, "both a target and a curve"),
        ("devices = 0\njobs = []", 2, "the cluster's devices is 0"),
        ("devices = 4\ngoal='luck'\njobs = []", 2, "goal='luck' is not known"),
    ],
)
def test_a_file_that_is_wrong_is_refused(
    text: str, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    assert main([str(path)]) == code
    assert says in capsys.readouterr().err


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    assert main([str(path)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    path.write_bytes(b"\xff\xfe")
    assert main([str(path)]) == 2
    assert main([str(tmp_path)]) == 2


def test_nothing_runs_before_the_whole_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    path = tmp_path / "cluster.toml"
    first = f"devices = 4\n[[jobs]]\nname='a'\nsteps=1\ntarget='{tmp_path}/own.py:build'\n"
    path.write_text(f"{first}[[jobs]]\nname='a'\nsteps='many'\ncurve={{1=1.0}}\n")
    assert main([str(path)]) == 2
    assert "jobs.1.steps" in capsys.readouterr().err
    path.write_text(first.replace("devices = 4", "devices = 0"))
    assert main([str(path)]) == 2
    assert "the cluster's devices is 0" in capsys.readouterr().err
