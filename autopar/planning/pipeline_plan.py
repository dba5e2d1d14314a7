"""Makes plans with a pipeline: cuts the program, plans each stage on the mesh without the pipeline's axis, times the step.

micro-batches -> cut -> stages planned, one after the other (`stage_plans`) -> exact clock, memory of every rank -> plan

The clock's order of actions determines exactly what each rank holds (`memory.rank_memory`): several stages peak at different
actions, so they hold less than the sum of their peaks; messages count too. If a rank exceeds its limit, its stages are planned
again with that much less room for their peaks. Split backwards run W where ranks would wait (`pipeline.weight_gradients`),
unless a rank lacks the memory.

Anything left open (size of the axis, number of micro-batches, schedule) is searched by `pipeline_search`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.errors import BudgetError
from autopar.ir.device import Bytes, Link, Seconds
from autopar.ir.mesh import Mesh
from autopar.ir.program import elements
from autopar.memory.rank_memory import rank_peaks
from autopar.passes.stages import shared_parameters
from autopar.pipeline.clock import StageSeconds, clock_of, least_seconds
from autopar.pipeline.transfers import with_messages as in_order
from autopar.plan.assignment_text import paddings
from autopar.plan.breakdown import CostParameter
from autopar.plan.options import Options
from autopar.plan.pipeline import Crossing, Pipeline
from autopar.plan.plan import Plan
from autopar.plan.stages import StageSteps, crossing_values
from autopar.plan.text import size_text
from autopar.planning.no_plan import SMALLEST
from autopar.planning.pipeline_bound import least_step
from autopar.planning.pipeline_stages import Cut, without_axis
from autopar.planning.stage_plans import StageBudgetError, StagePlan, StagePlanner
from autopar.solver.highs import SlowerError, TimeLimitError

ROUNDS = 5  # in which the stages of ranks that hold too much are planned with less room for their own peaks


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StagedStep:
    """A step with planned stages: what crosses between them, and its time by the exact clock.

    `mesh` has the pipeline's `axis`, device and links. `memory` is the peak of each rank; it is not counted if the step was no
    faster than a known one.
    """

    steps: StageSteps
    mesh: Mesh
    axis: str
    cut: Cut
    stages: tuple[StagePlan, ...]
    crossings: tuple[Crossing, ...]
    stage_seconds: tuple[StageSeconds, ...]
    seconds: Seconds
    memory: tuple[Bytes, ...] = ()


class SlowerStagesError(SlowerError):
    """The planned stages alone need so many `seconds`, so the step is no faster than a known one."""

    def __init__(self, seconds: Seconds) -> None:
        super().__init__("a step in these stages is no faster than one that is known")
        self.seconds = seconds


def staged(steps: StageSteps, mesh: Mesh, axis: str, cut: Cut, planner: StagePlanner, below: Seconds = math.inf) -> StagedStep:
    """The step of these stages; if they hold too much, of those whose messages go over one axis each, which hold less.

    Raises BudgetError if a stage, or a rank with all its stages, does not fit, SlowerStagesError as soon as planned stages show
    that the step takes `below` seconds or longer, and TimeLimitError between two stages at the deadline if a step of `below` is
    known.
    """
    rooms, floors, full = list[Bytes](), dict[int, Bytes](), 0
    alone: tuple[StagePlan, ...] = ()
    refused: BudgetError | None = None
    while full < ROUNDS:
        stages = planner.within(steps, cut, alone, rooms=rooms, floors=floors) if alone else planner.alone(steps, cut)
        try:
            made = _timed(steps, mesh, axis, cut, tuple(_faster(stages, cut, planner, below, alone)))
        except StageBudgetError as error:
            refused = error
            if planner.mesh.flattened:
                return staged(steps, mesh, axis, cut, planner.over_single_axes(), below)
            if error.never or error.stage in floors or len(cut.starts) == len(cut.schedule.ranks):
                break
            floors[error.stage] = error.least
        else:
            alone = alone or made.stages
            for one in _orders(made, cut):
                if one.seconds >= below:
                    return one
                memory = rank_memory(one, planner)
                if max(memory) <= planner.limit:
                    return replace(one, memory=memory)
            if planner.mesh.flattened:
                return staged(steps, mesh, axis, cut, planner.over_single_axes(), below)
            refused, rooms = _too_full(one, memory, planner.limit), _rooms(one, memory, planner.limit, rooms)
            full += 1
    assert refused is not None, "a round that ends refuses its plan"
    raise refused


def _orders(made: StagedStep, cut: Cut) -> Iterator[StagedStep]:
    """The step as it is, and with the unmodified schedule of its cut if that differs: delayed W may hold more."""
    yield made
    if made.cut.schedule != cut.schedule:
        yield replace(made, cut=cut, seconds=clock_of(cut.schedule).seconds(made.stage_seconds))


def _rooms(made: StagedStep, memory: Sequence[Bytes], limit: Bytes, before: Sequence[Bytes]) -> list[Bytes]:
    """The room for the sum of each rank's stage peaks such that it holds about its limit, and no more than before."""
    peaks = [0] * len(memory)
    for stage, rank in made.cut.schedule.rank_of.items():
        peaks[rank] += made.stages[stage].need.peak
    fitting = [math.floor(limit * peak / held) for peak, held in zip(peaks, memory, strict=True)]
    return [min(both) for both in zip(before, fitting, strict=True)] if before else fitting


