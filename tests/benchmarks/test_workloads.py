"""The benchmark models whose steps no manual scheme serves best: by price, `auto` is faster than every scheme."""

from __future__ import annotations

from pathlib import Path

import pytest

import autopar
from benchmarks.models import WORKLOADS, make

MACHINE = Path(__file__).parents[2] / "benchmarks" / "results" / "machine_2.json"
QUICK = ("recommender", "mixed")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.thorough) for n in WORKLOADS if n not in QUICK)])
def test_auto_is_at_most_as_slow_as_every_scheme_and_clearly_faster_than_data_parallelism(name: str) -> None:
    model, batch = make(name)
    step = {
        how: autopar.plan(model, batch, (2,), strategy=how, device=str(MACHINE)).step_time
        for how in ("auto", "ddp", "fsdp", "megatron")
    }
    assert step["auto"] <= min(step.values()) * 1.001
    assert step["auto"] < 0.9 * min(step["ddp"], step["fsdp"])
