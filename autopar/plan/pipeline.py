"""The pipeline of a plan: where the program is cut into stages, the schedule that they run by, and what crosses the cuts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.device import Bytes
from autopar.ir.training_step import StageMoment
from autopar.pipeline.clock import Clock, PipelineTimeline, StageSeconds
from autopar.pipeline.schedule import ActionKind, PipelineSchedule, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that `stage` sends to the next one for every micro-batch, in this layout; `bytes` from each rank.

    Its gradient, if it has one, comes back with as many bytes.
    """

    value: str
    stage: int
    layout: str
    bytes: Bytes
    gradient: bool


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The stages of a plan over the mesh axis `axis`, with the named schedule: a line of actions per rank of the axis.

    Stage s begins at op `starts[s]` of the program, in the module `modules[s]`, and takes `seconds[s]`. Parameters that several
    stages read are `tied`: each of these stages stores them, in the same layout. `memory` is the peak of each rank of the axis,
    which is less than the sum of its stages' own peaks.
    """

    axis: str
    schedule: str
    ranks: tuple[str, ...]
    starts: tuple[int, ...]
    modules: tuple[str, ...]
    seconds: tuple[StageSeconds, ...]
    crossings: tuple[Crossing, ...]
    memory: tuple[Bytes, ...]
    tied: Mapping[str, tuple[int, ...]]

    @functools.cached_property
    def order(self) -> PipelineSchedule:
        """The schedule. Raises ConstraintError for lines that are not one."""
        return parse("\n".join(self.ranks))

    @functools.cached_property
    def timeline(self) -> PipelineTimeline:
        """The timeline of the step, by the exact clock."""
        return Clock(self.order).run(self.seconds)

    def in_flight(self, stage: int) -> int:
        """The most micro-batches between their forward and their backward in a stage."""
        return in_flight(self.order, stage)

    def title(self, stage: int) -> str:
        """A stage in words."""
        rank = self.order.rank_of[stage]
        return f"stage {stage}, {self.axis}={rank}, from {self.modules[stage] or 'the beginning of the model'}"


def in_flight(order: PipelineSchedule, stage: int) -> int:
    """The most micro-batches between their forward and their backward in one stage of a schedule."""
    return max(moment.flights for moment in moments(order, stage))


def moments(order: PipelineSchedule, stage: int) -> Iterator[StageMoment]:
    """What a stage holds during each of its actions."""
    flights = waiting = 0
    for action in order.ranks[order.rank_of[stage]]:
        if action.stage == stage:
            halves = action.kind == ActionKind.BACKWARD_INPUT
            flights += action.kind == ActionKind.FORWARD
            yield StageMoment(flights=flights, waiting=waiting, halves=halves)
            flights -= halves or action.kind == ActionKind.BACKWARD
            waiting += halves - (action.kind == ActionKind.BACKWARD_WEIGHT)
