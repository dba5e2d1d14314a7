"""Benchmarks run any number of rounds from one up, and refuse others."""

from __future__ import annotations

import argparse
import statistics

import pytest

from benchmarks.rounds import count, quartiles


def test_quartiles_of_a_single_round_are_its_own() -> None:
    """Before, that was a traceback of `statistics.quantiles`."""
    assert quartiles([0.5]) == (0.5, 0.5, 0.5)
    assert list(quartiles([3.0, 1.0, 2.0])) == statistics.quantiles([1.0, 2.0, 3.0], n=4)


def test_rounds_are_one_at_least(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=count, default=15)
    assert parser.parse_args(["--rounds", "1"]).rounds == 1
    for wrong in ("0", "-1", "two"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--rounds={wrong}"])
        assert f"argument --rounds: {wrong!r} is no number of rounds" in capsys.readouterr().err
