"""The time of a training step: the events of its schedule with their seconds, and how much of them is hidden.

This is the only place that adds up a step's seconds: the sum of all events, minus what messages gain by overlapping with
computing (`overlap` has the law). The objective of the integer program is its linear bound, which may miss a few latencies of
messages that it assumes to be shared. The result is `plan.step_time`, and a plan's cost breakdown groups the same events by
kind.

With a pipeline these are the events of one stage, on the mesh without the pipeline's axis: `planning.pipeline_plan` puts the
stages together by the exact clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np

from autopar.analysis.analysis import Analysis
from autopar.cost_models.compute import Pricer
from autopar.formulation.overlap import Overlap, Sent, StepPart
from autopar.formulation.prices import Prices, added_up, local_shapes, work
from autopar.formulation.step_collectives import Message, Phase, conversion_messages, input_messages, op_messages
from autopar.ir.conversion import CARRIED, scattered
from autopar.ir.device import Bytes, Seconds
from autopar.ir.layout import AWAY, I, Layout, place
from autopar.ir.program import Op
from autopar.memory.prefetch import Node
from autopar.memory.recompute_closure import reruns
from autopar.memory.schedule import Schedule, Step
from autopar.search_space.assignment import RecomputeChoice, backward_conversions
from autopar.search_space.buckets import TOGETHER
from autopar.search_space.candidates import Candidate

EventKind = Literal["forward", "backward", "recompute", "collective", "conversion", "offload", "optimizer"]
Source = str | Step | Node  # an op, an input or the optimizer; a conversion; an offloaded value


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """Something that takes time on every rank, in all micro-batches together.

    `time` is its tick in the schedule: that of the forward, or its mirror image in the backward. `of` is what it belongs to in
    this `phase`.
    """

    time: int
    kind: EventKind
    of: Source
    phase: Phase
    seconds: Seconds
    message: Message | None = None

    @property
    def name(self) -> str:
        """The op or the value, or the optimizer."""
        return self.of if isinstance(self.of, str) else self.of[0]


SENT: Mapping[Phase, Sent] = {"forward": "gather", "recompute": "regather", "backward": "reduce"}


class StepPrices:
    """Prices for the schedules of one analysed program; equal candidates of a class of ops are priced once."""

    def __init__(self, analysis: Analysis, prices: Prices) -> None:
        self.analysis, self.prices = analysis, prices
        self._ops: dict[tuple[str, Candidate, tuple[int, ...]], tuple[Seconds, Seconds]] = {}
        self._overlap: dict[bool, Overlap | None] = {}
        self.events: MutableMapping[Schedule, list[StepEvent]] = WeakKeyDictionary()  # of `step_events`

    def op(self, op: Op, candidate: Candidate) -> tuple[Seconds, Seconds]:
        """Forward and backward seconds of an op under a candidate, in all micro-batches."""
        program, key = self.analysis.program, (self.analysis.classes.of[op.name], candidate, op.summed)
        if key not in self._ops:
            shapes = local_shapes(op, candidate, program.values, self.prices.mesh.sizes)
            cost = self.prices.op(op, program.values)
            times = self.analysis.step.microbatches * work(self.analysis.fits[op.name], candidate, self.prices.mesh.sizes)
            self._ops[key] = times * cost.forward_seconds(*shapes), times * cost.backward_seconds(*shapes)
        return self._ops[key]

    def weight(self, op: Op, candidate: Candidate, name: str) -> Seconds:
        """Seconds of the gradient of one operand of a product, in all micro-batches.

        Half of the backward if the cost model does not separate its parts.
        """
        cost = self.prices.op(op, self.analysis.program.values)
        if not isinstance(cost, Pricer):
            return self.op(op, candidate)[1] / 2
        place = op.operands.index(name)
        alone = replace(cost, gradients=(place,), summed=tuple(p for p in cost.summed if p == place))
        shapes = local_shapes(op, candidate, self.analysis.program.values, self.prices.mesh.sizes)
        times = self.analysis.step.microbatches * work(self.analysis.fits[op.name], candidate, self.prices.mesh.sizes)
        return times * alone.backward_seconds(*shapes)

    def overlap(self, *, once: bool) -> Overlap | None:
        """Where messages are hidden; None if that gains nothing."""
        if once not in self._overlap:
            self._overlap[once] = Overlap.of(self.analysis, self.prices.mesh, once=once)
        return self._overlap[once]

    def bytes_of(self, name: str, layout: Layout) -> Bytes:
        """The size of one rank's part of a value."""
        return self.analysis.program.values[name].local_bytes(layout, self.prices.mesh.sizes)


