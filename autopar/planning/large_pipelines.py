"""The search for a pipeline of a large program, which is not searched to the end: guess, settle, refine.

    guess      the first stage is planned with one micro-batch in flight and plenty of memory; the others are guessed from it.
               More micro-batches, or ranks, are left out when the last ones made the step longer, and fewer when more made it
               shorter
    settle     what may be best by 1f1b is planned, with one in flight and with all of them, until the others are slower
    refine     other schedules are tried with the numbers that were best under 1f1b
    cut anew   the stages of the best plan, by what they were found to take
    uncut      they are planned with what they send in the layouts of the whole program, where that is cheaper

Without stages a step is bounded once one number of ranks is guessed. It is planned then where its bound is below all that these
promise, and else when stages are: most numbers of micro-batches are slower by their bound by then.

A time limit ends the search: what is most promising comes first, and nothing new is begun with the share of it that `solved`
keeps for the named strategies, once there is a plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from autopar.errors import AutoparError, ConstraintError
from autopar.ir.mesh import Mesh, Seconds
from autopar.ir.program import Program
from autopar.passes.microbatches import counts, microbatches
from autopar.passes.padding import rooms
from autopar.pipeline.clock import StageSeconds
from autopar.plan.options import AUTO, Options
from autopar.plan.stages import StageSteps
from autopar.planning.optimize import analysed, least_price
from autopar.planning.pipeline_plan import guessed, hoped
from autopar.planning.pipeline_space import Hope, PipelineAxis, ScheduledStages, climbed, doubled, forms, nearest
from autopar.planning.pipeline_stages import Cut
from autopar.planning.pipeline_trials import PipelineTrials
from autopar.planning.plan_search import PADDED
from autopar.solver.settings import SearchSettings

FULL = 4  # micro-batches for each rank from which the search goes up or down at first
REFINED = 3  # pairs of ranks and micro-batches for which all schedules are tried: of Llama-3 70B on 512 the third one wins
LEAST_IDLE = "zb-v"  # the schedule of which a step may be shortest


class LargePipelineSearch(PipelineTrials):
    """The search for a pipeline of a large program: what is guessed of it, what is hoped for and what is left for the end."""

    even, hides = True, False

    def __init__(self, program: Program, options: Options, settings: SearchSettings) -> None:
        super().__init__(program, options, settings)
        self._full: float = FULL
        self._hoped: list[Hope] = []  # what 1f1b may take
        self._swept: list[Hope] = []  # and what it takes
        self._alike: dict[tuple[PipelineAxis, int, int], Sequence[StageSeconds]] = {}  # by micro-batches and number of stages
        self._bounds: list[tuple[Mesh, dict[int, Seconds]]] = []  # without stages, by micro-batches

    def both(self, mesh: Mesh) -> None:
        """The number of ranks that is likely best says what stages promise: if a step without them is bounded below that, it
        is planned next, and the other numbers are searched afterwards."""
        numbers, guess = self.ways_to_cut(mesh), functools.cache(partial(self.cut, mesh))
        near = math.sqrt(numbers[-1]) if numbers else 1.0
        if numbers:
            guess(numbers[nearest(numbers, near)])
        if self._bound(mesh) < self._promised():
            self._without_stages()
        elif self.settings.deadline.seconds < math.inf:  # by which there is to be a plan
            self._settle()
        if numbers:
            self._climb(numbers, near, guess)
        self._settle()

    def finish(self) -> None:
        self._settle()
        self._refine()
        self._without_stages()
        self.recut()
        self.hide()
        self.uncut()

    def numbers(self, over: PipelineAxis, products: Seconds) -> Seconds:
        def seconds(runs: int) -> Seconds:
            return math.inf if self.below_floor(over, runs, products) else self.number(over, runs)

        best, runs = self._climb(list(doubled(counts(self.program))), self._full * over.ranks, seconds)
        if best < math.inf:
            self._full = runs / over.ranks  # other numbers of ranks are fastest with about as many for each
        return best

    def number(self, over: PipelineAxis, runs: int) -> Seconds:
        """What 1f1b may take; its stages are left for `_settle`."""
        return self._alone(over, runs)

    @property
    def ended(self) -> bool:
        """Whether the deadline has come; not yet where there is no plan, and stages are hoped for that may be one."""
        return super().ended and (self.seconds < math.inf or not self._hoped)

    def _climb(self, numbers: Sequence[int], near: float, seconds: Callable[[int], Seconds]) -> tuple[Seconds, int]:
        """The best time over numbers of micro-batches, or of ranks, and the number that has it; see `climbed`."""
        best, number, left = climbed(numbers, near, seconds, lambda: self.short)
        self.fared["left out after slower ones"] += left
        return best, number

    def _alone(self, over: PipelineAxis, runs: int, *, guess: bool = True) -> Seconds:
        """What a step takes by the first schedule if each stage holds one micro-batch at a time, a `guess` by the first stage
        or by all of them; infinite if there is none."""
        if self.ended or (guess and self._hoped and self.settings.deadline.passed):
            return math.inf
        schedule, count = next(forms(over.options, over.ranks))
        try:
            cuts = self.cuts(over, runs)
            cut = cuts.chosen(over.mesh, over.axis, replace(over.options, schedule=schedule, stages=count), runs)
            steps = cuts.steps(cut.starts)
            stages = guessed(steps, cut, cuts.shares(cut.starts), over.beyond) if guess else hoped(steps, cut, over.planner)
        except AutoparError as error:
            self.refused.append(error)
            return math.inf
        _, least = cut.waits_filled(stages)
        self._hoped.append(Hope(seconds=least, over=over, runs=runs, stages=stages, guessed=guess))
        return least

    def _settle(self) -> None:
        """Plan the stages by the first schedule, those first that may be fastest, until the others cannot be
        faster. Where all micro-batches in flight do not fit, more of them, which are smaller, may."""
        tried = {(one.over, one.runs) for one in (*self._hoped, *self._swept)}
        while self._hoped:
            best = min(self._hoped, key=_seconds)
            over, runs = best.over, best.runs
            if best.seconds >= self.seconds:
                self.fared["slower with one micro-batch in flight"] += 1
                self._hoped.remove(best)
                self._swept.append(best)
                continue
            if best.guessed and not self.settings.deadline.passed:
                found = self._alone(over, runs, guess=False)
            elif (found := self.schedules(over, runs, [next(forms(over.options, over.ranks))])) < math.inf:
                self._swept.append(replace(best, seconds=found))
            self._hoped.remove(best)
            if found == math.inf and over.options.microbatches == AUTO and self.short:
                more = next((other for other in counts(self.program) if other >= 2 * runs), runs)
                if (over, more) not in tried:
                    tried.add((over, more))
                    self._alone(over, more)

    def _promised(self) -> Seconds:
        """The least that a step may take in the stages that are hoped for, by 1f1b or by the schedule that idles least."""
        least = min([self.seconds, *map(_seconds, self._hoped)])
        for one in sorted(self._hoped, key=Hope.busy):
            if one.busy() >= least:
                break
            least = min(least, self._promise(one, _least_idle(one)))
        return least

    def _promises(self, one: Hope) -> Callable[[ScheduledStages], bool]:
        """Whether a step by a schedule may be faster than what is known, by what stages are hoped to take."""

        def promises(way: ScheduledStages) -> bool:
            try:
                faster = self._hoped_by(one, way) < self.seconds
            except ConstraintError:  # fewer regions than stages, or one micro-batch
                return True
            self.fared["slower as guessed from a first stage"] += not faster
            return faster

        return promises

    def _hoped_by(self, one: Hope, way: ScheduledStages) -> Seconds:
        """What a step may take by another schedule than the first: by known stages that are as many, or what is hoped for."""
        schedule, stages = way
        cuts, asked = self.cuts(one.over, one.runs), replace(one.over.options, schedule=schedule, stages=stages)
        cut = cuts.chosen(one.over.mesh, one.over.axis, asked, one.runs)
        alike = self._alike.get((one.over, one.runs, cut.schedule.stages), one.stages)
        return replace(one, stages=alike).by(cut, cuts.shares(cut.starts))

    def _promise(self, one: Hope, ways: Iterable[ScheduledStages]) -> Seconds:
        """The least that a step may take by the first schedule or one of these, by what stages are hoped to take."""
        least = one.seconds
        for way in ways:
            with suppress(ConstraintError):  # fewer regions than stages, or one micro-batch
                least = min(least, self._hoped_by(one, way))
        return least

    def _refine(self) -> None:
        """Try all schedules where 1f1b was fastest, first where one of them promises most."""
        if self.ended:  # or else promises would be worked out for nothing
            return
        fastest = sorted(self._swept, key=_seconds)[:REFINED]
        for best in sorted(fastest, key=lambda one: self._promise(one, forms(one.over.options, one.over.ranks))):
            self.schedules(best.over, best.runs, filter(self._promises(best), forms(best.over.options, best.over.ranks)))

    def unlikely(self, steps: StageSteps, cut: Cut, over: PipelineAxis) -> Seconds:
        """What a step takes that is no faster than what is known even with one micro-batch in flight a stage, as guessed from
        the first one or by all; infinite where it may be faster."""
        if self.seconds == math.inf:
            return math.inf
        runs = steps.step.microbatches
        _, least = cut.waits_filled(guessed(steps, cut, self.cuts(over, runs).shares(cut.starts), over.planner))
        if least < self.seconds:
            alone = self._alike[over, runs, cut.schedule.stages] = hoped(steps, cut, over.planner)
            _, least = cut.waits_filled(alone)
        if least < self.seconds:
            return math.inf
        self.fared["slower with one micro-batch in flight"] += 1
        return least

    def _bound(self, mesh: Mesh) -> Seconds:
        """What a step without stages takes at least. The bound is least in the fewest micro-batches, as a rule: there kernels
        are largest."""
        asked, bounds = self.options.microbatches, dict[int, Seconds]()
        numbers = list(doubled(counts(self.program))) if asked == AUTO else [int(asked)]
        if self.settings.deadline.passed:
            numbers = numbers[:1]
        self._climb(numbers, numbers[0], lambda runs: bounds.setdefault(runs, self._bounded(mesh, runs)))
        self._bounds.append((mesh, bounds))
        return min(bounds.values())

    def _bounded(self, mesh: Mesh, runs: int) -> Seconds:
        """What a step without stages takes at least, in whatever memory; infinite if there is none."""
        options = replace(self.options, pipeline=None, microbatches=runs)
        try:
            return least_price(analysed(microbatches(self.program, runs), mesh, options), mesh, options, self.settings)
        except AutoparError as error:
            self.refused.append(error)
            return math.inf

    def _without_stages(self) -> None:
        """Plan without stages where its bound is below what is known, the least bound first; on each mesh until
        one that fits is slower than the one before."""
        for mesh, bounds in self._bounds:
            last, left = math.inf, sorted(bounds, key=bounds.__getitem__)
            odd = self.options.strategy in PADDED and bool(rooms(self.program, mesh.sizes, parts=True))  # faster padded, maybe
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


def _seconds(tried: Hope) -> Seconds:
    return tried.seconds


def _least_idle(one: Hope) -> list[ScheduledStages]:
    """Two stages a rank by the schedule that idles least, where this is open."""
    return [way for way in forms(one.over.options, one.over.ranks) if way == (LEAST_IDLE, 2 * one.over.ranks)]


__all__ = ["LargePipelineSearch"]
