"""Two programs over one set of stored tensors, such as the prefill and the decode of a language model.

Each is planned freely in turn, and the other one in its stored layouts; the faster of the two pairs wins. This need not be the
best of all pairs, where neither may have its own best layouts.
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
    """Plan two programs that share parameters and buffers, which are stored once.

    Args:
        programs: the programs to plan.
        runs: how often each of them runs, as the weight of its time.
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
    """The plans if the program at index `first` is planned freely."""
    found = {first: plan_program(programs[first], mesh, options)}
    for place in range(len(programs)):
        if place != first:
            found[place] = plan_program(programs[place], mesh, stored_as(found[first], programs[place], options))
    return [found[place] for place in range(len(programs))]


def stored_as(plan: Plan, program: Program, options: Options) -> Options:
    """The options constrained to the layouts in which a plan stores shared tensors."""
    layouts = {escape(name): layout for name, layout in stored_layouts(plan, program).items()}
    return replace(options, constraints={**options.constraints, **layouts})


__all__ = ["plan_both", "stored_as"]
