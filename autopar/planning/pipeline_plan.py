"""Plans with a pipeline: the program is cut, each stage planned on the mesh without the pipeline's axis, the step timed.

micro-batches -> cut -> stages planned, one after the other (`stage_plans`) -> exact clock -> plan

What is left to be chosen (the size of the axis, how many micro-batches, by which schedule) `pipeline_search` searches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.ir.mesh import Bytes, Link, Mesh, Seconds
from autopar.passes.stages import shared_parameters
from autopar.pipeline.clock import Clock, StageSeconds, least_seconds
from autopar.plan.assignment_text import paddings
from autopar.plan.breakdown import CostParameter
from autopar.plan.options import Options
from autopar.plan.pipeline import Crossing, Pipeline
from autopar.plan.plan import Plan
from autopar.plan.stages import StageSteps, crossing_values
from autopar.planning.pipeline_bound import least_step
from autopar.planning.pipeline_stages import Cut, without_axis
from autopar.planning.stage_plans import StagePlan, StagePlanner
from autopar.solver.highs import SlowerError, TimeLimitError


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StagedStep:
    """A step whose stages are planned: what crosses between them, and how long it takes by the exact clock.

    `mesh` has the pipeline's `axis`, device and links.
    """

    steps: StageSteps
    mesh: Mesh
    axis: str
    cut: Cut
    stages: tuple[StagePlan, ...]
    crossings: tuple[Crossing, ...]
    stage_seconds: tuple[StageSeconds, ...]
    seconds: Seconds


class SlowerStagesError(SlowerError):
    """The stages that were planned take so many `seconds`, whatever the others take: the step is no faster than a known one."""

    def __init__(self, seconds: Seconds) -> None:
        super().__init__("a step in these stages is no faster than one that is known")
        self.seconds = seconds


def staged(steps: StageSteps, mesh: Mesh, axis: str, cut: Cut, planner: StagePlanner, below: Seconds = math.inf) -> StagedStep:
    """The step of these stages.

    Raises BudgetError where one of them does not fit, and SlowerStagesError as soon as those that are planned say that the step
    takes `below` seconds or longer; TimeLimitError between two stages at the deadline, where a step of `below` is known.
    """
    stages = tuple(_planned(steps, cut, planner, below))
    sent = [(one.step.program, one.outputs) for one in stages]
    crossings = tuple(crossing_values(steps.step.program, sent, without_axis(mesh, axis)))
    seconds = with_messages([one.seconds for one in stages], crossings, mesh.links[mesh.axes.index(axis)])
    return StagedStep(
        steps=steps,
        mesh=mesh,
        axis=axis,
        cut=cut,
        stages=stages,
        crossings=crossings,
        stage_seconds=seconds,
        seconds=Clock(cut.schedule).seconds(seconds),
    )


def guessed(steps: StageSteps, cut: Cut, shares: Sequence[float], planner: StagePlanner) -> list[StageSeconds]:
    """What stages take if each holds one micro-batch at a time, without messages: the first one as it is planned, the others as
    their `shares` of the program by rough prices say."""
    first = next(planner.planned(steps, cut, alone=True)).seconds
    return [first.times(share / shares[0]) for share in shares]


def hoped(steps: StageSteps, cut: Cut, planner: StagePlanner) -> list[StageSeconds]:
    """What stages take if each holds one micro-batch at a time, without messages: hardly less than with all of them.

    Raises BudgetError where one of them does not fit.
    """
    return [stage.seconds for stage in planner.planned(steps, cut, alone=True)]


def no_faster(cut: Cut, known: Sequence[StagedStep], below: Seconds, *, even: bool) -> bool:
    """Whether stages as they are known take `below` seconds or longer by the schedule of a cut: the same ones, or parts of them
    of which a rank has several, without any bubble, and, if parts are `even`, each as large as the others."""
    schedule = cut.schedule
    for one in known:
        if one.cut.starts == cut.starts:
            return Clock(schedule).seconds(one.stage_seconds) >= below
    if not known or schedule.stages == len(schedule.ranks):
        return False
    first, chunks = known[0].stage_seconds, schedule.stages // len(schedule.ranks)
    if sum(schedule.microbatches * one.busy + one.once for one in first) / len(first) >= below:
        return True
    ends = {"activations": first[0].activations, "gradients": first[-1].gradients}
    parts = [replace(first[stage // chunks].times(1 / chunks), **ends) for stage in range(schedule.stages)]
    return even and Clock(schedule).seconds(parts) >= below


def _planned(steps: StageSteps, cut: Cut, planner: StagePlanner, below: Seconds) -> Iterator[StagePlan]:
    """The stages in order, until they take too long, or it takes too long to plan them."""
    known: list[StageSeconds] = []
    for stage in planner.planned(steps, cut):
        if below < math.inf and planner.settings.deadline.passed:
            raise TimeLimitError(planner.settings.deadline)
        known.append(stage.seconds)
        if (least := least_seconds(cut.schedule, known)) >= below:
            raise SlowerStagesError(least)
        yield stage


def written(made: StagedStep, planner: StagePlanner, options: Options, searched: str) -> Plan:
    """The plan of a step in stages: the time by the clock, the memory of the fullest rank, and its distance from the bound."""
    mesh, axis, cut = made.mesh, made.axis, made.cut
    link, step = mesh.links[mesh.axes.index(axis)], made.steps.step
    pipeline = Pipeline(
        axis=axis,
        schedule=cut.name,
        ranks=tuple(str(cut.schedule).splitlines()),
        starts=cut.starts,
        modules=cut.modules,
        seconds=made.stage_seconds,
        crossings=made.crossings,
        tied=shared_parameters(made.steps.stages),
    )
    stages = tuple(planner.written(one) for one in made.stages)
    bound = least_step(step, planner.mesh, cut.schedule, made.stage_seconds, planner.options, planner.settings)
    slowest = max(stages, key=lambda one: one.step_time)
    ranks: dict[int, Bytes] = {}
    for stage, rank in cut.schedule.rank_of.items():
        ranks[rank] = ranks.get(rank, 0) + stages[stage].peak_memory
    return Plan(
        hash=step.hash,
        axes=mesh.axes,
        sizes=mesh.sizes,
        links=tuple(link.name for link in mesh.links),
        device=mesh.device.name if mesh.device else "",
        options=options.text(),
        microbatches=step.microbatches,
        status="feasible",
        gap=max(0.0, 1 - bound / made.seconds) if made.seconds else 0.0,
        step_time=made.seconds,
        peak_memory=max(ranks.values()),
        choices={},
        layouts={},
        routes={},
        recompute={},
        padded=paddings(step),
        collectives=(),
        breakdown=replace(
            slowest.breakdown,
            cost_parameters=(
                CostParameter(of=axis, name="bandwidth", value=link.bandwidth, unit="B/s", source=link.source),
                CostParameter(of=axis, name="latency", value=link.latency, unit="s", source=link.source),
                *(parameter for parameter in slowest.breakdown.cost_parameters if parameter.of != axis),
            ),
            runs={},
            stored={},
        ),
        searched=searched,
        pipeline=pipeline,
        stages=stages,
    )


def with_messages(stages: Sequence[StageSeconds], crossings: Sequence[Crossing], link: Link) -> tuple[StageSeconds, ...]:
    """The seconds of stages with those of their messages: each value is one, over the link of the pipeline's axis."""

    def sent(chosen: Iterable[Crossing]) -> Seconds:
        return sum(link.send(crossing.bytes) for crossing in chosen)

    return tuple(
        replace(
            one,
            activations=sent(crossing for crossing in crossings if crossing.stage == place),
            gradients=sent(crossing for crossing in crossings if crossing.stage == place - 1 and crossing.gradient),
        )
        for place, one in enumerate(stages)
    )


__all__ = ["SlowerStagesError", "StagedStep", "guessed", "hoped", "no_faster", "staged", "with_messages", "written"]
