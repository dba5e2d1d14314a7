"""Published runs on three devices, at the efficiency of their kernels: predictions are close, and rank the runs correctly."""

from __future__ import annotations

import pytest

from benchmarks.fidelity.predict import predict
from benchmarks.fidelity.score import score
from benchmarks.fidelity.tables import Run, runs

# Long and short sequences, wide and narrow, with and without recomputation, H100 and A100, one node and several.
ONE_NODE = (2, 11, 38, 56, 74, 92)
LINES = (*ONE_NODE, 110, 128)


@pytest.mark.parametrize("lines", [LINES[1::2], pytest.param(LINES, marks=pytest.mark.thorough)], ids=["half", "all"])
def test_step_times_are_near_what_was_measured_and_rank_the_runs(lines: tuple[int, ...]) -> None:
    chosen = [run for run in runs() if isinstance(run, Run) and run.table == "mpt" and run.line in lines]
    found = [predict(run) for run in chosen]
    on_one_node = score([one for one in found if one.run.table == "mpt" and one.run.line in ONE_NODE])
    assert on_one_node.median < 0.03
    assert on_one_node.mean < 0.04
    assert score(found).median < 0.05
    assert score(found).ranks > 0.8
