"""The collectives that a real step issues (kind, axis, bytes, pass) are the plan's list: twenty plans of three models."""

from __future__ import annotations

import pytest

from autopar.runtime.workers import WorkerPool
from tests.support import table
from tests.support.table import Case

NAMES = ("gpt2", "llama", "vit")
CASES = [case for case in table.sample() if case.model in NAMES]
CASES += [case for name in NAMES for case in table.cases(name, (2, 4)) if case not in CASES][: 20 - len(CASES)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_issues_what_its_plan_lists(pool: WorkerPool, case: Case) -> None:
    report = table.verified(case, pool)
    assert report.plan.collectives
    assert report.surplus == ()
    assert report.missing == ()


def test_there_are_twenty_plans() -> None:
    assert len(set(CASES)) == 20