def step_time(schedule: Schedule, prices: StepPrices) -> Seconds:
    """Seconds of one training step: forward, backward and optimizer."""
    events = step_events(schedule, prices)
    return sum(event.seconds for event in events) - hidden_time(events, prices, once=schedule.chosen.once)


def hidden_time(events: Sequence[StepEvent], prices: StepPrices, *, once: bool) -> Seconds:
    """Seconds of messages that do not lengthen the step, because they overlap with computing.

    A hidden message still slows computing by beta of its seconds, and load on a link beyond the computing is not hidden.
    """
    overlap = prices.overlap(once=once)
    if overlap is None:
        return 0.0
    taken, over = _overlapped(events, overlap, prices.analysis)
    return sum(event.seconds - seconds for event, seconds in zip(events, taken, strict=True)) - sum(over)


def parts_of_step(events: Sequence[StepEvent], prices: StepPrices, *, once: bool) -> dict[StepPart, Seconds]:
    """Divides a step into its forwards, its backwards with recomputation, and what it does once.

    Time in which a link is busy for longer than the device belongs to the pass where it occurs; if it outlasts a whole pass, to
    messages sent once.
    """
    overlap = prices.overlap(once=once)
    taken = [event.seconds for event in events]
    found: dict[StepPart, Seconds] = {"forward": 0.0, "backward": 0.0, "once": 0.0}
    if overlap is not None:
        taken, over = _overlapped(events, overlap, prices.analysis)
        for place, seconds in enumerate(over):
            found[overlap.part(place)] += seconds
    for event, seconds in zip(events, taken, strict=True):
        found[_part(event)] += seconds
    return found


def _overlapped(events: Sequence[StepEvent], overlap: Overlap, analysis: Analysis) -> tuple[list[Seconds], list[Seconds]]:
    """The seconds of each event (times beta for a hidden message), and how much longer each place lasts."""
    busy, links, found = defaultdict[int, Seconds](float), defaultdict[tuple[int, int], Seconds](float), list[Seconds]()
    for event in events:
        place, ahead = _place(event, overlap, analysis)
        found.append(overlap.beta * event.seconds if ahead and place is not None else event.seconds)
        if place is not None:
            busy[place] += found[-1]
            if event.message is not None:
                for link in overlap.links[event.message.axis]:
                    links[place, link] += event.seconds
    return found, overlap.excess(busy, links)


def _part(event: StepEvent) -> StepPart:
    """The part of a step that an event belongs to."""
    if event.kind == "optimizer" or (event.message is not None and event.message.once):
        return "once"
    return "forward" if event.phase == "forward" else "backward"


def unhidden_time(schedule: Schedule, prices: StepPrices) -> Seconds:
    """How many seconds shorter the step would be if computing anywhere could hide every message of weights."""
    once = schedule.chosen.once
    overlap = prices.overlap(once=once)
    if overlap is None:
        return 0.0
    events = step_events(schedule, prices)
    ahead = sum(event.seconds for event in events if _place(event, overlap, prices.analysis)[1])
    return (1 - overlap.beta) * ahead - hidden_time(events, prices, once=once)


def _place(event: StepEvent, overlap: Overlap, analysis: Analysis) -> tuple[int | None, bool]:
    """The place of an event, and whether it is a message sent ahead; None if it is bare, or belongs to no region."""
    of, message, backward = event.of, event.message, event.phase != "forward"
    if isinstance(of, str):
        return (overlap.op(of, backward=backward) if of in analysis.program.op else None), False
    if event.kind == "offload":
        return None, False
    if message is not None and of[0] in analysis.bucketed and message.kind in TOGETHER[event.phase == "backward"]:
        return overlap.hidden(of[0], SENT[event.phase], moved=overlap.once or not message.once), True
    return overlap.value(of[0], backward=backward), False


def step_events(schedule: Schedule, prices: StepPrices) -> list[StepEvent]:
    """Everything that takes time in a step, in the order of the schedule; collected once per schedule."""
    if schedule not in prices.events:
        prices.events[schedule] = _events(schedule, prices)
    return prices.events[schedule]


def _events(schedule: Schedule, prices: StepPrices) -> list[StepEvent]:
    chosen, analysis = schedule.chosen, prices.analysis
    run = reruns(analysis, chosen)
    found = [*_ops(schedule, prices, run), *_ends(schedule, prices, run)]
    for name, steps in chosen.routes.items():
        for step in steps:
            found += _conversion(schedule, prices, run, (name, step))
    sent: tuple[tuple[Source, Message], ...] = (
        *conversion_messages(analysis, chosen, prices.prices, run),
        *op_messages(analysis, chosen, prices.prices, run),
        *input_messages(analysis, chosen, prices.prices),
    )
    found += [_event(schedule, "collective", of, message.phase, message.seconds, message) for of, message in sent]
    return sorted(found, key=lambda event: event.time)


