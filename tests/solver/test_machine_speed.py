"""Plans do not depend on the machine's speed: limits count iterations and nodes, and HiGHS is deterministic."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import highspy
import numpy as np
import pytest

from autopar.solver import highs
from autopar.solver.deadline import NEVER, Deadline
from autopar.solver.highs import STATUS, Meaning
from autopar.solver.problem import Choice, Problem, Row, row_bytes
from autopar.solver.settings import EXACT, SearchSettings
from autopar.solver.solve import solve
from tests.solver.random_problems import random_edge, random_problem, random_row
from tests.support.forked import FORKED

HARD = range(2)  # seeds of problems on which HiGHS branches, or finds that there is nothing


def hard_problem(seed: int) -> tuple[Problem, list[Row]]:
    """Ten choices of four candidates with rows that bind: their relaxation is fractional."""
    draw = random.Random(seed)
    choices = tuple(
        Choice(name=f"o{i}", seconds=np.array([draw.uniform(1, 3) for _ in range(4)]), tie=np.zeros(4)) for i in range(10)
    )
    readers = [sorted(draw.sample(range(i + 1, 10), min(2, 9 - i))) for i in range(9)]
    edges = tuple(random_edge(draw, lambda: draw.uniform(0, 1), choices, i, reader) for i, reader in enumerate(readers))
    problem = Problem(choices=choices, edges=edges)
    fastest = solve(problem).solution
    assert fastest is not None
    rows = [random_row(problem, 10 * seed + i) for i in range(3)]
    taken = [row_bytes(problem, row, fastest.picks, fastest.arcs) for row in rows]
    return problem, [replace(row, limit=0.85 * used) for row, used in zip(rows, taken, strict=True)]


def answers() -> str:
    """What the solver says of the hard problems, to the last digit."""
    settings = SearchSettings(gap=1e-6, exact=True, windows=(), dive_gap=0.0, branch_nodes=20)
    found = []
    for seed in HARD:
        problem, rows = hard_problem(seed)
        outcome = solve(problem, rows=rows, settings=settings)
        found.append((outcome.bound, outcome.solution and (outcome.solution.picks, outcome.solution.arcs)))
    return repr(found)


def sends_answers(there: Connection) -> None:
    there.send("ready")
    there.send(answers())


def test_a_machine_that_is_ten_times_slower_finds_the_same_plan() -> None:
    here, there = FORKED.Pipe()
    slow = FORKED.Process(target=sends_answers, args=(there,))
    slow.start()
    there.close()  # so that a process that dies ends the wait
    assert here.recv() == "ready"
    assert slow.pid is not None
    while not here.poll():  # nine tenths of the time it stands still, while its clock goes on
        os.kill(slow.pid, signal.SIGSTOP)
        time.sleep(0.18)
        os.kill(slow.pid, signal.SIGCONT)
        time.sleep(0.02)
    assert here.recv() == answers()
    slow.join()


def test_highs_runs_in_one_thread_from_a_fixed_seed_without_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, run = [], highs.run

    def watched(solver: highspy.Highs, deadline: Deadline = NEVER) -> Meaning:
        seen.append([solver.getOptionValue(name)[1] for name in ("time_limit", "threads", "random_seed")])
        assert deadline is NEVER
        return run(solver, deadline)

    monkeypatch.setattr(highs, "run", watched)
    for seed in range(5):
        solve(random_problem(seed), rows=[random_row(random_problem(seed), seed)], settings=EXACT)
    assert len(seen) > 5
    assert all(options == [highspy.kHighsInf, 1, 0] for options in seen)


def test_every_status_of_highs_has_a_meaning() -> None:
    assert STATUS.keys() == highspy.HighsModelStatus.__members__.keys()
