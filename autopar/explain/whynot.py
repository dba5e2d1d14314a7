"""Answers "why not another layout?": plans again with the layout forced, and tells what changes and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.errors import AutoparError, ConstraintError
from autopar.explain.difference import difference
from autopar.formulation.read_solution import assignment
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.text import Part, milliseconds
from autopar.planning.planner import Planned, plan_program
from autopar.search_space.constraints import constrained
from autopar.search_space.strategies import StrategyConstraints


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """The forced layouts and the plan with them, or the error that says why there is none."""

    forced: Mapping[str, str]
    plan: Plan | None
    error: AutoparError | None = None


def why_not(planned: Planned, options: Options, forced: Mapping[str, str]) -> WhyNot:
    """The best plan that meets these additional constraints: the same one if it already does.

    Raises ConstraintError for a name that matches nothing, and for a layout that does not fit its tensor.
    """
    formulated = planned.solved.formulated
    step, mesh = formulated.analysis.step, formulated.mesh
    chosen = assignment(formulated, planned.solved.solution)
    both = replace(options, constraints={**options.constraints, **forced})
    unread: ConstraintError | None = None
    try:
        patterns = StrategyConstraints(patterns=constrained(step, mesh, forced))
    except ConstraintError as error:  # perhaps it can be met with padding
        unread = error
    else:
        if all(patterns.allows_layout(name, chosen.produced(name, step.program)) for name in patterns.patterns):
            return WhyNot(forced=forced, plan=planned.plan)
    try:
        return WhyNot(forced=forced, plan=plan_program(planned.captured.program, mesh, both))
    except AutoparError as error:
        if unread and isinstance(error, ConstraintError):
            raise unread from None
        return WhyNot(forced=forced, plan=None, error=error)


def why_not_parts(plan: Plan, other: WhyNot) -> Iterator[Part]:
    """The printed answer: what it costs, and what changes."""
    forced = "; ".join(f"{name} = {layout!r}" for name, layout in other.forced.items())
    if other.plan is None:
        yield f"there is no plan with {forced}"
        yield from f"{type(other.error).__name__}: {other.error}".split("\n")
        return
    if other.plan == plan:
        yield f"nothing changes with {forced}: the plan has this layout already"
        return
    more = other.plan.step_time - plan.step_time
    share = f"{more / plan.step_time:+.1%}" if plan.step_time else ""
    step, by = milliseconds(other.plan.step_time), "slower" if more >= 0 else "faster"
    yield f"the best plan with {forced} takes {step} ms per step, {by} by {milliseconds(abs(more))} ms ({share})"
    yield "compared with the plan without it:"
    yield from difference(plan, replace(other.plan, options=plan.options)).lines()
