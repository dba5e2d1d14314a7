"""What a training step takes: the events of a schedule, each with its seconds, and their sum.

This is the one place where a step's seconds are added up. The objective of the integer program is its linear bound, which may
miss a few latencies of messages that it takes for shared. `plan.step_time` is this sum, and a plan's cost breakdown groups the
same events by what they are.

Two seams for what is not modelled yet:

- overlap: nothing runs beside anything else here. An overlapping model replaces the sum in `step_time` by a maximum per region
  (`t >= compute + exposed`, `t >= communication per link`); events carry the time at which the schedule has them, and
  collectives their message, which is what it needs;
- pipeline stages: a stage is a schedule of its own, on the mesh without the pipeline's axis. Its events are those of one stage;
  the longest path through the timetable of all stages takes the place of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autopar.analysis.analysis import Analysis
from autopar.formulation.prices import WHOLE_SUM, Prices, local_shapes, work
from autopar.formulation.step_collectives import Message, conversion_messages, input_messages, op_messages
from autopar.ir.conversion import COLLECTIVES, Conversion
from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import Bytes, Seconds
from autopar.ir.program import Op, elements
from autopar.memory.recompute_closure import reruns
from autopar.memory.schedule import ConversionEvent, Schedule
from autopar.search_space.assignment import RecomputeChoice, backward_conversions
from autopar.search_space.candidates import Candidate

EventKind = Literal["forward", "backward", "recompute", "collective", "conversion", "offload", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """Something that takes time on every rank, in all micro-batches together.

    `time` is the tick at which the schedule has it: that of the forward, or the mirror of it in the backward. `name` is an op,
    a value, or the optimizer.
    """

    time: int
    kind: EventKind
    name: str
    seconds: Seconds
    message: Message | None = None


class StepPrices:
    """Prices for the schedules of one analysed program; equal candidates of a class of ops are priced once."""

    def __init__(self, analysis: Analysis, prices: Prices) -> None:
        self.analysis, self.prices = analysis, prices
        self._ops: dict[tuple[str, Candidate], tuple[Seconds, Seconds]] = {}

    def op(self, op: Op, candidate: Candidate) -> tuple[Seconds, Seconds]:
        """Forward and backward seconds of an op under a candidate, in all micro-batches."""
        program, key = self.analysis.program, (self.analysis.classes.of[op.name], candidate)
        if key not in self._ops:
            shapes = local_shapes(op, candidate, program.values, self.prices.mesh.sizes)
            cost = self.prices.op(op, program.values)
            times = program.runs * work(self.analysis.fits[op.name], candidate, self.prices.mesh.sizes)
            self._ops[key] = times * cost.forward_seconds(*shapes), times * cost.backward_seconds(*shapes)
        return self._ops[key]

    def bytes_of(self, name: str, layout: Layout) -> Bytes:
        """The size of one rank's part of a value."""
        value = self.analysis.program.values[name]
        return elements(local_shape(value.shape, layout, self.prices.mesh.sizes)) * value.dtype.itemsize


def step_time(schedule: Schedule, prices: StepPrices) -> Seconds:
    """Seconds of one training step: forward, backward and optimizer, one event after the other."""
    return sum(event.seconds for event in step_events(schedule, prices))


def step_events(schedule: Schedule, prices: StepPrices) -> list[StepEvent]:
    """Everything that takes time in a step, in the order of the schedule."""
    chosen, analysis = schedule.chosen, prices.analysis
    times: dict[str | tuple[str, Conversion], int] = {}
    for time, event in schedule.events:
        times |= dict.fromkeys(event.steps, time) if isinstance(event, ConversionEvent) else {event.name: time}
    run = reruns(analysis, chosen)
    found = [*_ops(schedule, prices, run, times), *_ends(schedule, prices, run)]
    for name, steps in chosen.routes.items():
        for step in steps:
            time = times.get((name, step), 0)
            found += _conversion(schedule, prices, run, (name, step), time)
    sent: tuple[tuple[str | tuple[str, Conversion], Message], ...] = (
        *conversion_messages(analysis, chosen, prices.prices, run),
        *op_messages(analysis, chosen, prices.prices, run),
        *input_messages(analysis, chosen, prices.prices),
    )
    for at, message in sent:
        time = times.get(at, 0)
        when = time if message.where == "forward" else schedule.mirror(time)
        name = message.values[0]
        found.append(StepEvent(time=when, kind="collective", name=name, seconds=message.seconds, message=message))
    return sorted(found, key=lambda event: event.time)


