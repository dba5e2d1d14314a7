"""A lower bound on a step under a schedule over all cuts of a program, as a linear program.

Stages are free to share the work of the program, each in its own proportion of forward and backward. The variables are their
seconds, per micro-batch and once per step, and the start times of actions:

    start[a] >= start[b] + seconds of b, and of what its rank runs from there to a       b before a on the same rank
    start[a] >= start[b] + seconds of b + message                                        a needs what b makes
    step     >= start[a] + seconds of all that the rank of a has left to do              its W too, and what it does once
    sum of work >= t,  sum of forwards >= f,  sum of F and I >= i,  sum of what is done once >= o

F and B (or I) come as in the schedule. A W may come anywhere behind its I, even in parts: w[a] is what a rank has run of them
before a, which adds to the start of a, is no more than the W that are due, and before a forward no less than those without
which the rank would hold more micro-batches than it ever does by the schedule. The least step is a convex function of
(t, f, i, o), and its dual solution is a bound for all other sums (duality of linear programming):

    step >= messages + work t' + forward f' + inputs i' + once o'                        for all t', f', i', o'

On each rank only the first and last `WINDOW` actions of every stage have a start: in between a steady state repeats, and the
bound is less than 0.1% below that with all of them; with many ranks the window is smaller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.device import Seconds
from autopar.pipeline.clock import StageSeconds
from autopar.pipeline.dependencies import StageProduct, made, needed
from autopar.pipeline.schedule import Action, ActionKind, PipelineSchedule
from autopar.solver.highs import Meaning, duals, load, run, values
from autopar.solver.matrix import Matrix

STARTS = 4096  # of all ranks, at most: seconds of solving
WINDOW = 2  # by 1 the bound is 0.3% less for GPT-3 in 8 ranks, and 1.2% for Llama-3 8B in 4, by zb-v
FORWARD, FIRST, SECOND, ONCE = range(4)  # the parts of what a stage takes, in the order of its columns

Terms = Counter[int]  # by column


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSums:
    """Total seconds of all stages of a step: per micro-batch (`work`), for its forward, for its forward and input gradients
    (`inputs`: F and I, if backwards are split in halves), and once per step.
    """

    work: Seconds
    forward: Seconds
    inputs: Seconds
    once: Seconds

    @staticmethod
    def of(stages: Sequence[StageSeconds]) -> StageSums:
        """The sums over known stages."""
        return StageSums(
            work=sum(one.busy for one in stages),
            forward=sum(one.forward for one in stages),
            inputs=sum(one.forward + one.backward_input for one in stages),
            once=sum(one.once for one in stages),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBound:
    """A lower bound on a step: `messages` seconds, plus a multiple of each of the stages' total seconds."""

    messages: Seconds
    work: float
    forward: float
    inputs: float
    once: float

    def seconds(self, sums: StageSums) -> Seconds:
        """The lower bound on a step for these total seconds of its stages."""
        timed = self.work * sums.work + self.forward * sums.forward + self.inputs * sums.inputs + self.once * sums.once
        return self.messages + timed


def least_of_cuts(
    schedule: PipelineSchedule, sums: StageSums, *, activations: Seconds = 0.0, gradients: Seconds = 0.0
) -> CutBound:
    """The bound that is tightest for these total seconds of the stages; it holds for all others too.

    Args:
        schedule: a complete one, without messages.
        sums: the total seconds of all stages.
        activations, gradients: the least seconds of each message between ranks.
    """
    ranks, runs = len(schedule.ranks), schedule.microbatches
    mean = CutBound(messages=0.0, work=runs / ranks, forward=0.0, inputs=0.0, once=1 / ranks)
    unit = mean.seconds(sums)
    if not unit:
        return mean
    matrix = _Starts(schedule, activations / unit, gradients / unit).matrix
    stages, inputs = np.arange(schedule.stages) * 4, sums.inputs if schedule.deferred else 0.0
    parts = ((range(ONCE), sums.work), ((FORWARD,), sums.forward), ((FORWARD, FIRST), inputs), ((ONCE,), sums.once))
    for of, least in parts:
        columns = np.concatenate([stages + part for part in of])
        matrix.add_row(columns, np.ones(len(columns)), least / unit, np.inf)
    solver = load(matrix.block(np.concatenate(matrix.costs)))
    solver.setOptionValue("solver", "ipm")  # of four chunks on 16 ranks in 2.6 CPU seconds, by the simplex method in 6.7
    if run(solver) is not Meaning.SOLVED:
        return mean
    work, forward, of_inputs, once = np.maximum(duals(solver)[-len(parts) :], 0.0).tolist()
    found = CutBound(messages=0.0, work=work, forward=forward, inputs=of_inputs if schedule.deferred else 0.0, once=once)
    least = float(values(solver)[4 * schedule.stages]) * unit
    return replace(found, messages=max(least - found.seconds(sums), 0.0))


