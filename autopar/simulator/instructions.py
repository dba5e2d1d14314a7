"""A plan as the simulator runs it: what one rank computes, issues and awaits in a training step, in the emitted order.

The order is that of the schedule, by which code is emitted and memory is walked:

    all-gather of a bucket        issued when the one before it has arrived, awaited at the first use of a weight
    reduction of its gradients    issued where the bucket was awaited, awaited where it was issued: autograd goes backwards
    gathered again                issued when the backward uses the bucket before it, awaited at its own first use
    every other message           awaited at once
    offload                       copied to the host as soon as it is made, copied back and awaited where the backward needs it

Each micro-batch runs all of it, except messages sent once: gathers in the first, gradients in the last. If weights are gathered
once for all of them, their gradients follow after the last, one bucket after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.formulation.step_time import StepEvent, StepPrices, step_events
from autopar.ir.device import Seconds
from autopar.memory.liveness import Liveness
from autopar.memory.prefetch import Node
from autopar.memory.rematerialization import HostFetch, Rematerialization
from autopar.memory.schedule import ConversionEvent, Schedule
from autopar.search_space.assignment import Assignment
from autopar.simulator.timeline import Await, Computation, Instruction, Issue, Timeline, Transfer, simulate

HOST = "host"  # the channel of copies to and from the host
TO_HOST, FROM_HOST = "copy to the host", "copy from the host"


def simulated(liveness: Liveness, prices: StepPrices, chosen: Assignment) -> Timeline:
    """Simulate the streams of one rank in a step under an assignment, on the prices' device.

    Interference is limited to one second per second of a message, which noisy measurements may exceed.
    """
    return simulate(instructions(liveness, prices, chosen), min(1.0, prices.prices.device.interference))


def instructions(liveness: Liveness, prices: StepPrices, chosen: Assignment) -> Iterator[Instruction]:
    """The instructions of one step under an assignment; their seconds add up to `formulation.step_time.step_time`."""
    schedule, runs = liveness.schedule(chosen), prices.analysis.step.microbatches
    placement = _Placement(schedule, liveness.rematerialization(chosen), prices)
    found: dict[int, list[_Action]] = {run: [] for run in range(runs + 1)}  # by micro-batch; the last of all after all of them
    for event, count in Counter(step_events(schedule, prices)).items():
        once = event.kind == "optimizer" or (event.message is not None and event.message.once)
        when = range(runs)
        if once and event.phase == "forward":
            when = range(1)
        elif once:
            behind = event.kind == "optimizer" or (chosen.once and runs > 1)
            when = range(runs, runs + 1) if behind else range(runs - 1, runs)
        share = count / len(when)
        for action in placement.actions(event, share, awaited=runs in when):
            for run in when:
                found[run].append(action)
    for actions in found.values():
        yield from _in_order(actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Action:
    """A computation, or a message that is issued at a time of the schedule and awaited at another or the same."""

    start: int
    stop: int
    what: Computation | Transfer


def _in_order(actions: list[_Action]) -> Iterator[Instruction]:
    """The instructions of one micro-batch, in the order of the schedule."""
    placed: list[tuple[int, Instruction]] = []
    for action in actions:
        if isinstance(action.what, Computation):
            placed.append((action.start, action.what))
        else:
            issue = Issue(transfer=action.what)
            placed += [(action.start, issue), (action.stop, Await(issue=issue))]
    return (instruction for _, instruction in sorted(placed, key=lambda pair: pair[0]))


class _Placement:
    """When the program issues and awaits the work of an op or a conversion, in ticks of the schedule."""

    def __init__(self, schedule: Schedule, rematerialization: Rematerialization, prices: StepPrices) -> None:
        self.schedule, self.rematerialization, self.prices = schedule, rematerialization, prices
        events = (event for _, event in schedule.events if isinstance(event, ConversionEvent))
        self.conversion: dict[object, ConversionEvent] = {step: event for event in events for step in event.steps}

    def actions(self, event: StepEvent, count: float, *, awaited: bool) -> Iterator[_Action]:
        """The actions of a micro-batch for an event that it has `count` times; `awaited` if messages are awaited at once."""
        if event.kind == "offload":
            yield from self._offload(event, count * event.seconds)
        elif event.message is None:
            start, _ = self._span(event)
            what = Computation(name=event.name, kind=event.kind, seconds=count * event.seconds)
            yield _Action(start=start, stop=start, what=what)
        else:
            start, stop = self._span(event)
            sent, mesh = event.message, self.prices.prices.mesh
            axes = mesh.axes_over(sent.axis)
            transfer = Transfer(
                name=f"{sent.kind} {event.name}", kind=sent.kind, channel=mesh.name_of(axes), axes=axes, bytes=sent.bytes,
                seconds=sent.seconds, message=sent,
            )  # fmt: skip
            for _ in range(round(count)):
                yield _Action(start=start, stop=start if awaited else stop, what=transfer)

    def _span(self, event: StepEvent) -> tuple[int, int]:
        """When an event begins, and when it must have ended: later only for messages that overlap with computation."""
        found = self.conversion.get(event.of)
        sent = found is not None and event.message is not None
        if event.phase == "recompute":
            again = self.rematerialization.recomputed_at(found or event.name)
            if found and sent and found.gathers and again is not None:
                _, issued, arrived = self.rematerialization.gathered_again(found)
                return issued, arrived
            return (event.time if again is None else again,) * 2
        if found and sent and event.phase == "forward" and found.gathers:
            return found.begun, event.time
        if found and sent and event.phase == "backward" and found.reduces:
            return event.time, self.schedule.mirror(found.begun)
        return event.time, event.time

    def _offload(self, event: StepEvent, seconds: Seconds) -> Iterator[_Action]:
        """The copies of a value to the host and back."""
        name, layout = event.name, event.of[1]
        assert isinstance(layout, tuple), "what is offloaded is a value in a layout"
        node: Node = name, layout
        step, producer = self.schedule.prefetch.into.get(node), self.schedule.program.producer.get(name)
        made = self.schedule.times.get((name, step) if step else producer and producer.name, 0)
        fetched = self.rematerialization.recomputed_at(HostFetch(self.rematerialization.home(node)))
        needed = event.time if fetched is None else fetched
        size = self.prices.bytes_of(*node)
        for kind, start, stop in ((TO_HOST, made, needed), (FROM_HOST, needed, needed)):
            transfer = Transfer(name=f"{kind} {name}", kind=kind, channel=HOST, bytes=size, seconds=seconds / 2)
            yield _Action(start=start, stop=stop, what=transfer)


__all__ = ["FROM_HOST", "HOST", "TO_HOST", "instructions", "simulated"]
