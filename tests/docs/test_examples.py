"""The example scripts run, and print what their docstrings promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

EXAMPLES = ROOT / "examples"


def run(*command: str, processes: int = 0) -> str:
    """What an example prints, alone or on gloo processes."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    script, *arguments = command
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *launch, str(EXAMPLES / script), *arguments]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_loss_inside_of_forward_and_outside_train_alike() -> None:
    found = re.findall(r"loss inside (\S+)  outside (\S+)", run("own_model.py"))
    assert len(found) == 3
    assert all(inside == outside for inside, outside in found)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_resumes_under_another_plan_on_another_number_of_processes(tmp_path: Path) -> None:
    saved = run("checkpoint.py", "save", str(tmp_path), processes=2)
    resumed = run("checkpoint.py", "resume", str(tmp_path))
    steps = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d)  loss (\S+)", saved + resumed)]
    assert [step for step, _ in steps] == [0, 1, 2, 3, 4, 5]
    losses = [loss for _, loss in steps]
    assert sorted(losses, reverse=True) == losses


def test_micro_batches_have_the_loss_of_the_whole_batch_and_take_less_memory() -> None:
    printed = run("microbatches.py")
    loss, peak = re.findall(r"whole (\S+) .*parts (\S+)", printed)
    assert float(loss[0]) == pytest.approx(float(loss[1]), abs=1e-5)
    assert float(peak[1]) < float(peak[0])


def test_a_plan_for_a_thousand_gpus_is_made_without_any() -> None:
    printed = run("plan_on_a_laptop.py", "--layers", "1")
    assert "node=125" in printed
    assert "proven optimal" in printed


def test_an_operator_of_ones_own_is_found_a_rule_and_verified() -> None:
    printed = run("own_operator.py")
    assert '"... a, b a -> ... b"' in printed
    assert "equal numbers on two processes: True" in printed
