"""A search that is stopped early returns the best known solution, or raises an error; Ctrl-C stops it as well."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from autopar.solver import highs
from autopar.solver.deadline import NEVER, Deadline
from autopar.solver.highs import Meaning, TimeLimitError
from autopar.solver.matrix import SparseBlock
from autopar.solver.problem import row_bytes
from autopar.solver.settings import EXACT
from autopar.solver.solve import solve
from tests.solver.random_problems import enumerate_all, random_problem, random_row, with_regions


def test_a_simplex_method_without_progress_ends_in_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program on which HiGHS stalls is too large for a test: here, two looks at one iteration are called a stall."""
    monkeypatch.setattr(highs, "_STALLED", 1)
    solver = highs.load(dense())
    assert highs.run(solver) is Meaning.TROUBLE
    assert solver.getInfo().simplex_iteration_count < 300
    monkeypatch.undo()
    assert highs.run(solver) is Meaning.SOLVED
    assert not any(map(highs._Progress().stalled, range(1000)))
    still = highs._Progress()
    assert [still.stalled(7) for _ in range(highs._STALLED + 1)].count(True) == 1


@dataclass(frozen=True)
class AfterLooks(Deadline):
    """A deadline that comes when the clock was read so often: the same on every machine."""

    looks: int = 0
    seen: list[int] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        self.seen.append(1)
        return len(self.seen) > self.looks


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(40))
def test_whenever_the_search_ends_it_says_a_solution_and_a_bound_that_hold_or_that_there_is_none_yet(seed: int) -> None:
    problem = with_regions(random_problem(seed), seed) if seed % 2 else random_problem(seed)
    rows = tuple(random_row(problem, 7 * seed + i) for i in range(seed % 3))
    best, ended, unproven = enumerate_all(problem, rows), list[float](), list[bool]()
    for looks in range(40):
        deadline = AfterLooks(looks=looks)
        try:
            outcome = solve(problem, rows=rows, settings=replace(EXACT, deadline=deadline))
        except TimeLimitError as error:
            unproven.append(best is not None and error.bound > best + 1e-6)
            continue
        found = outcome.solution
        if best is None:
            assert found is None
        elif found is not None:
            assert best - 1e-6 <= found.seconds
            assert found.bound <= best + 1e-6
            assert all(row_bytes(problem, row, found.picks, found.arcs) <= row.limit * (1 + 1e-6) for row in rows)
        if len(deadline.seen) <= looks:
            ended.append(found.seconds if found is not None else math.inf)
            break
    assert not any(unproven)
    assert ended, "with time enough the search ends by itself"
    assert ended[0] == pytest.approx(math.inf if best is None else best, rel=1e-6, abs=1e-9)


def dense(rows: int = 600, columns: int = 900) -> SparseBlock:
    """A covering problem of which the simplex method takes hundreds of iterations."""
    draw = np.random.default_rng(0)
    each = 20
    index = np.concatenate([np.sort(draw.choice(columns, each, replace=False)) for _ in range(rows)])
    value = draw.uniform(0.5, 1.0, rows * each)
    return SparseBlock(
        cost=np.linspace(1, 2, columns),
        lower=value.reshape(rows, each).sum(1),
        upper=np.full(rows, np.inf),
        start=np.arange(0, rows * each + 1, each).astype(np.int32),
        column=index.astype(np.int32),
        value=value,
    )


def test_a_relaxation_ends_soon_after_its_deadline_and_can_be_solved_on() -> None:
    solver, deadline = highs.load(dense()), AfterLooks(looks=20)
    assert highs.run(solver, deadline) is Meaning.TIME_UP
    assert len(deadline.seen) < 30
    assert highs.run(solver) is Meaning.SOLVED
    assert solver.getInfo().simplex_iteration_count > 100
    fresh = highs.load(dense())
    assert highs.run(fresh) is Meaning.SOLVED
    assert solver.getInfo().objective_function_value == pytest.approx(fresh.getInfo().objective_function_value)


@dataclass(frozen=True)
class Pressed(AfterLooks):
    """No deadline, but someone who presses Ctrl-C when the clock was read so often."""

    @property
    def passed(self) -> bool:
        if AfterLooks.passed.fget(self) and len(self.seen) == self.looks + 1:  # type: ignore[attr-defined]
            signal.raise_signal(signal.SIGINT)
        return False


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_relaxation_soon_and_nothing_stays_behind() -> None:
    solver, pressed, handler = highs.load(dense()), Pressed(looks=20), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        highs.run(solver, pressed)
    assert len(pressed.seen) < 30
    assert signal.getsignal(signal.SIGINT) is handler
    assert highs.run(solver) is Meaning.SOLVED


def test_a_handler_of_the_users_own_hears_of_ctrl_c_when_the_relaxation_has_ended() -> None:
    heard, handler = list[int](), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        assert highs.run(highs.load(dense()), Pressed(looks=20)) is Meaning.TIME_UP
    finally:
        signal.signal(signal.SIGINT, handler)
    assert heard == [signal.SIGINT]


def test_no_clock_is_read_where_the_user_sets_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.solver.deadline.time", None)
    assert not NEVER.passed
    assert not NEVER.earlier(0.5).passed
    solve(random_problem(3), settings=EXACT)
