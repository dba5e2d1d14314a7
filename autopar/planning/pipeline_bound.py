"""A proven lower bound on a pipelined step, for every cut of the program and all layouts.

Let B(m) bound from below the price of m micro-batches in one stage, the whole program on the mesh without the pipeline's axis,
in whatever memory, F that of the forward of one, and I that of the forward and the gradients of all but weights. Stages share
this work, and what crosses a cut, runs in several stages or is stored by several comes on top: with t the seconds of all stages
for one micro-batch, f those of its forward, i those of its F and I, and o what they do once, m t + o >= B(m) for every m,
f >= F, and i >= I. With the duals of `cut_bound`, of all cuts by the schedule,

    T >= messages + work t + forward f + inputs i + once o >= messages + once B(work / once) + forward F + inputs I

where a message takes at least as long as the fewest bytes that pass between two stages, split over all devices of one. Stages
may send weights in fewer buckets than the whole program, so that B, F and I have a few latencies too many: the bound is proven
but for these, which count in tiny models only. Where work / once is no whole number, the next one is taken, of less of the
price, but `MANY` at most; F and I are at least what so many take, but for what these do once. With s, the seconds of o that are
then counted too often, of p ranks that have m t + o <= p T to do,

    T >= messages + work t + forward f + inputs i + once o - s o,    o <= p T - m t,    t >= (B(n) - o) / n

I is a price of the program with frozen weights. A stage's F and I are at least what it computes and waits for there; with the
same layouts, and weights gathered all along, that program takes no longer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autopar.errors import ConstraintError
from autopar.ir.device import Link, Seconds
from autopar.ir.layout import I
from autopar.ir.mesh import Mesh
from autopar.ir.program import Parameter, Program, Value
from autopar.ir.training_step import MicrobatchLoop, TrainingStep
from autopar.passes.stage_regions import fine_starts, passing_bytes
from autopar.pipeline.clock import StageSeconds
from autopar.pipeline.schedule import PipelineSchedule
from autopar.plan.options import AUTO, INFERENCE, Options
from autopar.plan.stages import StageSteps
from autopar.planning.cut_bound import CutBound, StageSums, least_of_cuts
from autopar.planning.optimize import analysed, least_price
from autopar.solver.settings import SearchSettings

MANY = 4096  # micro-batches of a step, beside which what is done once hardly counts
ROUNDING = 1e-6  # of a number of micro-batches


def least_step(
    step: TrainingStep,
    mesh: Mesh,
    link: Link,
    schedule: PipelineSchedule,
    known: Sequence[StageSeconds],
    options: Options,
    settings: SearchSettings,
) -> Seconds:
    """A lower bound in seconds on a step in stages under a schedule, over all cuts and layouts.

    Args:
        step: the whole step, of the program of a micro-batch.
        mesh: of one stage, without the pipeline's axis.
        link: of the pipeline's axis.
        schedule: of the stages.
        known: the seconds of stages found so far, for which the bound is tightest.
        options, settings: as the stages were planned.
    """
    return UncutStep(step, mesh, link, options, settings).least(schedule, StageSums.of(known))


class UncutStep:
    """Lower bounds on a step before its cuts and schedule are chosen.

    `step`, `mesh`, `link`, `options` and `settings` are those of `least_step`.
    """

    def __init__(self, step: TrainingStep, mesh: Mesh, link: Link, options: Options, settings: SearchSettings) -> None:
        self.runs, self.program, self.link = step.microbatches, step.program, link
        self.step = StageSteps(step, (0,)).made(0, {})
        self.mesh, self.options, self.settings = mesh, options, settings
        self._prices: dict[int, Seconds] = {}

    def busy(self, ranks: int) -> Seconds:
        """A lower bound on so many ranks: the step if no rank is ever idle."""
        return self._price(self.runs) / ranks

    def least(self, schedule: PipelineSchedule, sums: StageSums) -> Seconds:
        """The lower bound under a schedule; tightest if all of its stages together take so long."""
        bound = self._of_cuts(schedule, sums)
        runs = math.ceil(_repeats(bound) - ROUNDING)
        return self._least(schedule, bound, runs, self._least_price(runs, exact=True))

    def roughly(self, schedule: PipelineSchedule) -> Seconds:
        """A cheaper, weaker version of `least` from two prices: for the actual number of micro-batches, and for `MANY`.

        The least price of n micro-batches is a concave function of n, as the least of some that are linear: between two
        numbers, and between none and one, it is no less than the straight line.
        """
        numbers = [0, self.runs, MANY]
        prices = [0.0, *map(self._price, numbers[1:])]
        work = (prices[2] - prices[1]) / (MANY - self.runs)
        once = max(prices[1] - self.runs * work, work / MANY)
        inputs = self._inputs if schedule.deferred else 0.0
        bound = self._of_cuts(schedule, StageSums(work=work, forward=self._forward, inputs=inputs, once=once))
        runs = _repeats(bound)
        return self._least(schedule, bound, runs, float(np.interp(runs, numbers, prices)))

    def _least(self, schedule: PipelineSchedule, bound: CutBound, runs: float, price: Seconds) -> Seconds:
        """The bound from the least price of so many micro-batches."""
        share, part = bound.work / runs, schedule.microbatches / runs
        forwards = bound.forward * self._forward if bound.forward else 0.0
        inputs = bound.inputs * self._inputs if bound.inputs else 0.0
        excess = max(0.0, share + (bound.forward + bound.inputs) / MANY - bound.once)
        least = bound.messages + (share + excess * part) * price + forwards + inputs
        return least / (1 + excess * (1 + part) * len(schedule.ranks))

    def _of_cuts(self, schedule: PipelineSchedule, sums: StageSums) -> CutBound:
        there, back = self._messages
        return least_of_cuts(schedule, sums, activations=there, gradients=back)

    @functools.cached_property
    def _messages(self) -> tuple[Seconds, Seconds]:
        """The least seconds of each message, forward and back."""
        there, back = (least_message(self.program, self.mesh, self.link, back=back) for back in (False, True))
        return there, back

    @functools.cached_property
    def _forward(self) -> Seconds:
        return least_forward(self.step, self.mesh, self.options, self.settings)

    @functools.cached_property
    def _inputs(self) -> Seconds:
        return least_without_weights(self.step, self.mesh, self.options, self.settings)

    def _price(self, runs: int) -> Seconds:
        """The least seconds of so many micro-batches in one stage."""
        if runs not in self._prices:
            self._prices[runs] = self._least_price(runs)
        return self._prices[runs]

    def _least_price(self, runs: int, *, exact: bool = False) -> Seconds:
        analysis = analysed(repeated(self.step, runs), self.mesh, self.options)
        return least_price(analysis, self.mesh, self.options, self.settings, exact=exact)


def _repeats(bound: CutBound) -> float:
    """How many once-per-step seconds one second of a micro-batch is worth, at most `MANY`."""
    return min(MANY, bound.work / bound.once) if bound.work and bound.once else MANY


def least_forward(step: TrainingStep, mesh: Mesh, options: Options, settings: SearchSettings) -> Seconds:
    """The least seconds of a micro-batch's forward, with a share of the work done once for `MANY` of them.

    Over all strategies if the requested one is for training only, such as those that split activations between blocks.
    """
    alone = replace(repeated(step, MANY), program=forward_only(step.program))
    given = replace(options, mode=INFERENCE, outputs="sharded")
    try:
        return least_price(analysed(alone, mesh, given), mesh, given, settings) / MANY
    except ConstraintError:
        free = replace(given, strategy=AUTO)
        return least_price(analysed(alone, mesh, free), mesh, free, settings) / MANY


def least_without_weights(step: TrainingStep, mesh: Mesh, options: Options, settings: SearchSettings) -> Seconds:
    """The least seconds of a micro-batch's forward and of all gradients except those of weights.

    Over all strategies, without constraints, with a share of the work done once for `MANY` of them.
    """
    program = replace(step.program, parameters=frozen(step.program.parameters))
    alone, free = replace(repeated(step, MANY), program=program), replace(options, strategy=AUTO, constraints={})
    return least_price(analysed(alone, mesh, free), mesh, free, settings) / MANY


def least_message(program: Program, mesh: Mesh, link: Link, *, back: bool) -> Seconds:
    """The least seconds of a message between two stages, forward or back."""
    passing = passing_bytes(program, back=back)
    fewest = min((passing[start] for start in fine_starts(program)[1:]), default=0)
    return link.send(fewest / math.prod(mesh.sizes)) if fewest else 0.0


def repeated(step: TrainingStep, runs: int) -> TrainingStep:
    """The step with another number of micro-batches."""
    ends = (I,) * len(step.program.inputs), (I,) * len(step.program.outputs)
    loop = step.loop or MicrobatchLoop(count=1, hoisted=None, inputs=ends[0], outputs=ends[1])
    return step if runs == loop.count else replace(step, loop=replace(loop, count=runs))


def forward_only(program: Program) -> Program:
    """The program without anything to differentiate."""

    def values(found: Iterable[Value]) -> tuple[Value, ...]:
        return tuple(replace(value, requires_grad=False) for value in found)

    return replace(
        program,
        ops=tuple(replace(op, results=values(op.results)) for op in program.ops),
        inputs=values(program.inputs),
        parameters=frozen(program.parameters),
        buffers=frozen(program.buffers),
    )


def frozen(found: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Parameters without gradients."""
    return tuple(replace(one, value=replace(one.value, requires_grad=False)) for one in found)


__all__ = ["UncutStep", "least_forward", "least_message", "least_step", "least_without_weights", "repeated"]
