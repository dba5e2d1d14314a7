"""Time against memory: the fastest plan within each of several budgets, down to the least memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.formulation.budget_loop import smallest
from autopar.ir.mesh import Bytes, Seconds
from autopar.plan.options import PLENTY, Options
from autopar.plan.plan import Plan
from autopar.plan.text import Part, grid, milliseconds, size_text
from autopar.planning.optimize import solved_within
from autopar.planning.planner import Planned, to_plan

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
MARGIN = 1.01  # of the least memory: the smallest budget that is tried
BAR = 40  # characters of the longest bar


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStep:
    """The plan within a budget: its step time, the recomputation in it, its peak memory and its proven gap."""

    budget: Bytes
    step_time: Seconds
    recomputed: Seconds
    peak_memory: Bytes
    gap: float


def budget_sweep(planned: Planned, options: Options) -> list[SweepStep]:
    """The fastest plans between the peak memory of the unconstrained optimum and the least memory that any plan needs.

    Budgets are spaced evenly; the last is the least memory and a hundredth more. All plans are of the program as it was
    planned: in its number of micro-batches, with its padding.
    """
    solved = planned.solved
    analysis, mesh = solved.formulated.analysis, solved.formulated.mesh
    least = smallest(solved.formulated, solved.memory_model)
    assert least is not None, "there is a plan"
    ((_, free),) = solved_within(analysis, mesh, options, [PLENTY])
    low = MARGIN * float(solved.memory_model.walk(least).max())
    high = max(low, float(free.memory_model.walk(free.solution).max()))
    budgets = [round(low + share * (high - low)) for share in SHARES[1:]]
    found = [_step(round(high), to_plan(free, options))]
    found += [_step(budget, to_plan(plan, options)) for budget, plan in solved_within(analysis, mesh, options, budgets)]
    for place in reversed(range(len(found) - 1)):  # what fits into less fits into more
        if found[place + 1].step_time < found[place].step_time:
            found[place] = replace(found[place + 1], budget=found[place].budget)
    return found


def _step(budget: Bytes, plan: Plan) -> SweepStep:
    return SweepStep(
        budget=budget,
        step_time=plan.step_time,
        recomputed=plan.breakdown.recomputed,
        peak_memory=plan.peak_memory,
        gap=plan.gap,
    )


def sweep_parts(found: list[SweepStep]) -> Iterator[Part]:
    """The sweep as it is printed."""
    table = grid("budget", "peak", "step ms", "slower by", "recomputation", "gap", "", right=(0, 1, 2, 3, 4, 5))
    first, longest = found[0].step_time, max(step.step_time for step in found)
    for step in found:
        table.add_row(
            size_text(step.budget),
            size_text(step.peak_memory),
            milliseconds(step.step_time),
            f"{step.step_time / first - 1:+.1%}" if first else "",
            milliseconds(step.recomputed),
            f"{step.gap:.1%}",
            "#" * round(BAR * step.step_time / longest) if longest else "",
        )
    yield table
    yield "budget and peak: per device; gap: the most by which a faster plan within the budget may exist"
