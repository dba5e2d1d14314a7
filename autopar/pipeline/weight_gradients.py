"""Places deferred weight gradients (W) where a rank would otherwise wait, by the seconds of its stages.

A named schedule places each W as if F, I and W took equally long. They do not, and stages differ; but a W only has to follow
its I, and nothing waits for it, so it may run at any later time. Here each rank keeps the schedule's order of F and I, and

    runs a W                            if the next F or I cannot start for at least `SHARE` of the W's time,
                                        or if the rank would hold more micro-batches than it ever does in the schedule
    runs the remaining W                after the last F and I

This is list scheduling (Graham, "Bounds on multiprocessing timing anomalies", 1969) of what Qi et al. call W ("Zero bubble
pipeline parallelism", 2023); they place it by an integer program. A W that begins in a gap shorter than itself delays the next
action, by less than it saves later: `SHARE` is the fastest of 0, 1/8, 1/4, 1/2 and 1 for GPT-3 and Llama-3 70B.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.pipeline.clock import StageSeconds, clock_of, receiver
from autopar.pipeline.dependencies import StageProduct, made, needed
from autopar.pipeline.schedule import Action, ActionKind, PipelineSchedule

SHARE = 0.25  # the least wait, as a share of a W's time, that a W fills


def waits_filled(schedule: PipelineSchedule, stages: Sequence[StageSeconds]) -> tuple[PipelineSchedule, float]:
    """A schedule with its W moved to where ranks would wait, if that makes the step faster, else unchanged; with its seconds.

    Args:
        schedule: a complete schedule, without messages.
        stages: seconds of each stage, with messages.
    """
    known = schedule, clock_of(schedule).seconds(stages)
    if not schedule.deferred:
        return known
    found = _Filling(schedule, stages).run()
    return min(known, (found, clock_of(found).seconds(stages)), key=lambda one: one[1])


@dataclass(slots=True, kw_only=True)
class _Rank:
    """The state of a rank: actions still to run, in order; W that may run; finished actions; micro-batches held."""

    queue: deque[Action]
    most: int  # micro-batches that it may hold, over all its stages
    deferred: deque[Action] = field(default_factory=deque)
    done: list[Action] = field(default_factory=list)
    held: int = 0


class _Filling:
    """An event simulation in which ranks choose their next action whenever they are free.

    `there` has the time at which an action's input is available on its rank, if the action that makes it has begun.
    """

    def __init__(self, schedule: PipelineSchedule, stages: Sequence[StageSeconds]) -> None:
        self.schedule, self.stages, self.rank_of = schedule, stages, schedule.rank_of
        self.ranks = [
            _Rank(
                queue=deque(action for action in actions if action.kind != ActionKind.BACKWARD_WEIGHT),
                most=schedule.in_flight(rank, deferred=True),
            )
            for rank, actions in enumerate(schedule.ranks)
        ]
        self.there: dict[StageProduct, float] = {}
        self.links: dict[tuple[int, int], float] = {}
        self.free = [(0.0, rank) for rank in range(len(self.ranks))]  # a heap
        self.waiting: dict[StageProduct, tuple[float, int]] = {}  # what a free rank waits for -> since when, and the rank

    def run(self) -> PipelineSchedule:
        while self.free:
            now, rank = heapq.heappop(self.free)
            self._decide(rank, now)
        return PipelineSchedule(ranks=tuple(tuple(one.done) for one in self.ranks))

    def _decide(self, number: int, now: float) -> None:
        """Run an action on a free rank, or let the rank wait."""
        rank = self.ranks[number]
        if not rank.queue:
            rank.done.extend(rank.deferred)
            return
        action = rank.queue[0]
        need = needed(action, self.schedule.stages)
        ready = 0.0 if need is None else self.there.get(need)
        if rank.deferred and self._fills(rank, action, now, ready):
            self._start(number, rank.deferred.popleft(), now)
        elif ready is None:
            assert need is not None, "what needs nothing is ready"
            self.waiting[need] = now, number
        elif ready > now:
            heapq.heappush(self.free, (ready, number))
        else:
            self._start(number, rank.queue.popleft(), now)

    def _fills(self, rank: _Rank, action: Action, now: float, ready: float | None) -> bool:
        """Whether the first deferred W runs before the next action."""
        if action.kind == ActionKind.FORWARD and rank.held >= rank.most:
            return True
        takes = self.stages[rank.deferred[0].stage].backward_weight
        return ready is None or (ready > now and ready - now >= SHARE * takes)

    def _start(self, number: int, action: Action, now: float) -> None:
        """Run an action, and record when its result is available."""
        rank, stage = self.ranks[number], self.stages[action.stage]
        rank.done.append(action)
        stop = now + stage.of(action.kind)
        heapq.heappush(self.free, (stop, number))
        match action.kind:
            case ActionKind.FORWARD:
                rank.held += 1
            case ActionKind.BACKWARD_WEIGHT:
                rank.held -= 1
                return
            case ActionKind.BACKWARD_INPUT:
                rank.deferred.append(Action(stage=action.stage, kind=ActionKind.BACKWARD_WEIGHT, microbatch=action.microbatch))
        to = self.rank_of.get(receiver(action, self.schedule.stages), number)
        if to != number:
            sent = max(stop, self.links.get((number, to), 0.0))
            stop = sent + (stage.activations if action.kind == ActionKind.FORWARD else stage.gradients)
            self.links[number, to] = stop
        product = made(action)
        self.there[product] = stop
        if product in self.waiting:
            since, waiter = self.waiting.pop(product)
            heapq.heappush(self.free, (since, waiter))


__all__ = ["waits_filled"]
