"""The budget sweep is printed row by row, and a plan within a smaller budget also counts for larger ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.explain.budget_sweep import SweepStep, budgets_between, improved, sweep_parts

STEPS = [
    SweepStep(budget=budget, step_time=time, recomputed=0.0, peak_memory=budget - 1, gap=0.01)
    for budget, time in ((4 << 30, 0.010), (3 << 30, 0.013), (2 << 30, 0.012), (1 << 30, 0.040))
]


def test_a_row_is_printed_before_the_next_one_is_planned() -> None:
    planned: list[int] = []

    def steps() -> Iterator[SweepStep]:
        for step in STEPS:
            planned.append(step.budget)
            yield step

    rows = sweep_parts(steps())
    assert str(next(rows)).split()[0] == "budget"
    for count in range(1, len(STEPS) + 1):
        row = str(next(rows))
        assert len(planned) == count
        assert f"{STEPS[count - 1].step_time * 1e3:.3f}" in row
    assert "faster plans" in str(next(rows))


def test_what_fits_into_less_fits_into_more() -> None:
    found = improved(STEPS)
    assert [step.budget for step in found] == [step.budget for step in STEPS]
    assert [step.step_time for step in found] == [0.010, 0.012, 0.012, 0.040]
    assert found[1].peak_memory == STEPS[2].peak_memory
    better = [str(part) for part in sweep_parts(STEPS)][len(STEPS) + 1 :]
    assert "smaller budgets" in better[0]
    assert [line.split()[:2] for line in better[1:-1]] == [["3.00", "GiB"]]
    assert len([*sweep_parts(found)]) == len(STEPS) + 2  # nothing to improve


def test_where_nothing_is_proven_no_gap_is_printed() -> None:
    rows = [str(part) for part in sweep_parts([replace(step, gap=1.0) for step in STEPS])]
    assert all(row.split()[-2] == "-" for row in rows[1 : len(STEPS) + 1])
    assert rows[-1].endswith("-: nothing is proven")


def test_budgets_fall_and_there_is_none_below_a_peak_that_is_the_least() -> None:
    found = budgets_between(100.0, 104.0)
    assert found == sorted(set(found), reverse=True)
    assert found[0] < 104
    assert found[-1] == 100
    assert budgets_between(100.0, 100.0) == []
