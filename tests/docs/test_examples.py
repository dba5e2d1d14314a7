"""The example scripts run, and print what their docstrings promise."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autopar.runtime.workers import WorkerPool
from tests.docs.pages import ROOT
from tests.integrations.launched import launched
from tests.support.forked import ended, run_script

EXAMPLES = ROOT / "examples"
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example in this process, which has imported torch already; returns what it prints."""

    def script(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return script


def launch(*command: str) -> str:
    """Runs an example in a process of its own; returns what it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(EXAMPLES / command[0]), *command[1:]]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def in_worker(words: list[str]) -> str:
    """Runs an example in a worker of the pool, which has a process group already; returns what it prints."""
    launched()
    sys.argv = words
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / words[0]), run_name="__main__")
    return out.getvalue()


def test_the_loss_inside_of_forward_and_outside_train_alike(run: Run) -> None:
    found = re.findall(r"loss inside (\S+)  outside (\S+)", run("own_model.py"))
    assert len(found) == 3
    assert all(inside == outside for inside, outside in found)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_resumes_under_another_plan_on_another_number_of_processes(
    pool: WorkerPool, run: Run, tmp_path: Path
) -> None:
    saved, _ = pool.run(f"{__name__}:in_worker", ["checkpoint.py", "save", str(tmp_path)], ranks=2)
    resumed = run("checkpoint.py", "resume", str(tmp_path))
    steps = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d)  loss (\S+)", str(saved) + resumed)]
    assert [step for step, _ in steps] == [0, 1, 2, 3, 4, 5]
    losses = [loss for _, loss in steps]
    assert sorted(losses, reverse=True) == losses


def test_micro_batches_have_the_loss_of_the_whole_batch_and_take_less_memory(run: Run) -> None:
    printed = run("microbatches.py")
    loss, peak = re.findall(r"whole (\S+) .*parts (\S+)", printed)
    assert float(loss[0]) == pytest.approx(float(loss[1]), abs=1e-5)
    assert float(peak[1]) < float(peak[0])


def test_a_plan_for_a_thousand_gpus_is_made_without_any(run: Run) -> None:
    printed = run("plan_on_a_laptop.py", "--layers", "1")
    assert "node=125" in printed
    assert "proven optimal" in printed or "of the optimum" in " ".join(printed.split())


def test_an_operator_of_ones_own_is_found_a_rule_and_verified(tmp_path: Path) -> None:
    code = ended(run_script, EXAMPLES / "own_operator.py", tmp_path / "said")
    printed = (tmp_path / "said").read_text()
    assert code == 0, printed
    assert '"... a, b a -> ... b"' in printed
    assert "equal numbers on two processes: True" in printed


def test_an_elastic_training_goes_on_where_it_was(pool: WorkerPool, run: Run, tmp_path: Path) -> None:
    first, second = pool.run(f"{__name__}:in_worker", ["elastic.py", str(tmp_path)], ranks=2)
    steps = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+)  loss (\S+)", str(first))]
    assert [step for step, _ in steps] == [*range(20)]
    assert steps[-1][1] < steps[0][1]
    assert second == ""
    shutil.rmtree(tmp_path / "step-00000020")
    again = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+)  loss (\S+)", run("elastic.py", str(tmp_path)))]
    assert again == [(step, pytest.approx(loss, abs=1e-5)) for step, loss in steps[15:]]


def test_a_hugging_face_model_is_loaded_trained_saved_and_generates(pool: WorkerPool) -> None:
    first, second = pool.run(f"{__name__}:in_worker", ["hugging_face.py"], ranks=2)
    losses = [float(loss) for loss in re.findall(r"by epoch: (.*)", str(first))[0].split()]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 4
    assert "counted on: 0 1 2 3 4 5 6 7 8 9 10 11" in str(first)
    assert "counted on" not in str(second)


@pytest.mark.thorough
def test_a_model_in_stages_trains_on_eight_processes_like_the_whole(pool: WorkerPool) -> None:
    first, *others = pool.run(f"{__name__}:in_worker", ["pipeline.py"])
    losses = [tuple(map(float, pair)) for pair in re.findall(r"loss (\S+) in stages, (\S+) whole", str(first))]
    assert len(losses) == 3
    assert all(abs(staged - whole) <= 2e-5 for staged, whole in losses)
    assert losses[-1][0] < losses[0][0]
    assert re.search(r"\d stages over pp", str(first))
    assert others == [""] * 7


def test_a_loop_of_accelerate_trains(pool: WorkerPool) -> None:
    first, second = pool.run(f"{__name__}:in_worker", ["accelerate_loop.py"], ranks=2)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", str(first))]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert second == ""


def test_lightning_trains_saves_and_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    first, second = pool.run(f"{__name__}:in_worker", ["lightning_loop.py", str(tmp_path / "state")], ranks=2)
    before, after = ([float(loss) for loss in line.split()] for line in re.findall(r"losses (.*)", str(first)))
    assert len(before) == len(after) == 8
    assert after[-1] < after[0] < before[0]
    assert "losses" not in str(second)


def test_the_zoo_plans_what_it_is_asked_for(run: Run) -> None:
    with pytest.raises(SystemExit, match="0"):
        run("zoo.py", "--plan-only", "--only", "recommender")


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """What a script imports of the project's own: modules and names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "autopar",
            "benchmarks",
            "examples",
            "tests",
        ):
            yield from ((str(node.module), name.name) for name in node.names)


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_what_scripts_import_is_there(folder: str) -> None:
    found = {pair for path in (ROOT / folder).rglob("*.py") for pair in imported(path)}
    missing = [
        (module, name)
        for module, name in sorted(found)
        if not hasattr(importlib.import_module(module), name) and not importlib.util.find_spec(f"{module}.{name}")
    ]
    assert not missing


def test_a_language_model_generates_over_a_planned_cache(pool: WorkerPool) -> None:
    first, second = pool.run(f"{__name__}:in_worker", ["generate.py", "--model", "gpt2"], ranks=2)
    assert "the tokens are those of the whole model: True" in str(first)
    assert len(re.findall("stored once", str(first))) == 2
    assert second == ""


def test_jobs_on_a_ray_cluster_move_with_equal_losses(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    said = launch("ray_cluster.py", str(tmp_path))
    assert "first: 16 steps on [4, 4, 4, 4, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 4, 4] ranks" in said
    apart = [float(line.rpartition(" ")[2]) for line in said.splitlines() if "losses apart by" in line]
    assert len(apart) == 3
    assert max(apart) < 1e-6
