"""Processes are killed at random and others take over: no more steps are lost than promised, and losses are unchanged."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from autopar.elastic.stop import EXIT
from autopar.plan.plan import Plan
from tests.docs.pages import ROOT
from tests.support.elastic_agent import Generation, started
from tests.support.elastic_training import logged, train

STEPS, EVERY = 24, 3
CLOSE = 1e-6  # of losses in float32


def undisturbed(folder: Path, steps: int = STEPS) -> list[float]:
    """The losses of the same training on one process."""
    train(folder, steps, EVERY)
    return [line["loss"] for line in logged(folder)]


def disturbed(folder: Path, world: int, number: signal.Signals | None, after: int, rank: int) -> list[int]:
    """One start, and a signal for one of its ranks a little after it has taken so many steps; exit codes by rank."""
    with started(world, folder / "out", train, (folder, STEPS, EVERY)) as generation:
        if number is not None:
            taken = len(logged(folder)) + after
            wait(folder, taken, generation)
            os.kill(generation.number(rank), number)
        return generation.end()


def wait(folder: Path, taken: int, generation: Generation) -> None:
    """Until so many steps were taken, by all starts together."""
    while len(logged(folder)) < taken and generation.running:
        time.sleep(0.002)


def committed(folder: Path) -> list[int]:
    return sorted(int(found[1]) for path in folder.iterdir() if (found := re.fullmatch(r"step-(\d+)", path.name)))


def check(folder: Path, expected: list[float]) -> None:
    """Every step was taken, by whichever ranks, with the loss of the undisturbed run, and not more were lost than promised."""
    lines = logged(folder)
    assert {line["step"] for line in lines} == {*range(len(expected))}
    for line in lines:
        assert abs(line["loss"] - expected[int(line["step"])]) < CLOSE, line
    for before, after in itertools.pairwise(lines):
        assert after["step"] >= before["step"] + 1 - 2 * EVERY
        assert after["step"] <= before["step"] + 1
    assert {path.name[:5] for path in (folder / "checkpoints").iterdir()} == {"plans", "step-"}
    assert len(committed(folder / "checkpoints")) == 2
    plans = [Plan.load(path) for path in (folder / "checkpoints" / "plans").iterdir()]
    several = [plan for plan in plans if plan.mesh.size > 1]
    assert several
    assert all("I" not in plan.layouts["body.0.weight"] for plan in several), "each rank has another part"


WAY = [(2, signal.SIGKILL), (1, signal.SIGTERM), (2, None)]
LONG = [(8, signal.SIGKILL), (6, signal.SIGTERM), (4, signal.SIGKILL), (8, None)]


@pytest.mark.parametrize("way", [WAY, pytest.param(LONG, marks=pytest.mark.thorough)])
def test_a_training_goes_on_with_equal_losses_when_processes_leave_and_come(
    tmp_path: Path, way: list[tuple[int, signal.Signals | None]]
) -> None:
    drawn = random.Random(0)
    expected = undisturbed(tmp_path / "whole")
    for world, number in way:
        known = committed(tmp_path / "checkpoints") if (tmp_path / "checkpoints").exists() else []
        taken = logged(tmp_path)
        codes = disturbed(tmp_path, world, number, drawn.randint(1, 5), drawn.randrange(world))
        said = (tmp_path / "out").read_text()
        assert all(codes) == (number is not None), said
        if number == signal.SIGTERM:
            assert set(codes) == {EXIT}, said
            assert committed(tmp_path / "checkpoints")[-1] == logged(tmp_path)[-1]["step"] + 1
        again = logged(tmp_path)[len(taken) :]
        if known:
            assert again[0]["step"] == known[-1]
        assert {line["world"] for line in again} == {world}
    check(tmp_path, expected)


SCRIPT = """
import logging, os, sys, time
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook
from tests.support.elastic_training import train

logging.basicConfig(level=logging.INFO, format="%(message)s")
folder, steps, slow = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if os.environ["WORLD_SIZE"] == slow:  # so that there is time to come back
    register_optimizer_step_post_hook(lambda *_: time.sleep(0.5))
train(folder, steps, {every})
"""


# Or else an agent that comes later waits for the address of a store that was said in the first round only (torch 2.13).
REJOIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun(folder: Path, steps: int, *words: str, slow: int = 0, **more: str) -> subprocess.Popen[str]:
    """The real agent, with two ranks, which write to a file beside the folder."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(every=EVERY))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    options = ["--local-addr", "localhost", "--nproc-per-node", "2", "--monitor-interval", "0.1", *words]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(folder), str(steps), str(slow)]
    with (folder / "said").open("a") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=said, text=True)


@pytest.mark.thorough
def test_torchrun_starts_the_ranks_again_after_one_was_killed(tmp_path: Path) -> None:
    """The real agent, restarting by itself."""
    expected = undisturbed(tmp_path / "whole")
    with torchrun(tmp_path, STEPS, "--standalone", "--max-restarts", "2") as agent:
        try:
            while len(logged(tmp_path)) < 5 and agent.poll() is None:
                time.sleep(0.01)
            children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
            code = agent.wait(timeout=300)
        finally:
            agent.terminate()
    assert code == 0, (tmp_path / "said").read_text()[-3000:]
    check(tmp_path, expected)
    assert len(logged(tmp_path)) >= STEPS


@pytest.mark.thorough
def test_a_node_leaves_and_comes_back(tmp_path: Path) -> None:
    """Two agents of torchrun with `--nnodes=1:2`; one is killed, and started again while the other goes on: 4, 2, 4 ranks."""
    steps = 100
    expected = undisturbed(tmp_path / "whole", steps)
    meeting = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # it outlives both
    words = ["--nnodes=1:2", "--max-restarts=9", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{meeting.port}"]
    words += ["--rdzv-id=test", "--rdzv-conf=last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=5"]
    agents = [torchrun(tmp_path, steps, *words, slow=2, **REJOIN) for _ in range(2)]

    def until(world: int, count: int = 3) -> None:
        """Until so many steps were taken on so many ranks since now."""
        taken, end = len(logged(tmp_path)), time.monotonic() + 200
        while sum(line["world"] == world for line in logged(tmp_path)[taken:]) < count:
            assert agents[0].poll() is None, (tmp_path / "said").read_text()[-3000:]
            assert time.monotonic() < end, (tmp_path / "said").read_text()[-3000:]
            time.sleep(0.01)

    try:
        until(4)
        agents[1].kill()
        until(2)
        agents.append(torchrun(tmp_path, steps, *words, slow=2, **REJOIN))
        until(4)
        codes = [agents[0].wait(timeout=200), agents[2].wait(timeout=60)]
    finally:
        for agent in agents:
            agent.terminate()
    assert codes == [0, 0], (tmp_path / "said").read_text()[-3000:]
    check(tmp_path, expected)
    assert [world for world, _ in itertools.groupby(line["world"] for line in logged(tmp_path))] == [4, 2, 4]
