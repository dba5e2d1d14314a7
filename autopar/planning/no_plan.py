"""Explains why there is no plan: constraints that leave none, or a budget that none fits."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from autopar.errors import BudgetError, ConstraintError
from autopar.formulation.budget_loop import smallest_of
from autopar.formulation.formulate import PlanningProblem
from autopar.formulation.memory_model import MemoryModel
from autopar.formulation.read_solution import assignment
from autopar.ir.device import Bytes
from autopar.ir.layout import D, H
from autopar.plan.options import AUTO, Options
from autopar.plan.text import size_text
from autopar.solver.feasibility import first_impossible
from autopar.solver.highs import SolverError
from autopar.solver.problem import Solution
from autopar.solver.settings import SearchSettings

SMALLEST = "smallest"  # what a BudgetError calls the smallest budget that works
PLACES = {H: "host", D: "disk"}


class UnfitError(BudgetError):
    """No plan fits, before anybody asked how much memory is needed: to find that takes as long as several plans.

    Args:
        models: what was searched, the one that may need least memory last.
        limit: bytes per device.
        options, settings: as they were searched.
    """

    def __init__(self, models: Sequence[MemoryModel], limit: Bytes, options: Options, settings: SearchSettings) -> None:
        super().__init__(f"no plan fits into {size_text(limit)} per device")
        self.models, self.limit, self.options, self.settings = tuple(models), limit, options, settings

    @staticmethod
    def joined(errors: Sequence[UnfitError]) -> UnfitError:
        """The error of several searches, which differ in their padding, mesh or number of micro-batches."""
        last = errors[-1]
        return UnfitError([model for one in errors for model in one.models], last.limit, last.options, last.settings)

    @functools.cached_property
    def explained(self) -> BudgetError:
        """The error that names the smallest budget that works."""
        found = smallest_of(reversed(self.models), self.settings)
        assert found is not None, "what does not fit is a solution"
        return _unfit(*found, self.limit, self.options)


class NoWayError(ConstraintError):
    """There is no plan in whatever memory, before anybody asked which operator is in the way.

    Args:
        formulated: what was searched.
        options, settings: as it was searched.
    """

    def __init__(self, formulated: PlanningProblem, options: Options, settings: SearchSettings) -> None:
        more, drop = (" and the constraints", "drop a constraint, or use ") if options.constraints else ("", "")
        what = f"the strategy {options.strategy!r}{more} leave{'' if more else 's'} no way to run the model"
        super().__init__(what, constraints=options.text()["constraints"], fix=f"{drop}strategy='auto'")
        self.formulated, self.settings = formulated, settings

    @functools.cached_property
    def explained(self) -> ConstraintError:
        """The error that names the first operator, or value, for which what comes before leaves no way."""
        try:
            name = self.formulated.names[first_impossible(self.formulated.problem, self.settings)]
        except SolverError:
            return self
        op = self.formulated.program.op.get(name)
        where = {"operator": name, "at": op.source} if op else {"value": name}
        return ConstraintError(self.what, **where, **self.details)


def explained(error: BudgetError) -> BudgetError:
    """An error as the user sees it: with the smallest budget that works."""
    return error.explained if isinstance(error, UnfitError) else error


@contextmanager
def explaining() -> Iterator[None]:
    """Raise every `UnfitError` and `NoWayError` explained."""
    try:
        yield
    except (UnfitError, NoWayError) as error:
        raise error.explained from None


def _unfit(memory_model: MemoryModel, least: Solution, limit: Bytes, options: Options) -> BudgetError:
    """The error if the solution of least memory does not fit."""
    formulated = memory_model.formulated
    alive, runs = memory_model.walk(least), formulated.analysis.step.microbatches
    peak, full = math.ceil(alive.max()), memory_model.held(assignment(formulated, least), int(alive.argmax()))[:5]
    larger = "a budget above 90% of the device" if options.budget is None else "a larger budget"
    more = "" if options.microbatches == AUTO else f"microbatches={AUTO!r}, "
    return BudgetError(
        f"no plan fits into {size_text(limit)} per device; the smallest budget that works is {size_text(peak)}",
        strategy=options.strategy,
        microbatches=runs if runs > 1 else "",
        **{SMALLEST: f"budget={peak}"},
        **{PLACES[there]: f"stores at most {size_text(size)} for each device" for there, size in memory_model.limits.items()},
        filled="; ".join(f"{size_text(held.bytes)} {held}" for held in full),
        fix=f"more devices, {more}a smaller batch, a narrower dtype, or {larger}",
    )


__all__ = ["PLACES", "SMALLEST", "NoWayError", "UnfitError", "explained", "explaining"]
