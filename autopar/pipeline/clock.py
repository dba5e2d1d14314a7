"""The exact time of a step under a pipeline schedule: the longest path through its actions and messages.

    an action starts when its rank has ended the previous one, and its inputs are there; a message starts when its action has
    ended, and the previous one between the same two ranks has arrived; a rank ends its step with the work done once: sums of
    gradients, the optimizer.

A rank continues while its messages are under way. Stages may differ, and so may messages. Nothing is sent between stages of one
rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.pipeline.dependencies import made, needed, runnable
from autopar.pipeline.schedule import Action, ActionKind, PipelineSchedule

Counts = npt.NDArray[np.float64]  # of each field of `StageSeconds`, in their order, for each stage
_KINDS = tuple(ActionKind)
_FIELDS = {
    ActionKind.FORWARD: (0,),
    ActionKind.BACKWARD: (1, 2),
    ActionKind.BACKWARD_INPUT: (1,),
    ActionKind.BACKWARD_WEIGHT: (2,),
}  # of `StageSeconds`, that an action takes
_SENT = {True: 3, False: 4}  # the field of the message of a forward, and of a backward
_ONCE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds that a stage takes for one micro-batch, and once a step.

    A backward makes the gradients of the input and of the weights; if the schedule does not split it, it takes both.
    `activations` is the message to the next stage, `gradients` the one to the previous stage.
    """

    forward: float
    backward_input: float
    backward_weight: float = 0.0
    activations: float = 0.0
    gradients: float = 0.0
    once: float = 0.0

    @property
    def busy(self) -> float:
        """The computing seconds per micro-batch."""
        return self.forward + self.backward_input + self.backward_weight

    @property
    def without_messages(self) -> StageSeconds:
        """The stage without its messages."""
        return replace(self, activations=0.0, gradients=0.0)

    def times(self, share: float) -> StageSeconds:
        """The stage with so many times the work, and the same messages."""
        return replace(
            self,
            forward=share * self.forward,
            backward_input=share * self.backward_input,
            backward_weight=share * self.backward_weight,
            once=share * self.once,
        )

    def of(self, kind: ActionKind) -> float:
        """Seconds of an action that computes."""
        match kind:
            case ActionKind.FORWARD:
                return self.forward
            case ActionKind.BACKWARD:
                return self.backward_input + self.backward_weight
            case ActionKind.BACKWARD_INPUT:
                return self.backward_input
            case _:
                return self.backward_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAction:
    """An action, or the message of a SEND, with its start and stop in seconds from the beginning of the step."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimeline:
    """The timeline of a step: what each rank computes, and the messages that it sends, both in order.

    `idle` is how long each rank does nothing; `seconds` is the length of the step.
    """

    seconds: float
    computed: tuple[tuple[TimedAction, ...], ...]
    sent: tuple[tuple[TimedAction, ...], ...]
    idle: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The mean share of the step for which ranks are idle."""
        return sum(self.idle) / (len(self.idle) * self.seconds) if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """An action with what determines its time: `need` is the index of the action that it depends on, `arrives` whether by a
    message.
    """

    action: Action
    rank: int
    need: int
    arrives: bool
    link: int  # the place of (from, to) among the links; -1 where nothing is sent
    before: int  # the place of the action before it on its rank, or -1
    queued: int  # and of that whose message is before its own on the link


