"""Places deferred weight gradients (W) where a rank would otherwise wait, by the seconds of its stages.

A schedule with a name has each W where it fits if F, I and W take equally long. They do not, and stages differ; but a W follows
its I and nothing waits for it, so that it may come at any later time. Here each rank has its F and I in the order of the
schedule, and

    runs a W                            where the next F or I could not start for `SHARE` of what the W takes, or longer,
                                        and where the rank would hold more micro-batches than it ever does by the schedule
    runs those that are left            behind the last F and I

which is a list schedule (Graham, "Bounds on multiprocessing timing anomalies", 1969) of what Qi et al. call W ("Zero bubble
pipeline parallelism", 2023), who find its place by an integer program. A W that begins in a gap that is shorter holds up what
comes next, by less than it saves later on: `SHARE` is the fastest of 0, 1/8, 1/4, 1/2 and 1 for GPT-3 and Llama-3 70B.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.pipeline.clock import StageSeconds, clock_of, receiver
from autopar.pipeline.dependencies import StageProduct, made, needed
from autopar.pipeline.schedule import Action, ActionKind, PipelineSchedule

SHARE = 0.25  # of a W, for which a rank would wait at least


def waits_filled(schedule: PipelineSchedule, stages: Sequence[StageSeconds]) -> tuple[PipelineSchedule, float]:
    """A schedule with its W where ranks would wait, if a step is faster so, else as it is; and the seconds of the step.

    Args:
        schedule: a complete one, without messages.
        stages: seconds of each stage, with messages.
    """
    known = schedule, clock_of(schedule).seconds(stages)
    if not schedule.deferred:
        return known
    found = _Filling(schedule, stages).run()
    return min(known, (found, clock_of(found).seconds(stages)), key=lambda one: one[1])


@dataclass(slots=True, kw_only=True)
class _Rank:
    """What a rank has still to do, in order, the W that may run, what it has done, and the micro-batches that it holds."""

    queue: deque[Action]
    most: int  # micro-batches that it may hold, of all of its stages
    deferred: deque[Action] = field(default_factory=deque)
    done: list[Action] = field(default_factory=list)
    held: int = 0


class _Filling:
    """A simulation in the order of time, in which ranks decide what they run next whenever they are free.

    `there` has the seconds at which what an action needs is on its rank, if the action that makes it has begun.
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
        self.waiting: dict[StageProduct, tuple[float, int]] = {}  # ranks that are free, by what they wait for

    def run(self) -> PipelineSchedule:
        while self.free:
            now, rank = heapq.heappop(self.free)
            self._decide(rank, now)
        return PipelineSchedule(ranks=tuple(tuple(one.done) for one in self.ranks))

    def _decide(self, number: int, now: float) -> None:
        """Run an action on a rank that is free, or let it wait."""
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
        """Whether the first W that is deferred comes before the next action."""
        if action.kind == ActionKind.FORWARD and rank.held >= rank.most:
            return True
        takes = self.stages[rank.deferred[0].stage].backward_weight
        return ready is None or (ready > now and ready - now >= SHARE * takes)

    def _start(self, number: int, action: Action, now: float) -> None:
        """Run an action, and say when what it makes is there."""
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
