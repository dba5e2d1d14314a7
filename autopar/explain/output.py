"""Answers of the commands, printed for people or as data for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from autopar.explain.budget_sweep import SweepStep, budget_sweep, improved, sweep_parts
from autopar.explain.comparison import Compared
from autopar.explain.difference import Difference
from autopar.explain.energy import energy_data, energy_of, energy_parts
from autopar.explain.explanation import Explanation
from autopar.explain.headline import headline, waste
from autopar.explain.report import report
from autopar.explain.scaling import ScalingStep, scaling_data, scaling_parts
from autopar.explain.sensitivity import sensitivity_parts
from autopar.explain.staged import StagedExplanation, staged_why_parts
from autopar.explain.staged_prices import staged_budget_sweep, staged_sensitivity
from autopar.explain.why import why_parts
from autopar.explain.whynot import WhyNot, why_not_parts
from autopar.ir.device import Seconds
from autopar.plan.plan import Plan
from autopar.plan.text import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Rows that are planned on demand, for printing or as data."""

    parts: Callable[[], Iterator[Part]]
    data: Callable[[], Mapping[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """Lines and tables for people, data for programs; slow answers come as a stream, row by row."""

    sections: tuple[tuple[Part, ...], ...] = ()
    data: Mapping[str, object] = field(default_factory=dict)
    stream: Stream | None = None

    def parts(self) -> Iterator[Part]:
        """What is printed: the sections, then the stream."""
        last = () if self.stream is None else (self.stream.parts(),)
        for number, section in enumerate((*self.sections, *last)):
            yield from ("",) * (number > 0)
            yield from section

    @property
    def json(self) -> str:
        """The data as one JSON object."""
        return json.dumps({**self.data, **(self.stream.data() if self.stream else {})}, indent=1)


def of_plan(plan: Plan) -> CommandOutput:
    """The output for a plan alone."""
    return CommandOutput(sections=(tuple(report(plan)),), data={"plan": _plan(plan)})


def of_energy(plan: Plan, epoch: int | None) -> CommandOutput:
    """The output for a step's energy and data movement."""
    use = energy_of(plan)
    return CommandOutput(sections=(tuple(energy_parts(use, epoch)),), data={"energy": energy_data(use, epoch)})


def of_page(plan: Plan, path: str) -> CommandOutput:
    """The output for a plan whose report is a page."""
    return CommandOutput(sections=((headline(plan), *waste(plan), f"the report is in {path}"),), data={"plan": _plan(plan)})


def of_difference(found: Difference) -> CommandOutput:
    """The output for two plans that are compared."""
    return CommandOutput(sections=(tuple(found.lines()),), data={"difference": list(found.lines())})


def of_model(
    found: Explanation,
    why: Sequence[str],
    why_not: Mapping[str, str],
    *,
    code: bool,
    sweep: bool = False,
    sensitivity: bool = False,
) -> CommandOutput:
    """The answers to the questions about a model: the report if there are none. The data always hold the plan."""
    sections: list[tuple[Part, ...]] = []
    data: dict[str, object] = {"plan": _plan(found.plan), "phases": dict(found.planned.phases)}
    if not (why or why_not or code or sweep or sensitivity):
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
    if sensitivity:
        sections.append(tuple(sensitivity_parts(found.sensitivity)))
        data["sensitivity"] = [asdict(one) for one in found.sensitivity]
    if code:
        sections.append(tuple(found.code.rstrip().split("\n")))
        data["code"] = found.code
    stream = _sweep(budget_sweep(found.planned, found.options)) if sweep else None
    return CommandOutput(sections=tuple(sections), data=data, stream=stream)


def of_scaling(
    steps: Iterable[ScalingStep], within: Seconds | None, price: float | None, objective: str | None = None
) -> CommandOutput:
    """How a model scales over numbers of devices; see `scaling.scaling_parts`."""
    return CommandOutput(
        stream=Stream(
            parts=lambda: scaling_parts(steps, within, price, objective),
            data=lambda: scaling_data(steps, within, objective),
        )
    )


def _sweep(steps: Iterable[SweepStep]) -> Stream:
    return Stream(
        parts=lambda: sweep_parts(steps), data=lambda: {"budget_sweep": [asdict(step) for step in improved([*steps])]}
    )


def of_stages(
    found: StagedExplanation,
    why: Sequence[str],
    why_not: Mapping[str, str],
    *,
    code: bool,
    sweep: bool = False,
    sensitivity: bool = False,
) -> CommandOutput:
    """The answers to the questions about a model in stages: the report if there are none."""
    sections: list[tuple[Part, ...]] = []
    data: dict[str, object] = {"plan": _plan(found.plan)}
    if not (why or why_not or code or sweep or sensitivity):
        sections.append(tuple(found.parts()))
    if why:
        answers = [answer for name in why for answer in found.why(name)]
        sections.append(tuple(staged_why_parts(found, answers)))
        data["why"] = [{"stage": stage, **asdict(answer)} for stage, answer in answers]
    if why_not:
        other = found.why_not(why_not)
        sections.append(tuple(why_not_parts(found.plan, other)))
        data["why_not"] = _why_not(other)
    if sensitivity:
        rows = [*staged_sensitivity(found)]
        sections.append(tuple(sensitivity_parts(rows)))
        data["sensitivity"] = [asdict(one) for one in rows]
    if code:
        sections.append(tuple(found.code.rstrip().split("\n")))
        data["code"] = found.code
    stream = _sweep(staged_budget_sweep(found)) if sweep else None
    return CommandOutput(sections=tuple(sections), data=data, stream=stream)


def _plan(plan: Plan) -> object:
    return json.loads(plan.to_json())


def _strategy(entry: Compared) -> dict[str, object]:
    return {"strategy": entry.strategy, "plan": entry.plan and _plan(entry.plan), "refusal": entry.refusal}


def _why_not(other: WhyNot) -> dict[str, object]:
    return {"forced": dict(other.forced), "plan": other.plan and _plan(other.plan), "refusal": str(other.error or "")}