def _ops(
    schedule: Schedule, prices: StepPrices, run: RecomputeChoice, times: dict[str | tuple[str, Conversion], int]
) -> Iterator[StepEvent]:
    """Forward, backward and recomputation of every op that takes time."""
    for op in prices.analysis.program.ops:
        there, back = prices.op(op, schedule.chosen.ops[op.name])
        if there or back:
            time = times.get(op.name, 0)
            yield StepEvent(time=time, kind="forward", name=op.name, seconds=there)
            yield StepEvent(time=schedule.mirror(time), kind="backward", name=op.name, seconds=back)
            if op.name in run.ops:
                yield StepEvent(time=schedule.mirror(time), kind="recompute", name=op.name, seconds=there)


def _conversion(
    schedule: Schedule, prices: StepPrices, run: RecomputeChoice, at: tuple[str, Conversion], time: int
) -> Iterator[StepEvent]:
    """The slices, pads and roundings of one step of a route, those of its gradient and of its recomputation."""
    (name, step), analysis = at, prices.analysis
    runs, dtype = analysis.program.runs, analysis.program.values[name].dtype
    wider = analysis.summed.get(name, dtype).itemsize // dtype.itemsize
    sides = [prices.bytes_of(name, layout) for layout in (step.source, step.target)]
    large, small = np.array([max(sides)]), np.array([min(sides)])
    back = step in backward_conversions(analysis, schedule.chosen, name)

    def event(when: int, seconds: Seconds) -> StepEvent:
        return StepEvent(time=when, kind="conversion", name=name, seconds=seconds)

    if wider > 1 and back and step.primitives[1] == WHOLE_SUM:
        yield event(schedule.mirror(time), float(prices.prices.rounding(large, wider)[0]))
    recompute = (name, step) in run.steps and name not in analysis.weights
    moments = [(time, step.primitives[0])]
    moments += [(schedule.mirror(time), step.primitives[1])] * back
    moments += [(schedule.mirror(time), step.primitives[0])] * recompute
    for when, primitive in moments:
        if primitive not in (*COLLECTIVES, "identity"):
            yield event(when, runs * float(prices.prices.primitive(primitive, large, small, step.axis)[0]))


def _ends(schedule: Schedule, prices: StepPrices, run: RecomputeChoice) -> Iterator[StepEvent]:
    """What inputs take on arrival, what is offloaded, and the optimizer's step."""
    program, chosen = prices.analysis.program, schedule.chosen
    for value in program.inputs:
        seconds = prices.prices.arrival(program, value, chosen.given[value.name])
        yield StepEvent(time=0, kind="conversion", name=value.name, seconds=seconds)
    for name, layout in sorted(run.offload, key=str):
        seconds = program.runs * prices.prices.offload(prices.bytes_of(name, layout))
        yield StepEvent(time=schedule.end, kind="offload", name=name, seconds=seconds)
    trained = (p.value for p in program.parameters if p.value.requires_grad)
    stored = sum(prices.bytes_of(value.name, chosen.given[value.name]) for value in trained)
    yield StepEvent(
        time=schedule.end,
        kind="optimizer",
        name=prices.prices.optimizer.name,
        seconds=prices.prices.optimizer_step(float(stored)),
    )


__all__ = ["StepEvent", "StepPrices", "step_events", "step_time"]