def _event(
    schedule: Schedule, kind: EventKind, of: Source, phase: Phase, seconds: Seconds, message: Message | None = None
) -> StepEvent:
    """An event at the time of what it belongs to."""
    time = schedule.times.get(of, 0)
    when = time if phase == "forward" else schedule.mirror(time)
    return StepEvent(time=when, kind=kind, of=of, phase=phase, seconds=seconds, message=message)


def _ops(schedule: Schedule, prices: StepPrices, run: RecomputeChoice) -> Iterator[StepEvent]:
    """Forward, backward and recomputation of every op that takes time."""
    for op in prices.analysis.program.ops:
        there, back = prices.op(op, schedule.chosen.ops[op.name])
        if there or back:
            yield _event(schedule, "forward", op.name, "forward", there)
            yield _event(schedule, "backward", op.name, "backward", back)
            if op.name in run.ops:
                yield _event(schedule, "recompute", op.name, "recompute", there)


def _conversion(schedule: Schedule, prices: StepPrices, run: RecomputeChoice, of: Step) -> Iterator[StepEvent]:
    """The slices, pads and copies of one step of a route, those of its gradient and of its recomputation."""
    (name, step), analysis = of, prices.analysis
    runs, dtype = analysis.step.microbatches, analysis.program.values[name].dtype
    wider = analysis.reduce_dtypes.get(name, dtype).itemsize // dtype.itemsize
    sides = [prices.bytes_of(name, layout) for layout in (step.source, step.target)]
    large, small = np.array([max(sides)]), np.array([min(sides)])
    back = step in backward_conversions(analysis, schedule.chosen, name)
    bucketed, (forward, backward), shape = name in analysis.bucketed, step.primitives, analysis.program.values[name].shape
    runs = 1 if bucketed and schedule.chosen.once else runs
    ends = np.array([[scattered(layout, step.axes[0], shape, analysis.sizes) for layout in (step.source, step.target)]])
    unpacking = prices.prices.unpacking(forward, large, small, ends, bucketed=bucketed)
    packing = prices.prices.packing(backward, large, small, ends[:, ::-1], bucketed=bucketed, wider=wider)
    packed = 1 if bucketed and added_up(forward, backward) else runs
    copies: list[tuple[Phase, Seconds, bool]] = [
        ("forward", runs * float(unpacking[0]), True), ("backward", packed * float(packing[0]), back),
        ("recompute", runs * float(unpacking[0]), of in run.steps),
    ]  # fmt: skip
    yield from (_event(schedule, "conversion", of, phase, took) for phase, took, done in copies if took and done)
    recompute = of in run.steps and name not in analysis.weights
    phases: list[tuple[Phase, str]] = [("forward", step.primitives[0])]
    phases += [("backward", step.primitives[1])] * back
    phases += [("recompute", step.primitives[0])] * recompute
    for phase, primitive in phases:
        if primitive not in (*CARRIED, "identity"):
            seconds = runs * float(prices.prices.primitive(primitive, large, small, step.axis)[0])
            yield _event(schedule, "conversion", of, phase, seconds)


def _ends(schedule: Schedule, prices: StepPrices, run: RecomputeChoice) -> Iterator[StepEvent]:
    """The arrival of inputs, offloading, and the optimizer's step."""
    step, chosen, end = prices.analysis.step, schedule.chosen, schedule.end
    program = step.program
    for value in program.inputs:
        seconds = prices.prices.arrival(step, value, chosen.given[value.name])
        yield _event(schedule, "conversion", value.name, "forward", seconds)
    for node in sorted(run.offload, key=str):
        seconds = step.microbatches * prices.prices.offload(prices.bytes_of(*node))
        yield StepEvent(time=end, kind="offload", of=node, phase="backward", seconds=seconds)
    trained = [p.value.name for p in program.parameters if p.value.requires_grad]
    for there in (I, *AWAY):
        here = [name for name in trained if place(chosen.given[name]) == there]
        if here or there == I:
            stored = (float(prices.bytes_of(name, chosen.given[name])) for name in here)
            seconds = sum(prices.prices.optimizer_step(size, there) for size in stored)
            yield StepEvent(time=end, kind="optimizer", of=prices.prices.optimizer.name, phase="backward", seconds=seconds)


__all__ = ["StepEvent", "StepPrices", "hidden_time", "parts_of_step", "step_events", "step_time", "unhidden_time"]
