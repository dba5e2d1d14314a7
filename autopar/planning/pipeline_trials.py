"""Trials of pipelines one after the other: the best so far, the outcomes of the others, and what is reused.

    cut the mesh for so many ranks -> cut the program of so many micro-batches -> plan its stages, time the step

Subclasses choose what to try, and in which order: `pipeline_search` everything, `large_pipelines` what may be best.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from autopar.errors import AutoparError, BudgetError, ConstraintError, MeshError
from autopar.ir.device import Seconds
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.microbatches import microbatches
from autopar.passes.padding import PaddingExtent, padded
from autopar.pipeline.clock import clock_of
from autopar.plan.options import AUTO, Options
from autopar.plan.plan import Plan
from autopar.plan.stages import StageSteps
from autopar.planning.no_plan import explained
from autopar.planning.optimize import Optimized, solution_time
from autopar.planning.pipeline_checks import check_program
from autopar.planning.pipeline_plan import SlowerStagesError, StagedStep, no_faster, staged, written
from autopar.planning.pipeline_space import PipelineAxis, ScheduledStages, cut_mesh, given_microbatches, products_floor
from autopar.planning.pipeline_stages import WORTH, Cut, StageCuts
from autopar.planning.plan_search import best_variant, least_padded
from autopar.planning.planner import to_plan
from autopar.planning.schedule_file import is_file
from autopar.planning.stage_plans import StageBudgetError
from autopar.solver.highs import SlowerError, SolverError, TimeLimitError
from autopar.solver.settings import SearchSettings

MeshSizes = tuple[int, ...]
PlannedPipeline = tuple[StagedStep, PipelineAxis, Options]
NEAR = 0.05  # of the best step: what cuts made anew may save, 2 to 4% of those of GPT-3 and Llama-3 70B
RECUTS = 3  # times that the best stages are cut anew
MESSAGES = 0.05  # messages, in parts of what a stage computes, from which on stages are planned by those that hide, too


class PipelineTrials(ABC):
    """A search over the open choices of a pipeline, with what it knows.

    `found` are the stages of the best plan, with their axis and options; `without` is the best plan if it has none;
    `refused` why there were no plans.
    """

    even = False  # whether stages that are parts of known ones are taken to be equal
    hides = True  # whether all stages are planned by messages that hide, too

    def __init__(self, program: Program, options: Options, settings: SearchSettings) -> None:
        self.program, self.options, self.settings = program, options, settings
        self.seconds = math.inf
        self.without: Optimized | None = None  # stages
        self.found: PlannedPipeline | None = None
        self._planned: list[PlannedPipeline] = []
        self.fared: Counter[str] = Counter()
        self.refused: list[AutoparError] = []
        self._known_cuts: dict[tuple[int, MeshSizes], StageCuts] = {}  # by micro-batches, and the stages' mesh if it pads
        self._padding: dict[MeshSizes, PaddingExtent] = {}  # by the mesh of a stage
        self._products: dict[int, Seconds] = {}

    @abstractmethod
    def both(self, mesh: Mesh) -> None:
        """Search a mesh without stages, and in all ways to cut its outermost axis."""

    @abstractmethod
    def finish(self) -> None:
        """Try what was postponed, when all meshes are known."""

    @abstractmethod
    def numbers(self, over: PipelineAxis, products: Seconds) -> Seconds:
        """Search all numbers of micro-batches; `products` are a step's seconds at the devices' peak. Returns the best time."""

    @abstractmethod
    def number(self, over: PipelineAxis, runs: int) -> Seconds:
        """Search the schedules of so many micro-batches; returns the best time, infinite if there is no plan."""

    def unlikely(self, steps: StageSteps, cut: Cut, over: PipelineAxis) -> Seconds:
        """The step if cheap estimates show that it does not beat the best known; infinite if it may."""
        return math.inf

    def ways_to_cut(self, mesh: Mesh) -> list[int]:
        """How many ranks a pipeline over the outermost axis may have; none if the program has no stages."""
        try:
            check_program(self.program)
        except ConstraintError as error:
            self.refused.append(error)
            return []
        return [ranks for ranks in range(2, mesh.sizes[0] + 1) if mesh.sizes[0] % ranks == 0]

    def cut(self, mesh: Mesh, ranks: int) -> Seconds:
        """Search pipelines with so many ranks of the outermost axis; returns the best time, infinite if there are none."""
        try:
            cut = cut_mesh(mesh, ranks)
            return self.over(cut, cut.axes[0])
        except (ConstraintError, MeshError) as error:
            self.refused.append(error)
            return math.inf

    def over(self, mesh: Mesh, axis: str) -> Seconds:
        """Search all numbers of micro-batches and schedules over a pipeline axis; returns the best time."""
        over = PipelineAxis.of(mesh, axis, self.options, self.settings)
        given = given_microbatches(self.options)
        if given is not None:
            return self.number(over, given)
        if mesh.size not in self._products:  # of one device, however the mesh is cut
            self._products[mesh.size] = products_floor(self.program, mesh, self.options)
        return self.numbers(over, self._products[mesh.size])

    def whole(self, mesh: Mesh, runs: int | str) -> Seconds:
        """Plan without stages in so many micro-batches; returns the seconds, or the known ones if less; infinite if there is no
        plan.
        """
        options, known = replace(self.options, pipeline=None, microbatches=runs), self.seconds
        if self.ended:
            return math.inf
        try:
            found = best_variant(self.program, mesh, options, lambda phase: None, replace(self.settings, below=known))
        except SlowerError:
            self.fared["slower without stages, by their bound"] += 1
            return known
        except (BudgetError, ConstraintError, MeshError, SolverError) as error:
            self.refused.append(error)
            return math.inf
        seconds = solution_time(found.memory_model, found.solution)
        if seconds < self.seconds:
            self.seconds, self.without = seconds, found
        return min(seconds, known)

    def schedules(self, over: PipelineAxis, runs: int, ways: Iterable[ScheduledStages]) -> Seconds:
        """Search schedules of so many micro-batches; returns the best planned time, or else a lower bound on one of them."""
        known, slower, never = list[StagedStep](), math.inf, set[tuple[int, ...]]()
        if self.ended:
            return math.inf
        try:
            cuts = self.cuts(over, runs)
        except ConstraintError as error:
            self.refused.append(error)
            return math.inf
        for schedule, stages in ways:
            if self.ended:
                break
            asked = replace(over.options, schedule=schedule, stages=stages)
            try:
                cut = cuts.chosen(over.mesh, over.axis, asked, runs)
                if cut.starts in never:
                    self.fared["with a stage that fits by no schedule"] += 1
                    continue
                if no_faster(cut, known, self.seconds, even=self.even):
                    self.fared["no faster by the time of their schedule"] += 1
                    continue
                steps = cuts.steps(cut.starts)
                least = self.unlikely(steps, cut, over)
            except AutoparError as error:
                self.refused.append(error)
                continue
            if least < math.inf:
                slower = min(slower, least)
                continue
            planned = list[StagedStep]()
            for by in (over, over.hiding) if self.hides and self._messages(over, cuts, cut) > MESSAGES else (over,):
                try:
                    made = staged(steps, by.mesh, by.axis, cut, by.planner, self.seconds)
                except SlowerStagesError as error:
                    self.fared["slower by their first stages"] += 1
                    slower = min(slower, error.seconds)
                    continue
                except AutoparError as error:
                    self.refused.append(error)
                    if (
                        isinstance(error, StageBudgetError) and error.never
                    ):  # and none has fewer in flight than the first that is tried
                        never.add(cut.starts)
                        break
                    continue
                planned.append(made)
                self._found(made, by, asked)
            if self.hides and planned and (other := self._as_uncut(min(planned, key=_seconds), over, asked)):
                planned.append(other)
            known += planned
        return min((made.seconds for made in known), default=slower)

    def recut(self) -> None:
        """Cut stages again by their planned seconds: among those about as fast as the best, the ones that become fastest; and
        repeat while it helps.
        """
        first, known = self.seconds, dict[StagedStep, tuple[Cut, float]]()
        for _ in range(RECUTS):
            before, best = self.seconds, self._fastest_recut(known)
            if best is None:
                break
            made, over, asked = best
            cut, _ = known[made]
            known[made] = cut, math.inf
            self._again(self.cuts(over, cut.schedule.microbatches).steps(cut.starts), over, cut, asked)
            if self.seconds >= before:
                break
        self.fared["cut anew"] += self.seconds < first

    def _fastest_recut(self, known: dict[StagedStep, tuple[Cut, float]]) -> PlannedPipeline | None:
        """The fastest after a new cut, if that is worth it; `known` has cuts, and the fraction of the step that they take."""
        least, best = self.seconds, None
        for made, over, asked in [] if self.ended else self._planned:
            fixed = is_file(asked.schedule) or not (asked.stages == AUTO or isinstance(asked.stages, int))
            if fixed or made.seconds >= (1 + NEAR) * self.seconds:
                continue
            if made not in known:
                known[made] = self.cuts(over, made.cut.schedule.microbatches).recut(made.cut, made.stage_seconds)
            _, share = known[made]
            if share < 1 - WORTH and share * made.seconds < least:
                least, best = share * made.seconds, (made, over, asked)
        return best

    def hide(self) -> None:
        """Plan the best stages again assuming hidden messages, if their step would be faster without any."""
        if self.found is None or self.ended:
            return
        made, over, asked = self.found
        if (
            clock_of(made.cut.schedule).seconds([one.without_messages for one in made.stage_seconds])
            > (1 - WORTH) * made.seconds
        ):
            return
        self._again(made.steps, over.hiding, made.cut, asked)

    def uncut(self) -> None:
        """Plan the best stages again, sending values in the layouts of a whole step."""
        if self.found is not None and not self.ended:
            self._as_uncut(*self.found)

    def _as_uncut(self, made: StagedStep, over: PipelineAxis, asked: Options) -> StagedStep | None:
        """The stages with messages in the layouts of a whole step, if that may be faster: a stage planned after another one
        adapts to what it receives, which may be expensive for all that follow. Only stages that would send or receive another
        layout can be faster.
        """
        cut, planner, stages = made.cut, over.planner, made.stage_seconds
        if asked.strategy != AUTO or planner.mesh.size == 1:
            return None
        try:
            whole = planner.uncut(made.steps.step, cut.repeats)
            share = whole.seconds / sum(cut.repeats * one.busy + one.once for one in stages)
            sent = {crossing.value: whole.layouts[crossing.value] for crossing in made.crossings}
            other = [one.stage for one in made.crossings if sent[one.value] != one.layout]
            touched = len({*other, *(stage + 1 for stage in other)}) / len(stages)
            least = 1 - (1 - share) * touched
            if least >= 1 - WORTH or least * made.seconds >= self.seconds:
                return None
        except AutoparError as error:
            self.refused.append(error)
            return None
        return self._again(made.steps, replace(over, planner=planner.sending(sent)), cut, asked)

    def _again(self, steps: StageSteps, over: PipelineAxis, cut: Cut, asked: Options) -> StagedStep | None:
        """The best stages planned in another way; None if they do not fit or are slower."""
        try:
            made = staged(steps, over.mesh, over.axis, cut, over.planner, self.seconds)
        except AutoparError as error:
            self.refused.append(error)
            return None
        self._found(made, over, asked)
        return made

    def _messages(self, over: PipelineAxis, cuts: StageCuts, cut: Cut) -> float:
        """The largest ratio of messages to computing that a stage may have."""
        return cuts.messages(cut.starts, over.planner.link, over.planner.mesh.size)

    def _found(self, made: StagedStep, over: PipelineAxis, asked: Options) -> bool:
        """Whether planned stages are the best so far."""
        self.fared["planned"] += 1
        self._planned.append((made, over, asked))
        if made.seconds >= self.seconds:
            return False
        self.seconds, self.without, self.found = made.seconds, None, (made, over, asked)
        return True

    def cuts(self, over: PipelineAxis, runs: int) -> StageCuts:
        """The cuts of a step of so many micro-batches, with the best padding on the mesh of a stage."""
        mesh, sizes = over.planner.mesh, over.planner.mesh.sizes
        if sizes not in self._padding:
            step = microbatches(self.program, runs)
            self._padding[sizes] = least_padded(step, mesh, over.planner.options, self.settings)
        padding = self._padding[sizes]
        known = runs, sizes if padding is not PaddingExtent.NONE else ()
        if known not in self._known_cuts:
            assert mesh.device is not None, "a mesh is planned with its device"
            step = microbatches(self.program, runs)
            self._known_cuts[known] = StageCuts(padded(step, padding.rooms(step.program, mesh)), mesh.device)
        return self._known_cuts[known]

    @property
    def ended(self) -> bool:
        """Whether the deadline has come after at least one trial; with a plan, whether the remaining time is reserved for the
        named strategies.
        """
        deadline = self.settings.deadline
        if self.seconds < math.inf:
            return deadline.earlier(self.settings.named_share).passed
        return deadline.passed and bool(self.refused)

    @property
    def short(self) -> bool:
        """Whether the last refusal was for lack of memory."""
        return bool(self.refused) and isinstance(self.refused[-1], BudgetError)

    def plan(self) -> Plan:
        """The best plan found. If there is none, raises the error of the nearest miss."""
        fared = f"{self.fared.pop('planned', 0)} pipelines planned"
        searched = "; ".join([fared, *(f"{count} {how}" for how, count in self.fared.items() if count)])
        if self.ended or self.settings.deadline.passed:
            searched += f"; until {self.settings.deadline.text}"
        if self.without is not None:
            return replace(to_plan(self.without, self.options), searched=f"no stages is best: {searched}")
        if self.found is None:
            if self.settings.deadline.passed:
                raise TimeLimitError(self.settings.deadline)
            short = [error for error in self.refused if isinstance(error, BudgetError)]
            if not short:
                raise self.refused[0]
            raise explained(short[0] if self.options.pipeline == AUTO else short[-1])
        made, over, _ = self.found
        open_ = AUTO in (self.options.pipeline, self.options.microbatches, self.options.schedule)
        return written(made, over.planner, self.options, searched if open_ else "")


def _seconds(made: StagedStep) -> Seconds:
    return made.seconds


__all__ = ["PipelineTrials"]
