"""Outputs, loss and every gradient equal the sequential ones, and a step issues the collectives that its plan lists.

Every model under two plans: on processes over a mesh of one axis, on threads over one of several. `make verify-all` runs the
whole table of models, meshes and plans on processes.
"""

from __future__ import annotations

import pytest

from autopar.runtime.workers import WorkerPool
from tests.support import table
from tests.support.models import MODELS
from tests.support.table import Case
from tests.support.threads import Threads


@pytest.mark.parametrize("case", list(table.sample()), ids=str)
def test_a_parallel_model_has_the_numbers_of_the_sequential_one_and_sends_what_its_plan_lists(
    pool: WorkerPool, threads: Threads, case: Case
) -> None:
    report = table.verified(case, pool if len(case.sizes) == 1 else threads)
    assert report.plan.collectives
    assert report.ok, str(report)
    assert {row.what for row in report.rows} >= {"output", "gradient", "capture"}


SHARDED = [
    Case("llama", (2, 2), "fsdp+tp"),
    Case("t5", (2, 2), "fsdp+tp"),
    Case("bert", (2, 2), "hsdp"),
    Case("gpt2", (2, 2, 2), "hsdp+tp"),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", SHARDED, ids=str)
def test_sharded_tensor_parallelism_and_hybrid_sharding_have_the_numbers_of_the_sequential_model(
    threads: Threads, case: Case
) -> None:
    report = table.verified(case, threads)
    assert {c.kind for c in report.plan.collectives} >= {"all_gather", "reduce_scatter"}
    assert report.ok, str(report)


def test_the_sample_is_spread_over_models_meshes_and_strategies() -> None:
    cases = list(table.sample())
    assert {case.model for case in cases} == set(MODELS)
    assert {case.sizes for case in cases} == {*table.MESHES, *table.SMALL}
    assert {case.plan for case in cases if isinstance(case.plan, str)} == set(table.STRATEGIES)
    assert sum(isinstance(case.plan, int) for case in cases) == len(cases) // 2
