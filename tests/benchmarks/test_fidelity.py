"""Predictions against published measurements: how a row becomes an error, and the scores."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.cost_models import catalog
from autopar.cost_models.fidelity import MEASURED
from benchmarks.fidelity.__main__ import RESULTS
from benchmarks.fidelity.models import Decoder
from benchmarks.fidelity.predict import ATTENTION, MESSAGES, OTHERS, PRODUCTS, REST, Prediction, device_of, predict
from benchmarks.fidelity.refit import fit, folds, refitted
from benchmarks.fidelity.report import report
from benchmarks.fidelity.score import score, spearman
from benchmarks.fidelity.tables import Run

DECODER = Decoder(width=256, heads=4, key_heads=4, hidden=1024, layers=5, vocabulary=512, length=128, metrics=2)
RUN = Run(
    table="t", line=2, name="small", device="a100-80gb", nodes=1, mesh={"fsdp": 4}, strategy="fsdp", decoder=DECODER,
    sequences=16, microbatches=2, seconds=1e-3,
)  # fmt: skip


def made(seconds: float, measured: float, device: str = "a100-80gb", **parts: float) -> Prediction:
    """A prediction of these parts."""
    empty = dict.fromkeys((PRODUCTS, ATTENTION, OTHERS, MESSAGES, REST), 0.0)
    run = replace(RUN, seconds=measured, device=device)
    return Prediction(run=run, seconds=seconds, memory=2**30, parts=empty | parts)


def test_two_and_three_blocks_give_the_step_and_the_memory_of_all() -> None:
    found = predict(RUN)
    tokens = torch.empty(16, 128, dtype=torch.long, device="meta")
    plan = autopar.plan(
        DECODER.module(), (tokens, tokens), RUN.mesh, device=device_of(RUN), strategy="fsdp", microbatches=2, budget="1TB"
    )
    assert found.seconds == pytest.approx(plan.step_time, rel=1e-3)
    assert found.memory == pytest.approx(plan.peak_memory, rel=1e-2)


def test_what_a_harness_adds_and_nodes_that_wait_are_in_the_step() -> None:
    plain, slower = predict(RUN), predict(replace(RUN, nodes=4, host=0.5))
    assert slower.seconds == pytest.approx(plain.seconds * 1.01 + 0.5)


def test_the_rank_correlation_is_that_of_a_worked_example() -> None:
    """Hours of television and IQ of ten people, as Wikipedia's article on the coefficient works it out: -29/165."""
    hours = np.array([7, 0, 27, 50, 28, 29, 20, 12, 6, 17.0])
    iq = np.array([106, 86, 100, 101, 99, 103, 97, 113, 112, 110.0])
    assert spearman(iq, hours) == pytest.approx(-29 / 165)
    assert np.isnan(spearman(iq, np.ones(10)))


@given(st.lists(st.integers(0, 20), min_size=3, max_size=12).filter(lambda numbers: len(set(numbers)) > 1))
def test_the_rank_correlation_knows_the_order_only(numbers: list[int]) -> None:
    left = np.array(numbers, dtype=np.float64)
    assert spearman(left, left**3 + 1) == pytest.approx(1)
    assert spearman(left, -np.sqrt(left)) == pytest.approx(-1)


def test_a_score_has_the_size_the_direction_and_the_order_of_errors() -> None:
    rows = [made(0.9, 1.0), made(1.8, 2.0), made(5.0, 4.0)]
    found = score(rows)
    assert (found.count, found.median, found.mean, found.signed) == pytest.approx((3, 0.1, 0.15, 0.05 / 3))
    assert found.ranks == pytest.approx(1)
    with pytest.raises(ValueError, match="no predictions"):
        score([])


def test_a_refit_finds_the_price_that_is_off_and_holds_on_rows_it_has_not_seen() -> None:
    rows = []
    for number in range(1, 60):
        parts = {PRODUCTS: 1.0 + number % 7, ATTENTION: 0.1 * (number % 5), MESSAGES: 0.2 * (number % 3)}
        measured = 1.25 * parts[PRODUCTS] + 2 * parts[ATTENTION] + 0.5 * parts[MESSAGES]
        row = made(sum(parts.values()), measured, **parts)
        wide = replace(DECODER, width=4096) if number % 2 else DECODER
        rows.append(replace(row, run=replace(row.run, decoder=wide)))
    factors = fit(rows)
    assert factors["a100-80gb", PRODUCTS] == pytest.approx(1.25, abs=0.05)
    assert factors["a100-80gb", ATTENTION] == pytest.approx(2, abs=0.5)
    assert max(abs(refitted(row, factors)) for row in rows) < 0.1
    (fold,) = folds(rows)
    assert (fold.fitted + fold.held, fold.refitted < fold.priced / 3) == (59, True)


def test_the_report_names_the_worst_row_and_leaves_out_what_does_not_count() -> None:
    rows = [made(0.9, 1.0, **{PRODUCTS: 0.9}), made(3.0, 1.0, **{MESSAGES: 3.0})]
    odd = replace(rows[1], run=replace(rows[1].run, excluded="a slow node"))
    text = "\n".join(report([rows[0], odd], []))
    assert "not counted: a slow node" in text
    assert f"{'all':<34}{1:>6}" in text
    assert "+200.0%  t:2 small, a100-80gb: products 0%" in "\n".join(report(rows, []))


def test_a_plan_says_the_error_that_the_results_have_for_its_device_and_scale() -> None:
    lines = iter(RESULTS.read_text().splitlines())
    assert "by device and nodes" in lines
    written = {}
    for line in itertools.takewhile(lambda line: line.startswith("  "), lines):
        kind, numbers = line[2:34].strip(), line[34:].split()
        device, scale = kind.split(", ")
        written[device, scale] = int(numbers[0]), *(float(text.rstrip("%")) / 100 for text in numbers[1:3])
    assert {key: pytest.approx(found) for key, found in written.items()} == dict(MEASURED)


@pytest.mark.parametrize(
    "device, sizes, said",
    [
        ("h100", (8,), "published runs on one node of h100"),
        ("a100-40gb", (2, 8), "published runs on several nodes of a100-40gb"),
        ("t4", (4,), "unknown error of predicted steps (compared with no published run on one node of t4)"),
    ],
)
def test_a_report_says_how_far_off_prices_are(device: str, sizes: tuple[int, ...], said: str) -> None:
    x = torch.empty(16, 8, device="meta")
    assert said in " ".join(str(autopar.plan(torch.nn.Linear(8, 8, device="meta"), x, sizes, device=device)).split())
    at_peak = catalog.device(device).at_peak()
    assert "accuracy" not in str(autopar.plan(torch.nn.Linear(8, 8, device="meta"), x, sizes, device=at_peak))
