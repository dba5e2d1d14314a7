"""Searches for a pipeline of a large program, most promising ones first, without exhausting the space.

    guess      the first stage is planned with one micro-batch in flight and plenty of memory; the others are guessed from it.
               More micro-batches, or ranks, are left out when the last ones made the step longer, and fewer when more made it
               shorter
    plan       the numbers that promise most by any schedule, and of these the schedules that do, until the others promise no
               less than is known
    cut anew   of plans that are about as fast as the best, the stages of the one that is fastest then, by what they take
    uncut      they are planned with what they send in the layouts of the whole program, where that is cheaper

A step without stages is bounded once one number of ranks is guessed. It is planned at once if its bound is below everything
that stages promise, else after them: by then most numbers of micro-batches are ruled out by their bound.

A time limit ends the search: the most promising comes first, and once there is a plan nothing new starts in the share of time
that `solved` reserves for the named strategies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autopar.errors import AutoparError, ConstraintError
from autopar.ir.device import Seconds
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.microbatches import counts, microbatches
from autopar.passes.padding import PaddingExtent
from autopar.pipeline.clock import StageSeconds
from autopar.plan.options import AUTO, Options
from autopar.plan.stages import StageSteps
from autopar.planning.optimize import analysed, least_price
from autopar.planning.pipeline_plan import StagedStep, guessed, hoped
from autopar.planning.pipeline_space import Hope, PipelineAxis, ScheduledStages, climbed, doubled, forms, nearest
from autopar.planning.pipeline_stages import Cut
from autopar.planning.pipeline_trials import PipelineTrials
from autopar.planning.plan_search import PADDED
from autopar.solver.settings import SearchSettings

FULL = 4  # micro-batches for each rank from which the search goes up or down at first
CHEAPEST = 0.15  # of what is made again, as what is cheapest is: pipelines of GPT-3 take 0.17 to 0.28 of what all of it would
LEAST_IDLE = "zb-v"  # the schedule of which a step may be shortest
REFINED = 3  # pairs of ranks and micro-batches of which all schedules are tried


class LargePipelineSearch(PipelineTrials):
    """The search for a pipeline of a large program: guesses, candidates that promise most, and what is left for the end."""

    even, hides = True, False

    def __init__(self, program: Program, options: Options, settings: SearchSettings) -> None:
        super().__init__(program, options, settings)
        self._full: float = FULL
        self._hoped: list[Hope] = []  # what 1f1b may take
        self._promised: dict[Hope, Seconds] = {}  # and the schedule that idles least, where that was worked out
        self._alike: dict[tuple[PipelineAxis, int, int], Sequence[StageSeconds]] = {}  # by micro-batches and number of stages
        self._longer: dict[tuple[PipelineAxis, int], tuple[int, float]] = {}  # than was hoped, in so many stages
        self._bounds: list[tuple[Mesh, dict[int, Seconds]]] = []  # without stages, by micro-batches

    def both(self, mesh: Mesh) -> None:
        """The probably best number of ranks shows what stages promise: if the bound of a step without stages is lower, that is
        planned next, and the other numbers afterwards.
        """
        numbers, guess = self.ways_to_cut(mesh), functools.cache(partial(self.cut, mesh))
        near = math.sqrt(numbers[-1]) if numbers else 1.0
        if numbers:
            guess(numbers[nearest(numbers, near)])
        best = self._most_promising()
        if self._bound(mesh) < (self._promised[best] if best else self.seconds):
            self._without_stages()
        elif self.settings.deadline.seconds < math.inf:  # by which there is to be a plan
            self._settle()
        if numbers:
            self._climb(numbers, near, guess)
        self._settle()

    def finish(self) -> None:
        self._settle()
        self._without_stages()
        self.recut()
        self.hide()
        self.uncut()

    def numbers(self, over: PipelineAxis, products: Seconds) -> Seconds:
        def seconds(runs: int) -> Seconds:
            return math.inf if self._below_floor(over, runs, products) else self.number(over, runs)

        best, runs = self._climb(list(doubled(counts(self.program))), self._full * over.ranks, seconds)
        if best < math.inf:
            self._full = runs / over.ranks  # other numbers of ranks are fastest with about as many for each
        return best

    def _below_floor(self, over: PipelineAxis, runs: int, products: Seconds) -> bool:
        """Whether the best known step beats the floor of a step with so many micro-batches, whose products take so long."""
        below = self.seconds <= over.floor(products, runs)
        self.fared["slower by their floor"] += below
        return below

    def number(self, over: PipelineAxis, runs: int) -> Seconds:
        """The step under 1f1b if each stage holds one micro-batch at a time, guessed from the first stage; infinite if there is
        no such plan. Stages are planned in `_settle`.
        """
        if self.ended or (self._hoped and self.settings.deadline.passed):
            return math.inf
        schedule, count = next(forms(over.options, over.ranks))
        try:
            cuts = self.cuts(over, runs)
            cut = cuts.chosen(over.mesh, over.axis, replace(over.options, schedule=schedule, stages=count), runs)
            first = next(over.beyond.alone(cuts.steps(cut.starts), cut))
        except AutoparError as error:
            self.refused.append(error)
            return math.inf
        stages = guessed(first, cuts.shares(cut.starts))
        dropped = max(0, first.need.peak - over.planner.limit) / max(1, first.need.peak - first.need.alone)
        self._hoped.append(Hope(over=over, runs=runs, stages=stages, dropped=min(1.0, dropped)))
        return cut.waits_filled(stages)[1]

    @property
    def ended(self) -> bool:
        """Whether the deadline has come; not yet if there is no plan, but hoped-for stages may give one."""
        return super().ended and (self.seconds < math.inf or not self._hoped)

    def _climb(self, numbers: Sequence[int], near: float, seconds: Callable[[int], Seconds]) -> tuple[Seconds, int]:
        """The best time over numbers of micro-batches, or of ranks, and the number that has it; see `climbed`."""
        best, number, left = climbed(numbers, near, seconds, lambda: self.short)
        self.fared["left out after slower ones"] += left
        return best, number

    def _settle(self) -> None:
        """Plan what promises most until nothing promises less than the best known; all schedules for some numbers, and the
        first schedule for the others. If the micro-batches in flight do not fit, more but smaller ones may.
        """
        tried = {(one.over, one.runs) for one in self._hoped}
        refined = 0
        while (best := self._most_promising()) is not None:
            over, runs, ways = best.over, best.runs, list(forms(best.over.options, best.over.ranks))
            if refined < REFINED:
                ways.sort(key=lambda way: self._hoped_by(best, way))
            found = self.schedules(over, runs, filter(self._promises(best), ways if refined < REFINED else ways[:1]))
            self._hoped.remove(best)  # now: at the deadline what is left to hope for is still planned
            refined += found < math.inf
            if found == math.inf and over.options.microbatches == AUTO and self.short:
                more = next((other for other in counts(self.program) if other >= 2 * runs), runs)
                if (over, more) not in tried:
                    tried.add((over, more))
                    self.number(over, more)
        self.fared["slower as guessed from a first stage"] += len(self._hoped)
        self._hoped.clear()

    def _most_promising(self) -> Hope | None:
        """The most promising candidate with all recomputation that a lack of memory may cause, among those that beat the best
        known with part of it. Promises are computed only if a step without idle ranks would be the fastest.
        """
        while not self.ended:
            least = {one: self._promised.get(one, one.busy()) for one in self._hoped}
            open_ = [one for one in self._hoped if least[one] + CHEAPEST * one.made_again() < self.seconds]
            if not open_:
                break
            best = min(open_, key=lambda one: least[one] + one.made_again())
            if best in self._promised:
                return best
            self._promised[best] = min(self._hoped_by(best, way) for way in _least_idle(best))
        return None

    def _promises(self, one: Hope) -> Callable[[ScheduledStages], bool]:
        """Whether a step under a schedule may beat the best known, by the hoped-for seconds of its stages."""

        def promises(way: ScheduledStages) -> bool:
            faster = self._hoped_by(one, way) < self.seconds
            self.fared["slower as guessed from a first stage"] += not faster
            return faster

        return promises

    def _hoped_by(self, one: Hope, way: ScheduledStages) -> Seconds:
        """The estimated step under a schedule: from known stages of the same number, or hoped-for ones, corrected by how much
        longer the first planned one took in no more stages; infinite if there are fewer regions than stages, or one
        micro-batch.
        """
        schedule, stages = way
        cuts, asked = self.cuts(one.over, one.runs), replace(one.over.options, schedule=schedule, stages=stages)
        try:
            cut = cuts.chosen(one.over.mesh, one.over.axis, asked, one.runs)
        except ConstraintError:
            return math.inf
        shares = cuts.shares(cut.starts)
        if alike := self._alike.get((one.over, one.runs, cut.schedule.stages)):
            return replace(one, stages=alike).by(cut, shares)
        stages, longer = self._longer.get((one.over, one.runs), (0, 1.0))
        return one.by(cut, shares) * (longer if cut.schedule.stages >= stages else 1.0)

    def unlikely(self, steps: StageSteps, cut: Cut, over: PipelineAxis) -> Seconds:
        """The step if it cannot beat the best known even with one micro-batch in flight per stage, guessed from the first stage
        or from all; infinite if it may be faster.
        """
        if self.seconds == math.inf:
            return math.inf
        runs = steps.step.microbatches
        _, least = cut.waits_filled(guessed(next(over.planner.alone(steps, cut)), self.cuts(over, runs).shares(cut.starts)))
        if least < self.seconds:
            alone = self._alike[over, runs, cut.schedule.stages] = hoped(steps, cut, over.planner)
            _, least = cut.waits_filled(alone)
        if least < self.seconds:
            return math.inf
        self.fared["slower with one micro-batch in flight"] += 1
        return least

    def _found(self, made: StagedStep, over: PipelineAxis, asked: Options) -> bool:
        runs = made.cut.schedule.microbatches
        for one in self._hoped:
            if (one.over, one.runs) == (over, runs):
                longer = made.seconds / self._hoped_by(one, (asked.schedule, asked.stages))
                self._longer.setdefault((over, runs), (len(made.stages), max(1.0, longer)))
        self._alike[over, runs, len(made.stages)] = [one.without_messages for one in made.stage_seconds]
        return super()._found(made, over, asked)

    def _bound(self, mesh: Mesh) -> Seconds:
        """The lower bound on a step without stages. It is usually lowest with the fewest micro-batches, whose kernels are
        largest.
        """
        asked, bounds = self.options.microbatches, dict[int, Seconds]()
        numbers = list(doubled(counts(self.program))) if asked == AUTO else [int(asked)]
        if self.settings.deadline.passed:
            numbers = numbers[:1]
        self._climb(numbers, numbers[0], lambda runs: bounds.setdefault(runs, self._bounded(mesh, runs)))
        self._bounds.append((mesh, bounds))
        return min(bounds.values())

    def _bounded(self, mesh: Mesh, runs: int) -> Seconds:
        """The lower bound on a step without stages, in any memory; infinite if there is none."""
        options = replace(self.options, pipeline=None, microbatches=runs)
        try:
            return least_price(analysed(microbatches(self.program, runs), mesh, options), mesh, options, self.settings)
        except AutoparError as error:
            self.refused.append(error)
            return math.inf

    def _without_stages(self) -> None:
        """Plan without stages if the bound is below the best known, lowest bound first; on each mesh until one that fits is
        slower than the previous one.
        """
        for mesh, bounds in self._bounds:
            last, left = math.inf, sorted(bounds, key=bounds.__getitem__)
            paddings = PaddingExtent if self.options.strategy in PADDED else ()
            odd = any(padding.rooms(self.program, mesh) for padding in paddings)  # faster padded, maybe
            while left and (odd or bounds.get(left[0], 0.0) < self.seconds):
                found = self.whole(mesh, runs := left.pop(0))
                if last <= found < math.inf:
                    self.fared["left out after slower ones"] += len(left)
                    left.clear()
                last = found
                if found == math.inf and not left and self.short and self.options.microbatches == AUTO:
                    left = [more for more in doubled(counts(self.program)) if more > max(runs, *bounds)][:1]
            self.fared["slower without stages, by their bound"] += len(left)
        self._bounds.clear()


def _least_idle(one: Hope) -> list[ScheduledStages]:
    """The first schedule, and if the schedule is open also two stages per rank by the one with the smallest bubble."""
    first, *more = forms(one.over.options, one.over.ranks)
    return [first, *(way for way in more if way == (LEAST_IDLE, 2 * one.over.ranks))]


__all__ = ["LargePipelineSearch"]
