"""Budget sweep: the fastest plan within each of several budgets, down to the smallest that works."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.formulation.budget_loop import smallest
from autopar.ir.device import Bytes, Seconds
from autopar.plan.options import PLENTY, Options
from autopar.plan.plan import Plan
from autopar.plan.text import Part, milliseconds, size_text
from autopar.planning.optimize import solved_within
from autopar.planning.planner import Planned, to_plan

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
MARGIN = 1.01  # of the least memory: the smallest budget that is tried
BAR, LONGEST = 20, 60  # characters of the bar of the first plan, and of the longest bar
HEAD = f"{'budget':>10}{'peak':>12}{'step ms':>11}{'slower by':>11}{'recomputation':>15}{'gap':>7}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStep:
    """The plan within a budget: its step time, recomputation, peak memory and proven gap."""

    budget: Bytes
    step_time: Seconds
    recomputed: Seconds
    peak_memory: Bytes
    gap: float


def budget_sweep(planned: Planned, options: Options) -> Iterator[SweepStep]:
    """The fastest plans found, from the peak of the unconstrained optimum down to the least memory that any plan needs.

    Budgets are spaced evenly; the last is 1% above the least memory. There is only one if the optimum has no more than that.
    All plans keep the program's number of micro-batches and its padding. Each step is planned on demand.
    """
    solved = planned.solved
    analysis, mesh = solved.formulated.analysis, solved.formulated.mesh
    ((_, free),) = solved_within(analysis, mesh, options, [PLENTY])
    least = smallest(solved.formulated, solved.memory_model)
    assert least is not None, "there is a plan"
    high = float(free.memory_model.walk(free.solution).max())
    low = min(high, MARGIN * float(solved.memory_model.walk(least).max()))
    yield step_within(round(high), to_plan(free, options))
    for budget, found in solved_within(analysis, mesh, options, budgets_between(low, high)):
        yield step_within(budget, to_plan(found, options))


def budgets_between(low: float, high: float) -> list[Bytes]:
    """The budgets below the highest, falling."""
    budgets = (round(low + share * (high - low)) for share in SHARES[1:])
    return [budget for budget in dict.fromkeys(budgets) if budget < round(high)]


def step_within(budget: Bytes, plan: Plan) -> SweepStep:
    """The sweep's step for a plan made within a budget."""
    return SweepStep(
        budget=budget,
        step_time=plan.step_time,
        recomputed=plan.breakdown.recomputed,
        peak_memory=plan.peak_memory,
        gap=plan.gap,
    )


def improved(steps: Sequence[SweepStep]) -> list[SweepStep]:
    """The steps by falling budget, each with the fastest plan found: a plan that fits a smaller budget fits a larger one."""
    found = list(steps)
    for place in reversed(range(len(found) - 1)):
        if found[place + 1].step_time < found[place].step_time:
            found[place] = replace(found[place + 1], budget=found[place].budget)
    return found


def sweep_parts(steps: Iterable[SweepStep]) -> Iterator[Part]:
    """The printed sweep: a row as soon as its step is planned, and at the end the rows that later steps improve."""
    yield HEAD
    known: list[SweepStep] = []
    for step in steps:
        known.append(step)
        yield _row(step, known[0].step_time)
    better = [now for before, now in zip(known, improved(known), strict=True) if now != before]
    if better:
        yield "faster plans that were found within smaller budgets:"
        yield from (_row(step, known[0].step_time) for step in better)
    yield "budget and peak: per device; gap: the most by which a faster plan within the budget may exist" + (
        "; -: nothing is proven" if any(step.gap == 1 for step in known) else ""
    )


def _row(step: SweepStep, first: Seconds) -> str:
    share = step.step_time / first if first else 1.0
    slower, bar = f"{share - 1:+.1%}", "#" * min(LONGEST, round(BAR * share))
    sizes, gap = f"{size_text(step.budget):>10}{size_text(step.peak_memory):>12}", f"{step.gap:.1%}" if step.gap < 1 else "-"
    return f"{sizes}{milliseconds(step.step_time):>11}{slower:>11}{milliseconds(step.recomputed):>15}{gap:>7}  {bar}"
