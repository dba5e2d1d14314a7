"""Two programs over one set of stored tensors, such as the prefill and the decode of a language model.

Each is planned freely, and gives the other one the layouts of what it stores; of the two pairs that come of it the faster one
counts. It need not be the best of all pairs, in which neither has the layouts that are best for it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from glob import escape

from autopar.errors import BudgetError, ConstraintError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.planning.planner import plan_program, stored_layouts


def plan_both(programs: Sequence[Program], runs: Sequence[int], mesh: Mesh, options: Options) -> list[Plan]:
    """A plan for each of two programs that use the same parameters and buffers, which are stored once.

    Args:
        programs: what is planned.
        runs: how often each of them runs, by which their times are weighed.
        mesh: the mesh with its device and links.
        options: those of both.

    Raises:
        AutoparError: what planning them raises.
    """
    pairs, refusals = [], []
    for first in range(len(programs)):
        try:
            pairs.append(_pair(programs, first, mesh, options))
        except (BudgetError, ConstraintError) as refusal:
            refusals.append(refusal)
    if not pairs:
        raise refusals[0]
    return min(pairs, key=lambda plans: sum(times * plan.step_time for times, plan in zip(runs, plans, strict=True)))


def _pair(programs: Sequence[Program], first: int, mesh: Mesh, options: Options) -> list[Plan]:
    """The plans where the program at the place `first` is planned freely."""
    found = {first: plan_program(programs[first], mesh, options)}
    for place in range(len(programs)):
        if place != first:
            found[place] = plan_program(programs[place], mesh, stored_as(found[first], programs[place], options))
    return [found[place] for place in range(len(programs))]


def stored_as(plan: Plan, program: Program, options: Options) -> Options:
    """The options with the layouts in which a plan stores what another program uses too."""
    layouts = {escape(name): layout for name, layout in stored_layouts(plan, program).items()}
    return replace(options, constraints={**options.constraints, **layouts})


__all__ = ["plan_both", "stored_as"]
