"""A long wait says what it is for, after a second, on a terminal; short waits, pipes and other ranks are silent."""

from __future__ import annotations

import io
import logging
import threading

import pytest
from rich.console import Console

from autopar.runtime import progress as module
from autopar.runtime.progress import phases, progress


def shown(patience: float, monkeypatch: pytest.MonkeyPatch, *, terminal: bool = True, rank: str = "0") -> str:
    """What a wait prints, in which the work changes."""
    monkeypatch.setattr(module, "PATIENCE", patience)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with progress("capturing [the model]", console) as tell:
        if patience == 0:
            for thread in threading.enumerate():
                if isinstance(thread, threading.Timer):
                    thread.join()
        phases(tell)("formulate")  # which comes before the solver
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_long_wait_says_what_is_done_and_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(0, monkeypatch)
    assert "capturing [the model]" in said
    assert "solving" in said
    assert "0:00:00" in said


@pytest.mark.parametrize("how", [{"patience": 60}, {"patience": 0, "terminal": False}, {"patience": 0, "rank": "1"}])
def test_short_waits_pipes_and_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, how: dict[str, object]) -> None:
    assert "solving" not in shown(monkeypatch=monkeypatch, **how)  # type: ignore[arg-type]


def test_phases_are_logged_wherever_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "autopar"):
        phases(lambda text: None)("solve")
    assert "planning: solve ended" in caplog.text