class _Starts:
    """The rows on the starts of actions, and the columns: four per stage, the step, the starts, and before each start the
    seconds of W that its rank has run, if it has any.
    """

    def __init__(self, schedule: PipelineSchedule, activations: float, gradients: float) -> None:
        self.schedule, self.sent, self.matrix = schedule, (gradients, activations), Matrix()
        orders = [[one for one in actions if one.kind != ActionKind.BACKWARD_WEIGHT] for actions in schedule.ranks]
        chosen = [action for actions in orders for action in self._window(actions)]
        self.matrix.add_columns(np.zeros(4 * schedule.stages))
        self.step = self.matrix.add_columns(np.ones(1))
        self.chosen = {made(action): action for action in chosen}
        self.start = self._columns(self.chosen)
        self.ran = self._columns(self.chosen if schedule.deferred else ())
        for rank, actions in enumerate(orders):
            self._follow(actions)
            self._end(actions)
            if schedule.deferred:
                self._defer(actions, schedule.in_flight(rank, deferred=True))
        for action in chosen:
            self._need(action)

    def _columns(self, products: Collection[StageProduct]) -> dict[StageProduct, int]:
        """A column for each."""
        first = self.matrix.add_columns(np.zeros(len(products)))
        return {product: number for number, product in enumerate(products, first)}

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
        """Add rows: a rank runs one action after the other, with W in between."""
        between, before = Terms(), None
        for action in actions:
            now = made(action)
            if now in self.start:
                if before is not None:
                    self._no_less(
                        {self.start[now]: 1, **self._ran(before)}, {self.start[before]: 1, **between, **self._ran(now)}
                    )
                between, before = Terms(), now
            between.update(self._takes(action))

    def _ran(self, product: StageProduct) -> Terms:
        """The seconds of W before an action."""
        return Counter({self.ran[product]: 1} if self.ran else {})

    def _defer(self, actions: list[Action], most: int) -> None:
        """Add rows: a W follows its I, like those before it, and precedes a forward with which its rank would hold too many
        micro-batches.
        """
        due, held, before = list[int](), 0, Terms()
        for action in actions:
            if made(action) in self.start:
                ran = self._ran(made(action))
                self._no_less(Counter(due), ran)
                self._no_less(ran, before)
                if action.kind == ActionKind.FORWARD and held >= most:
                    self._no_less(ran, Counter(due[: held + 1 - most]))
                before = ran
            match action.kind:
                case ActionKind.FORWARD:
                    held += 1
                case ActionKind.BACKWARD:
                    held -= 1
                case _:
                    due.append(4 * action.stage + SECOND)

    def _need(self, action: Action) -> None:
        """Add rows: an action follows the ones that it depends on, and their messages if these are on another rank."""
        need = needed(action, self.schedule.stages)
        if need is None or need not in self.start:
            return
        maker = self.chosen[need]
        apart = self.schedule.rank_of[maker.stage] != self.schedule.rank_of[action.stage]
        message = self.sent[maker.kind == ActionKind.FORWARD] if apart else 0.0
        self._no_less({self.start[made(action)]: 1}, {self.start[need]: 1, **self._takes(maker)}, message)

    def _end(self, actions: list[Action]) -> None:
        """Add rows: after each action the step lasts at least as long as the rank's remaining actions, and the W that it has
        not run.
        """
        left = Counter({4 * stage + ONCE: 1 for stage in {action.stage for action in actions}})
        left.update(4 * action.stage + SECOND for action in actions if action.kind == ActionKind.BACKWARD_INPUT)
        for action in reversed(actions):
            left.update(self._takes(action))
            if made(action) in self.start:
                start = self.start[made(action)]
                self._no_less({self.step: 1, **self._ran(made(action))}, {start: 1, **left})

    def _no_less(self, terms: Mapping[int, int], others: Mapping[int, int], more: float = 0.0) -> None:
        """Add a row: the sum of some columns is no less than that of others plus a constant."""
        columns = np.array([*terms, *others])
        signed = np.array([*terms.values(), *(-count for count in others.values())], dtype=np.float64)
        self.matrix.add_row(columns, signed, more, np.inf)


__all__ = ["CutBound", "StageSums", "least_of_cuts"]
