"""The least seconds of a step by a schedule over all cuts of a program, as a linear program.

Stages are free to share the work of the program, each in its own proportion of forward and backward. Its variables are what
they take, for a micro-batch and once, and when actions start:

    start[a] >= start[b] + seconds of b, and of what its rank runs from there to a       b before a on the same rank
    start[a] >= start[b] + seconds of b + message                                        a needs what b makes
    step     >= start[a] + seconds of all that the rank of a has left to do              its W too, and what it does once
    sum of work >= t,  sum of forwards >= f,  sum of what is done once >= o

F and B (or I) come as in the schedule. A W may come anywhere behind its I, even in parts. The least step is a convex function
of (t, f, o), and its dual solution is a bound for all other sums (duality of linear programming):

    step >= messages + work t' + forward f' + once o'                                    for all t', f', o'

Of each rank the first and last `WINDOW` actions for every stage have a start: in between a steady state repeats, and the bound
is less than 0.1% below that with all of them; of many ranks fewer have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.ir.device import Seconds
from autopar.pipeline.dependencies import made, needed
from autopar.pipeline.schedule import Action, ActionKind, PipelineSchedule
from autopar.solver.highs import Meaning, duals, load, run, values
from autopar.solver.matrix import Matrix

STARTS = 4096  # of all ranks, at most: seconds of solving
WINDOW = 2  # by 1 the bound is 0.3% less for GPT-3 in 8 ranks, and 1.2% for Llama-3 8B in 4, by zb-v
FORWARD, FIRST, SECOND, ONCE = range(4)  # the parts of what a stage takes, in the order of its columns

Terms = Counter[int]  # by column


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBound:
    """A step takes at least `messages` seconds, and so many more for each second that all of its stages together take for a
    micro-batch (`work`), for its forward (`forward`), and once a step (`once`)."""

    messages: Seconds
    work: float
    forward: float
    once: float

    def seconds(self, work: Seconds, forward: Seconds, once: Seconds) -> Seconds:
        """What a step takes at least in stages that take so long together."""
        return self.messages + self.work * work + self.forward * forward + self.once * once


def least_of_cuts(
    schedule: PipelineSchedule,
    work: Seconds,
    forward: Seconds,
    once: Seconds,
    *,
    activations: Seconds = 0.0,
    gradients: Seconds = 0.0,
) -> CutBound:
    """The bound that is the largest one for stages that take so long together; it holds for all others too.

    Args:
        schedule: a complete one, without messages.
        work: seconds of all stages for one micro-batch, forward and backward.
        forward: those of its forward.
        once: seconds of what all of them do once.
        activations, gradients: what each message between ranks takes at least.
    """
    ranks, runs = len(schedule.ranks), schedule.microbatches
    mean = CutBound(messages=0.0, work=runs / ranks, forward=0.0, once=1 / ranks)
    unit = mean.seconds(work, forward, once)
    if not unit:
        return mean
    matrix = _Starts(schedule, activations / unit, gradients / unit).matrix
    stages = np.arange(schedule.stages) * 4
    for parts, least in ((range(ONCE), work), ((FORWARD,), forward), ((ONCE,), once)):
        columns = np.concatenate([stages + part for part in parts])
        matrix.add_row(columns, np.ones(len(columns)), least / unit, np.inf)
    solver = load(matrix.block(np.concatenate(matrix.costs)))
    solver.setOptionValue("solver", "ipm")  # of four chunks on 16 ranks in 2.6 CPU seconds, by the simplex method in 6.7
    if run(solver) is not Meaning.SOLVED:
        return mean
    by_work, by_forward, by_once = np.maximum(duals(solver)[-3:], 0.0).tolist()
    rest = float(values(solver)[4 * schedule.stages]) * unit - by_work * work - by_forward * forward - by_once * once
    return CutBound(messages=max(rest, 0.0), work=by_work, forward=by_forward, once=by_once)


class _Starts:
    """The rows that say when actions start, and the columns: four of each stage, the step, the starts."""

    def __init__(self, schedule: PipelineSchedule, activations: float, gradients: float) -> None:
        self.schedule, self.sent, self.matrix = schedule, (gradients, activations), Matrix()
        orders = [[one for one in actions if one.kind != ActionKind.BACKWARD_WEIGHT] for actions in schedule.ranks]
        chosen = [action for actions in orders for action in self._window(actions)]
        self.matrix.add_columns(np.zeros(4 * schedule.stages))
        self.step = self.matrix.add_columns(np.ones(1))
        self.chosen = {made(action): action for action in chosen}
        self.place = {product: number for number, product in enumerate(self.chosen, self.matrix.columns)}
        self.matrix.add_columns(np.zeros(len(chosen)))
        for actions in orders:
            self._follow(actions)
            self._end(actions)
        for action in chosen:
            self._need(action)

    def _window(self, actions: list[Action]) -> Iterator[Action]:
        """The first and the last actions of a rank."""
        count = min(WINDOW * self.schedule.stages, max(1, STARTS // (2 * len(self.schedule.ranks))))
        yield from actions[:count]
        yield from actions[max(count, len(actions) - count) :]

    def _takes(self, action: Action) -> Terms:
        """The seconds of an action."""
        column = 4 * action.stage
        match action.kind:
            case ActionKind.FORWARD:
                return Counter({column + FORWARD: 1})
            case ActionKind.BACKWARD:
                return Counter({column + FIRST: 1, column + SECOND: 1})
            case _:
                return Counter({column + FIRST: 1})

    def _follow(self, actions: list[Action]) -> None:
        """A rank runs one action after the other."""
        between, before = Terms(), None
        for action in actions:
            start = self.place.get(made(action))
            if start is not None:
                if before is not None:
                    self._at_least(start, before, between)
                between, before = Terms(), start
            between.update(self._takes(action))

    def _need(self, action: Action) -> None:
        """An action follows what makes what it needs, and its message if that is of another rank."""
        need = needed(action, self.schedule.stages)
        if need is None or need not in self.place:
            return
        maker = self.chosen[need]
        apart = self.schedule.rank_of[maker.stage] != self.schedule.rank_of[action.stage]
        message = self.sent[maker.kind == ActionKind.FORWARD] if apart else 0.0
        self._at_least(self.place[made(action)], self.place[need], self._takes(maker), message)

    def _end(self, actions: list[Action]) -> None:
        """The step ends no sooner than a rank that has all left to do from an action on."""
        left = Counter({4 * stage + ONCE: 1 for stage in {action.stage for action in actions}})
        for action in reversed(actions):
            left.update(self._takes(action))
            if action.kind == ActionKind.BACKWARD_INPUT:
                left[4 * action.stage + SECOND] += 1
            if made(action) in self.place:
                self._at_least(self.step, self.place[made(action)], left)

    def _at_least(self, column: int, start: int, after: Terms, more: float = 0.0) -> None:
        """x[column] >= x[start] + after + more."""
        columns = np.array([column, start, *after])
        self.matrix.add_row(columns, np.array([1.0, -1.0, *(-count for count in after.values())]), more, np.inf)


__all__ = ["CutBound", "least_of_cuts"]
