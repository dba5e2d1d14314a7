"""Models in pipeline stages under every schedule and three strategies; `python benchmarks/verify_all.py --stages` prints the
table."""

from __future__ import annotations

import pytest

from tests.support.stage_table import MODELS, RANKS, StageCase, cases, verified
from tests.support.threads import Threads

BATCH_NORMS = StageCase(model="unet", ranks=2, schedule="1f1b", strategy="fsdp")  # whose stages sent what none could take
FURTHER = [case for model in MODELS for ranks in RANKS for case in cases(model, ranks) if case != BATCH_NORMS]


@pytest.mark.parametrize("case", [BATCH_NORMS, *(pytest.param(case, marks=pytest.mark.thorough) for case in FURTHER)], ids=str)
def test_stages_have_equal_numbers_and_communicate_what_the_plan_says(case: StageCase, threads: Threads) -> None:
    report = verified(case, threads)
    assert report.ok, report
