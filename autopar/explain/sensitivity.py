"""Sensitivity: what a plan loses if links or kernels are faster or slower than priced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autopar.cost_models.scaled import ScaledCostModel
from autopar.formulation.prices import Prices
from autopar.formulation.step_time import StepPrices, step_time
from autopar.ir.device import Seconds
from autopar.memory.schedule import Schedule
from autopar.plan.options import Options
from autopar.plan.text import Part, grid, milliseconds
from autopar.planning.optimize import solution_time, solved
from autopar.planning.planner import Planned

ERROR = 0.2  # of a rate: a little less than the worst tables of published runs are off by, benchmarks/results/fidelity.txt
SCENARIOS = (("links", 1 + ERROR), ("links", 1 - ERROR), ("kernels", 1 + ERROR), ("kernels", 1 - ERROR))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """A plan and the best plan found if something runs at another speed.

    Attributes:
        what: "links" or "kernels".
        speed: their speed, relative to the prices that the plan was chosen by.
        step_time: of the plan at these prices.
        best: step time of the plan that is chosen by these prices.
        bound: a lower bound on the step time of every plan; None if nothing is proven.
    """

    what: str
    speed: float
    step_time: Seconds
    best: Seconds
    bound: Seconds | None

    @property
    def lost(self) -> float:
        """How much slower the plan is than the best one found, relative to that; 0 if that is not faster."""
        return max(0.0, self.step_time / self.best - 1) if self.best else 0.0

    @property
    def lost_at_most(self) -> float:
        """How much slower it can be than any plan, relative to the bound."""
        return max(self.lost, self.step_time / self.bound - 1) if self.bound else self.lost


def sensitivity(planned: Planned, options: Options) -> Iterator[Sensitivity]:
    """Compare the plan with the best one in each of `SCENARIOS`, with its budget, number of micro-batches and padding."""
    formulated, chosen = planned.solved.formulated, planned.resolved.assignment
    schedule = Schedule(formulated.program, chosen)
    for what, speed in SCENARIOS:
        model = ScaledCostModel(options.cost_model, **{what: speed})
        prices = Prices(mesh=formulated.mesh, optimizer=planned.solved.optimizer, model=model)
        other = solved(formulated.analysis, formulated.mesh, replace(options, cost_model=model))
        own = step_time(schedule, StepPrices(formulated.analysis, prices))
        best = min(own, solution_time(other.memory_model, other.solution))  # a search that stops at a gap may miss the plan
        yield Sensitivity(what=what, speed=speed, step_time=own, best=best, bound=min(best, other.solution.bound))


def sensitivity_parts(found: Iterable[Sensitivity]) -> Iterator[Part]:
    """The table, and a sentence on how far the choice can be trusted."""
    table = grid("if", "this plan ms", "best ms", "lost", "at most", right=(1, 2, 3, 4))
    most, proven = 0.0, True
    for one in found:
        most, proven = max(most, one.lost_at_most), proven and one.bound is not None
        often = "faster" if one.speed > 1 else "slower"
        times = milliseconds(one.step_time), milliseconds(one.best)
        at_most = "-" if one.bound is None else f"{one.lost_at_most:.1%}"
        table.add_row(f"{one.what} are {abs(one.speed - 1):.0%} {often}", *times, f"{one.lost:.1%}", at_most)
    yield table
    said = f"{most:.1%} of the step at most" if proven else f"{most:.1%} of the step, as far as is known"
    yield f"prices that are wrong by {ERROR:.0%} cost this plan {said}; best: planned at those prices"


__all__ = ["ERROR", "Sensitivity", "sensitivity", "sensitivity_parts"]
