"""Compares the chosen plan with every named strategy, planned for the same captured program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.errors import AutoparError, BudgetError
from autopar.ir.device import Seconds
from autopar.plan.options import INFERENCE, Options
from autopar.plan.plan import Plan
from autopar.plan.tables import bytes_of, exposed
from autopar.plan.text import Part, grid, milliseconds, size_text
from autopar.planning.no_plan import SMALLEST, explained
from autopar.planning.optimize import solved
from autopar.planning.planner import Planned, to_plan
from autopar.search_space.schemes import OF_TRAINING, STRATEGIES, strategies_for
from autopar.solver.highs import SolverError
from autopar.solver.settings import DEFAULTS, SearchSettings

AUTO = STRATEGIES[0]
ITERATIONS = 100_000  # simplex iterations of one relaxation: enough for all but the largest models


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A strategy with its plan, or the reason why it has none."""

    strategy: str
    plan: Plan | None
    refusal: str = ""

    @property
    def exposed(self) -> Seconds:
        """The collectives' time that the step waits for: the rest is hidden behind compute."""
        return exposed(self.plan) if self.plan else 0.0

    def relative(self, auto: Plan | None) -> str:
        """How the step compares with auto's, in words; empty for auto itself."""
        if auto is None or self.plan is None or self.strategy == AUTO or not auto.step_time:
            return ""
        more = self.plan.step_time / auto.step_time - 1
        if abs(more) < 5e-4:
            return "as fast as auto"
        return f"{more:.1%} slower than auto" if 0 < more < 1 else f"{1 + more:.2f} times the step time of auto"


def compare(planned: Planned, options: Options, *, iterations: int = ITERATIONS) -> list[Compared]:
    """Plan every strategy that fits the mesh's axes, under the same options; the chosen plan is kept.

    A strategy whose relaxation takes too many simplex iterations is given up, and says so.
    """
    settings = replace(DEFAULTS, relaxation_iterations=iterations)
    apart = OF_TRAINING if options.mode == INFERENCE else ()
    named = [name for name in strategies_for(planned.solved.formulated.mesh) if name not in apart]
    return [_compared(planned, replace(options, strategy=strategy), settings) for strategy in named]


def _compared(planned: Planned, options: Options, settings: SearchSettings) -> Compared:
    if options.strategy == planned.plan.options["strategy"]:
        return Compared(strategy=options.strategy, plan=planned.plan)
    formulated = planned.solved.formulated
    try:
        plan = to_plan(solved(formulated.analysis, formulated.mesh, options, settings=settings), options)
    except BudgetError as error:
        needs = size_text(float(explained(error).details[SMALLEST].removeprefix("budget=")))
        return Compared(strategy=options.strategy, plan=None, refusal=f"does not fit: needs {needs} per device")
    except SolverError as error:
        return Compared(strategy=options.strategy, plan=None, refusal=f"not compared: {error.what}")
    except AutoparError as error:
        return Compared(strategy=options.strategy, plan=None, refusal=f"not possible: {error.what}")
    return Compared(strategy=options.strategy, plan=plan)


def auto_of(found: Sequence[Compared]) -> Plan | None:
    """The plan without a named strategy, if it is compared."""
    return next((entry.plan for entry in found if entry.strategy == AUTO), None)


def comparison(found: Sequence[Compared], chosen: str) -> Iterator[Part]:
    """The table of each strategy's totals, and by how much auto beats it."""
    table = grid(
        "strategy", "step ms", "compute", "communication", "bytes", "memory", "relative to auto", right=(1, 2, 3, 4, 5)
    )
    for entry in found:
        name = f"{entry.strategy} (this plan)" if entry.strategy == chosen else entry.strategy
        if entry.plan is None:
            table.add_row(name, "", "", "", "", "", entry.refusal)
            continue
        plan = entry.plan
        times = map(milliseconds, (plan.step_time, plan.step_time - entry.exposed, entry.exposed))
        sizes = size_text(bytes_of(plan.collectives)), size_text(plan.peak_memory)
        table.add_row(name, *times, *sizes, entry.relative(auto_of(found)))
    yield table
