"""Explains why there is no plan: constraints that leave none, or a budget that none fits."""

from __future__ import annotations

import math

from autopar.errors import AutoparError, BudgetError, ConstraintError
from autopar.formulation.memory_model import MemoryModel
from autopar.formulation.read_solution import assignment
from autopar.ir.device import Bytes
from autopar.ir.layout import D, H
from autopar.plan.options import AUTO, Options
from autopar.plan.text import size_text
from autopar.solver.problem import Solution

SMALLEST = "smallest"  # what a BudgetError calls the smallest budget that works
PLACES = {H: "host", D: "disk"}


def impossible(found: tuple[MemoryModel, Solution] | None, limit: Bytes, options: Options) -> AutoparError:
    """The error if there is no plan: the constraints leave none, or none fits; with the least memory found."""
    if found is None:
        and_constraints, drop = (" and the constraints", "drop a constraint, or use ") if options.constraints else ("", "")
        return ConstraintError(
            f"the strategy {options.strategy!r}{and_constraints} leave{'' if and_constraints else 's'} no way to run the model",
            constraints=options.text()["constraints"],
            fix=f"{drop}strategy='auto'",
        )
    memory_model, least = found
    formulated = memory_model.formulated
    alive, runs = memory_model.walk(least), formulated.analysis.step.microbatches
    peak, full = math.ceil(alive.max()), memory_model.held(assignment(formulated, least), int(alive.argmax()))[:5]
    more = "" if options.microbatches == AUTO else f"microbatches={AUTO!r}, "
    return BudgetError(
        f"no plan fits into {size_text(limit)} per device; the smallest budget that works is {size_text(peak)}",
        strategy=options.strategy,
        microbatches=runs if runs > 1 else "",
        **{SMALLEST: f"budget={peak}"},
        **{PLACES[there]: f"stores at most {size_text(size)} for each device" for there, size in memory_model.limits.items()},
        filled="; ".join(f"{size_text(held.bytes)} {held}" for held in full),
        fix=f"more devices, {more}a smaller batch, a narrower dtype, or a budget above 90% of the device",
    )


__all__ = ["PLACES", "SMALLEST", "impossible"]
