"""Answers: what is printed, and the same as data for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from autopar.explain.budget_sweep import budget_sweep, sweep_parts
from autopar.explain.comparison import Compared
from autopar.explain.difference import Difference
from autopar.explain.explanation import Explanation
from autopar.explain.report import report
from autopar.explain.why import why_parts
from autopar.explain.whynot import WhyNot, why_not_parts
from autopar.plan.plan import Plan
from autopar.plan.text import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """Lines and tables for people, data for programs."""

    parts: tuple[Part, ...]
    data: Mapping[str, object]

    @property
    def json(self) -> str:
        """The data as one JSON object."""
        return json.dumps(self.data, indent=1)


def of_plan(plan: Plan) -> CommandOutput:
    """What a plan says by itself."""
    return CommandOutput(parts=tuple(report(plan)), data={"plan": _plan(plan)})


def of_difference(found: Difference) -> CommandOutput:
    """What differs between two plans."""
    return CommandOutput(parts=tuple(found.lines()), data={"difference": list(found.lines())})


def of_model(
    found: Explanation, why: Sequence[str], why_not: Mapping[str, str], *, code: bool, sweep: bool = False
) -> CommandOutput:
    """The answers to what was asked about a model: the report if nothing was. The data always hold the plan."""
    sections: list[tuple[Part, ...]] = []
    data: dict[str, object] = {"plan": _plan(found.plan), "phases": dict(found.planned.phases)}
    if not (why or why_not or code or sweep):
        data["strategies"] = [_strategy(entry) for entry in found.compared]
        sections.append(tuple(found.parts()))
    if why:
        answers = [answer for name in why for answer in found.why(name)]
        sections.append(tuple(why_parts(found.planned.solved, answers)))
        data["why"] = [asdict(answer) for answer in answers]
    if why_not:
        other = found.why_not(why_not)
        sections.append(tuple(why_not_parts(found.plan, other)))
        data["why_not"] = _why_not(other)
    if sweep:
        steps = budget_sweep(found.planned, found.options)
        sections.append(tuple(sweep_parts(steps)))
        data["budget_sweep"] = [asdict(step) for step in steps]
    if code:
        sections.append((found.code.rstrip(),))
        data["code"] = found.code
    parts = [part for section in sections for part in ("", *section)]
    return CommandOutput(parts=tuple(parts[1:]), data=data)


def _plan(plan: Plan) -> object:
    return json.loads(plan.to_json())


def _strategy(entry: Compared) -> dict[str, object]:
    return {"strategy": entry.strategy, "plan": entry.plan and _plan(entry.plan), "refusal": entry.refusal}


def _why_not(other: WhyNot) -> dict[str, object]:
    return {"forced": dict(other.forced), "plan": other.plan and _plan(other.plan), "refusal": str(other.error or "")}