def _too_full(made: StagedStep, memory: Sequence[Bytes], limit: Bytes) -> BudgetError:
    rank = memory.index(max(memory))
    return BudgetError(
        f"no plan was found in which rank {rank} of the pipeline holds at most {size_text(limit)}: one holds "
        f"{size_text(memory[rank])}, of {made.cut.name}",
        **{SMALLEST: f"budget={memory[rank]}"},
        fix="more micro-batches of fewer samples, more stages, 1f1b in the place of gpipe, or a larger budget",
    )


def _timed(steps: StageSteps, mesh: Mesh, axis: str, cut: Cut, stages: tuple[StagePlan, ...]) -> StagedStep:
    """The step of planned stages, with messages."""
    sent = [(one.step.program, one.outputs) for one in stages]
    crossings = tuple(crossing_values(steps.step.program, sent, without_axis(mesh, axis)))
    takes = with_messages([one.seconds for one in stages], crossings, mesh.links[mesh.axes.index(axis)])
    ran, seconds = cut.waits_filled(takes)
    return StagedStep(
        steps=steps, mesh=mesh, axis=axis, cut=ran, stages=stages, crossings=crossings, stage_seconds=takes, seconds=seconds
    )  # fmt: skip


def guessed(first: StagePlan, shares: Sequence[float]) -> list[StageSeconds]:
    """The stages' seconds if each holds one micro-batch at a time, without messages: the first one planned, the others scaled
    by their `shares` of the program at rough prices.
    """
    return [first.seconds.times(share / shares[0]) for share in shares]


def hoped(steps: StageSteps, cut: Cut, planner: StagePlanner) -> list[StageSeconds]:
    """The stages' seconds if each holds one micro-batch at a time, without messages: hardly less than with all of them.

    Raises BudgetError if one of them does not fit.
    """
    return [stage.seconds for stage in planner.alone(steps, cut)]


def no_faster(cut: Cut, known: Sequence[StagedStep], below: Seconds, *, even: bool) -> bool:
    """Whether known stages take `below` seconds or longer under a cut's schedule: the same stages, or parts of them, several
    per rank, without any bubble, and with `even` all equally large.
    """
    schedule = cut.schedule
    if same := [one.stage_seconds for one in known if one.cut.starts == cut.starts]:
        return all(cut.waits_filled(stages)[1] >= below for stages in same)
    first = next((one.stage_seconds for one in known if len(one.stages) == len(schedule.ranks)), ())
    chunks = schedule.stages // len(schedule.ranks)
    if not first or chunks == 1:
        return False
    if sum(schedule.microbatches * one.busy + one.once for one in first) / len(first) >= below:
        return True
    ends = {"activations": first[0].activations, "gradients": first[-1].gradients}
    parts = [replace(first[stage // chunks].times(1 / chunks), **ends) for stage in range(schedule.stages)]
    return even and cut.waits_filled(parts)[1] >= below


def _faster(
    stages: Iterable[StagePlan], cut: Cut, planner: StagePlanner, below: Seconds, alone: Sequence[StagePlan]
) -> Iterator[StagePlan]:
    """The stages in order, until they take too long or the deadline comes; stages not planned yet take at least their seconds
    `alone`, if known.
    """
    known = list[StageSeconds]()
    clock = clock_of(cut.waits_filled([one.seconds for one in alone])[0].schedule) if alone else None
    for stage in stages:
        if below < math.inf and planner.settings.deadline.passed:
            raise TimeLimitError(planner.settings.deadline)
        known.append(stage.seconds)
        others = [one.seconds for one in alone[len(known) :]]
        least = clock.seconds([*known, *others]) if clock else least_seconds(cut.schedule, known)
        if least >= below:
            raise SlowerStagesError(least)
        yield stage


def written(made: StagedStep, planner: StagePlanner, options: Options, searched: str) -> Plan:
    """The plan of a step in stages: its time by the clock, the memory of the fullest rank, and the gap to the bound."""
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
        memory=made.memory,
        tied=shared_parameters(made.steps.stages),
    )
    stages = tuple(planner.written(one) for one in made.stages)
    known = made.stage_seconds
    bound = least_step(step, planner.mesh, link, cut.schedule, known, planner.options, planner.settings)
    slowest = max(stages, key=lambda one: one.step_time)
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
        peak_memory=max(pipeline.memory),
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


def rank_memory(made: StagedStep, planner: StagePlanner) -> tuple[Bytes, ...]:
    """The peak bytes of each rank of the axis in a step of these stages."""
    step, stages = made.steps.step, [stage.held for stage in made.stages]
    batch = {
        value.name: elements(step.batch_shape(value.name)) * value.dtype.itemsize
        for value in step.program.inputs
        if value not in step.hoisted
    }
    assert planner.mesh.device is not None, "a mesh is planned with its device"
    scratch = functools.partial(planner.options.stepped.scratch, cpu=planner.mesh.device.cpu)
    return rank_peaks(in_order(made.cut.schedule, made.stage_seconds), stages, batch, scratch)


def with_messages(stages: Sequence[StageSeconds], crossings: Sequence[Crossing], link: Link) -> tuple[StageSeconds, ...]:
    """The seconds of stages and of their messages: one per value, over the link of the pipeline's axis."""

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