class Clock:
    """Times one schedule for many sets of stages: the order of actions does not depend on seconds.

    Raises ConstraintError for a schedule that hangs.
    """

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.schedule = schedule
        order, rank_of = runnable(schedule), schedule.rank_of
        place = {made(action): n for n, action in enumerate(order)}
        links: dict[tuple[int, int], int] = {}
        last: dict[int, int] = {}
        queued: dict[int, int] = {}
        self.rows: list[_Row] = []
        for number, action in enumerate(order):
            rank, to = rank_of[action.stage], rank_of.get(receiver(action, schedule.stages), -1)
            need = needed(action, schedule.stages)
            link = -1 if to in (-1, rank) else links.setdefault((rank, to), len(links))
            self.rows.append(
                _Row(
                    action=action,
                    rank=rank,
                    need=-1 if need is None else place[need],
                    arrives=need is not None and rank_of[need[1]] != rank,
                    link=link,
                    before=last.get(rank, -1),
                    queued=queued.get(link, -1),
                )
            )
            last[rank] = queued[link] = number
        self.last = [last[rank] for rank in range(len(schedule.ranks))]
        self.links = len(links)
        self._steps = [(row.rank, row.need, row.arrives, row.link, _slot(row.action)) for row in self.rows]

    def seconds(self, stages: Sequence[StageSeconds]) -> float:
        """Seconds of a step; one entry per stage."""
        *_, free = self._run(stages)
        return max(free)

    def critical(self, stages: Sequence[StageSeconds]) -> tuple[float, Counts]:
        """Seconds of a step, and how often each field of each stage is on its critical path, `[stages, fields]`.

        Weighted by these counts, the seconds of other stages are the length of a path through the same actions: a lower bound
        on their step.
        """
        start, stop, sent, _, free = self._run(stages)
        counts, rank = np.zeros((len(stages), _ONCE + 1)), free.index(max(free))
        for stage, on in self.schedule.rank_of.items():
            counts[stage, _ONCE] += on == rank
        place = self.last[rank]
        while place >= 0:
            row = self.rows[place]
            for one in _FIELDS[row.action.kind]:
                counts[row.action.stage, one] += 1
            waits = row.need >= 0 and (row.before < 0 or stop[row.before] < start[place])
            place = row.need if waits else row.before
            while waits and row.arrives:
                action = self.rows[place].action
                counts[action.stage, _SENT[action.kind == ActionKind.FORWARD]] += 1
                if sent[place] <= stop[place]:
                    break
                place = self.rows[place].queued  # messages wait for those before them
        return max(free), counts

    def run(self, stages: Sequence[StageSeconds]) -> PipelineTimeline:
        """The timeline of the step; one entry per stage."""
        start, stop, sent, arrived, free = self._run(stages)
        ranks = range(len(self.schedule.ranks))
        computed: list[list[TimedAction]] = [[] for _ in ranks]
        messages: list[list[TimedAction]] = [[] for _ in ranks]
        for n, row in enumerate(self.rows):
            computed[row.rank].append(TimedAction(action=row.action, start=start[n], stop=stop[n]))
            if row.link >= 0:
                messages[row.rank].append(TimedAction(action=send(row.action), start=sent[n], stop=arrived[n]))
        seconds, once = max(free), self._once(stages)
        busy = [sum(one.stop - one.start for one in computed[rank]) + once[rank] for rank in ranks]
        return PipelineTimeline(
            seconds=seconds,
            computed=tuple(map(tuple, computed)),
            sent=tuple(map(tuple, messages)),
            idle=tuple(seconds - one for one in busy),
        )

    def _once(self, stages: Sequence[StageSeconds]) -> list[float]:
        once = [0.0] * len(self.schedule.ranks)
        for stage, rank in sorted(self.schedule.rank_of.items()):
            once[rank] += stages[stage].once
        return once

    def _run(self, stages: Sequence[StageSeconds]) -> tuple[list[float], list[float], list[float], list[float], list[float]]:
        """When each action starts and stops, when its message starts and arrives, and when each rank ends its step."""
        start, stop, sent, arrived = ([0.0] * len(self.rows) for _ in range(4))
        free, links = [0.0] * len(self.schedule.ranks), [0.0] * self.links
        takes = [one.of(kind) for one in stages for kind in _KINDS]
        carried = [one.activations if kind == ActionKind.FORWARD else one.gradients for one in stages for kind in _KINDS]
        for n, (rank, need, arrives, link, slot) in enumerate(self._steps):
            now = free[rank]
            if need >= 0:
                now = max(now, arrived[need] if arrives else stop[need])
            start[n] = now
            stop[n] = free[rank] = ended = now + takes[slot]
            if link >= 0:
                sent[n] = begins = max(ended, links[link])
                arrived[n] = links[link] = begins + carried[slot]
        return start, stop, sent, arrived, [ended + once for ended, once in zip(free, self._once(stages), strict=True)]


@functools.lru_cache(maxsize=32)
def clock_of(schedule: PipelineSchedule) -> Clock:
    """The clock of a schedule, from a bounded cache; raises ConstraintError for one that hangs."""
    return Clock(schedule)


def _slot(action: Action) -> int:
    """The index of an action's stage and kind among those of all stages."""
    return action.stage * len(_KINDS) + _KINDS.index(action.kind)


def receiver(action: Action, stages: int) -> int:
    """The stage that needs an action's result; -1 if it is the action's own, or none."""
    if action.kind == ActionKind.FORWARD:
        return action.stage + 1 if action.stage < stages - 1 else -1
    return action.stage - 1 if action.kind != ActionKind.BACKWARD_WEIGHT else -1


def send(action: Action) -> Action:
    """The action that sends a computing action's result."""
    kind = ActionKind.SEND_F if action.kind == ActionKind.FORWARD else ActionKind.SEND_B
    return Action(stage=action.stage, kind=kind, microbatch=action.microbatch)


def least_seconds(schedule: PipelineSchedule, stages: Sequence[StageSeconds]) -> float:
    """A lower bound on a step from the known stages, first ones on, for every order of work.

    Stage s begins when the first micro-batch has passed the stages before it, and does all its work, then the work done once;
    if backwards are not split, the last micro-batch also goes back through the stages before it.
    """
    there = back = least = 0.0
    for one in stages:
        least = max(least, there + schedule.microbatches * one.busy + max(one.once, back))
        there += one.forward
        back += 0.0 if schedule.deferred else one.backward_input + one.backward_weight
    return least


__all__ = [
    "Clock",
    "Counts",
    "PipelineTimeline",
    "StageSeconds",
    "TimedAction",
    "clock_of",
    "least_seconds",
    "receiver",
    "send",
]
