"""The search for a pipeline: how many ranks it has, how many micro-batches, and by which schedule they pass.

    for each number of ranks that is left open, 1 (no stages) first       `Mesh.cut`: the outermost axis
        for each number of micro-batches, the fewest first                passed over below its floor
            for 1f1b, with forwards ahead, zb-h1, interleaved, zb-v, gpipe    passed over where the clock says: no faster
                plan the stages, time the step

The floor is proven. The products of a step take F seconds on all devices at their peak. With t_s the seconds of stage s for one
of m micro-batches, each rank with one stage and backwards in one piece, `stage_search` has T >= sum_{q<s} t_q + m t_s for every
s; of stages that together take p F / m the least such T has all of these equal:

    T >= p F / (m (1 - (1 - 1/m)^p))              and T >= F with several stages a rank, or with backwards in halves

Large programs are not searched to the end: more micro-batches, or ranks, are left out when the last ones made the step longer,
and fewer when more made it shorter. By then only the first stage is planned, with one micro-batch in flight and plenty of
memory; the others are guessed from it. What may be best by 1f1b is planned next, with one in flight and with all of them, until
what is left is slower even so, and other schedules with the numbers that were best under 1f1b. Without stages a step is bounded
first; it is planned before stages are where its bound is below all that these promise, and else afterwards.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from torch import nn

from autopar.capture.assumptions import ASSUMED
from autopar.errors import AutoparError, BudgetError, ConstraintError, MeshError
from autopar.ir.mesh import Mesh, Seconds
from autopar.ir.program import Program
from autopar.passes.microbatches import counts, microbatches
from autopar.passes.padding import rooms
from autopar.pipeline.clock import Clock
from autopar.plan.options import AUTO, Options
from autopar.plan.plan import Plan
from autopar.plan.stages import StageSteps, loss_of
from autopar.planning.mesh_shapes import LARGE
from autopar.planning.optimize import Optimized, analysed, least_price, solution_time
from autopar.planning.pipeline_plan import SlowerStagesError, StagedStep, guessed, hoped, no_faster, staged, written
from autopar.planning.pipeline_space import (
    Hope,
    PipelineAxis,
    ScheduledStages,
    climbed,
    cut_mesh,
    doubled,
    forms,
    products_floor,
)
from autopar.planning.pipeline_stages import Cut, StageCuts, without_axis
from autopar.planning.plan_search import PADDED, best_shape, best_variant, limited
from autopar.planning.planner import connected_meshes, read_program, to_plan
from autopar.planning.schedule_file import is_file, read_schedule
from autopar.planning.stage_plans import StagePlanner
from autopar.solver.highs import SlowerError, SolverError, TimeLimitError
from autopar.solver.settings import DEFAULTS, SearchSettings

FULL = 4  # micro-batches for each rank from which the search of such a program goes up or down at first
REFINED = 2  # pairs of ranks and micro-batches of such a program for which all schedules are tried
LEAST_IDLE = "zb-v"  # the schedule of which a step may be shortest


def make_pipeline_plan(model: nn.Module, sample_input: object, mesh: object, options: Options) -> Plan:
    """Capture a model and plan it in stages; see `autopar.plan`."""
    settings = limited(DEFAULTS, options)
    captured = read_program(model, sample_input, options)
    with settings.deadline.heard():
        return search_pipeline(captured.program, connected_meshes(mesh, options, captured.program), options, settings).plan()


def plan_on(program: Program, meshes: Sequence[Mesh], options: Options) -> Plan:
    """The fastest plan of a captured program on any of some meshes, with stages if they are asked for."""
    if options.pipeline is not None:
        return search_pipeline(program, meshes, options).plan()
    return to_plan(best_shape(program, meshes, options, lambda phase: None), options)


def plan_pipeline(program: Program, mesh: Mesh, options: Options, settings: SearchSettings = DEFAULTS) -> Plan:
    """The plan of a captured program in stages, or in none where that is open, on a mesh with device and links.

    Raises what planning raises, and ConstraintError or MeshError for stages, a schedule or an axis that there are not.
    """
    return search_pipeline(program, (mesh,), options, settings).plan()


def search_pipeline(
    program: Program, meshes: Sequence[Mesh], options: Options, settings: SearchSettings = DEFAULTS
) -> PipelineSearch:
    """The search over one mesh, or several shapes of one, run to its end."""
    _check(options)
    search = PipelineSearch(program, options, limited(settings, options))
    for mesh in meshes:
        if options.pipeline == AUTO:
            search.both(mesh)
        else:
            assert options.pipeline is not None, "a pipeline is asked for"
            _pipelined(program)
            search.over(mesh, options.pipeline)
    search.settle()
    search.refine()
    search.whole()
    search.fared["shapes of the mesh"] += len(meshes) if len(meshes) > 1 else 0
    return search


def _check(options: Options) -> None:
    """Raise ConstraintError for options that a pipeline does not have."""
    if options.dynamic:
        raise ConstraintError("a pipeline has no sizes that vary yet", fix="drop dynamic= or pipeline=")
    runs = options.microbatches
    if runs != AUTO and (isinstance(runs, bool) or not isinstance(runs, int)):
        raise ConstraintError(f"microbatches={runs!r} is not a number", fix=f"how many a step has, or {AUTO!r}")
    if options.pipeline != AUTO:
        return
    if options.stages != AUTO:
        what = f"stages={options.stages!r} are of the ranks of an axis, and pipeline={AUTO!r} chooses how many these are"
        raise ConstraintError(what, fix="pipeline= the name of the axis, or no stages=")
    for name, line in options.constraints.items():
        if line.partition(",")[0].strip() != "*":
            what = f"the constraint {name!r} names a layout on the outermost axis, which pipeline={AUTO!r} may cut"
            raise ConstraintError(what, layout=line, fix="* for that axis, or pipeline= the name of an axis")


def _pipelined(program: Program) -> None:
    """Raise ConstraintError for a program that has no stages."""
    if any(value.requires_grad for value in program.inputs):
        raise ConstraintError("a pipeline computes no gradients of inputs", fix="a sample whose tensors require none")
    if any(output.path.startswith(ASSUMED) for output in program.outputs):
        raise ConstraintError("a pipeline does not compare what was assumed yet", fix="drop assume= or pipeline=")
    loss_of(program)


class PipelineSearch:
    """The best that was found so far, how the others fared, and what is used again.

    `found` are the stages of the best plan, with their planner and options; `without` is the best plan if it has none.
    """

    def __init__(self, program: Program, options: Options, settings: SearchSettings) -> None:
        self.settings = settings
        self.program, self.options, self.large = program, options, len(program.ops) > LARGE
        self.seconds = math.inf
        self.without: Optimized | None = None  # stages
        self.found: tuple[StagedStep, StagePlanner, Options] | None = None
        self.fared: Counter[str] = Counter()
        self.refused: list[AutoparError] = []
        self._known_cuts: dict[int, StageCuts] = {}
        self._full: float = FULL
        self._hoped: list[Hope] = []  # of a large program: what 1f1b may take
        self._swept: list[Hope] = []  # and what it takes
        self._bounds: list[tuple[Mesh, dict[int, Seconds]]] = []  # of a large program without stages, by micro-batches

    def both(self, mesh: Mesh) -> None:
        """Plan without stages and with them: of a large program stages first, unless it is bounded without them below all that
        they promise. Else most plans without stages are proven slower by their bound in the end."""
        if not self.large:
            self._whole(mesh, self.options.microbatches)
            self.cuts(mesh)
            return
        self.cuts(mesh)
        asked, bounds = self.options.microbatches, dict[int, Seconds]()
        numbers = list(doubled(counts(self.program))) if asked == AUTO else [int(asked)]
        self._climb(numbers, numbers[-1] / mesh.sizes[0], lambda runs: bounds.setdefault(runs, self._bounded(mesh, runs)))
        self._bounds.append((mesh, bounds))
        if min(bounds.values()) < self._promised():
            self.whole()
        self.settle()

    def _bounded(self, mesh: Mesh, runs: int) -> Seconds:
        """What a step without stages takes at least, in whatever memory; infinite if there is none."""
        options = replace(self.options, pipeline=None, microbatches=runs)
        if self._ended():
            return math.inf
        try:
            return least_price(analysed(microbatches(self.program, runs), mesh, options), mesh, options, self.settings)
        except AutoparError as error:
            self.refused.append(error)
            return math.inf

    def whole(self) -> None:
        """Plan a large program without stages where its bound is below what is known, the least bound first; on each mesh until
        one that fits is slower than the one before."""
        for mesh, bounds in self._bounds:
            last, left = math.inf, sorted(bounds, key=bounds.__getitem__)
            odd = self.options.strategy in PADDED and bool(rooms(self.program, mesh.sizes, parts=True))  # faster padded, maybe
            while left and (odd or bounds.get(left[0], 0.0) < self.seconds):
                found = self._whole(mesh, runs := left.pop(0))
                if last <= found < math.inf:
                    self.fared["left out after slower ones"] += len(left)
                    left.clear()
                last = found
                if found == math.inf and not left and self._short() and self.options.microbatches == AUTO:
                    left = [more for more in doubled(counts(self.program)) if more > max(runs, *bounds)][:1]
            self.fared["slower without stages, by their bound"] += len(left)
        self._bounds.clear()

    def _whole(self, mesh: Mesh, runs: int | str) -> Seconds:
        """Plan without stages in so many micro-batches: seconds, or those that are known already where they are less; infinite
        if there is no plan."""
        options, known = replace(self.options, pipeline=None, microbatches=runs), self.seconds
        if self._ended():
            return math.inf
        try:
            found = best_variant(self.program, mesh, options, lambda phase: None, replace(self.settings, below=self.seconds))
        except SlowerError:
            self.fared["slower without stages, by their bound"] += 1
            return known
        except (BudgetError, ConstraintError, MeshError, SolverError) as error:
            self.refused.append(error)
            return math.inf
        seconds = solution_time(found.formulated, found.solution)
        if seconds < self.seconds:
            self.seconds, self.without = seconds, found
        return min(seconds, known)

    def cuts(self, mesh: Mesh) -> None:
        """Search all ways to cut the outermost axis."""
        try:
            _pipelined(self.program)
        except ConstraintError as error:
            self.refused.append(error)
            return
        numbers = [n for n in range(2, mesh.sizes[0] + 1) if mesh.sizes[0] % n == 0]
        if self.large and numbers:
            self._climb(numbers, math.sqrt(numbers[-1]), lambda ranks: self._cut(mesh, ranks))
            return
        for ranks in numbers:
            self._cut(mesh, ranks)

    def _cut(self, mesh: Mesh, ranks: int) -> Seconds:
        """Search the pipelines of so many ranks of the outermost axis; the best time there, infinite if there are none."""
        try:
            cut = cut_mesh(mesh, ranks)
            return self.over(cut, cut.axes[0])
        except (ConstraintError, MeshError) as error:
            self.refused.append(error)
            return math.inf

    def over(self, mesh: Mesh, axis: str) -> Seconds:
        """Search all numbers of micro-batches and schedules over an axis that has stages; the best time there, of a large
        program by 1f1b with one micro-batch in flight."""
        over, options = PipelineAxis.of(mesh, axis, self.options, self.settings), self.options
        if isinstance(options.microbatches, int):
            return self._number(over, options.microbatches, 0.0)
        if is_file(options.schedule):
            return self._number(over, read_schedule(options.schedule).microbatches, 0.0)
        floor, numbers = products_floor(self.program, mesh, options), list(counts(self.program))
        if not self.large:
            return min(self._number(over, runs, floor) for runs in numbers)
        best, runs = self._climb(list(doubled(numbers)), self._full * over.ranks, lambda runs: self._number(over, runs, floor))
        if best < math.inf:
            self._full = runs / over.ranks  # other numbers of ranks are fastest with about as many for each
        return best

    def _climb(self, numbers: Sequence[int], near: float, seconds: Callable[[int], Seconds]) -> tuple[Seconds, int]:
        """The best time over numbers of micro-batches, or of ranks, and the number that has it; see `climbed`."""
        best, number, left = climbed(numbers, near, seconds, self._short)
        self.fared["left out after slower ones"] += left
        return best, number

    def _short(self) -> bool:
        """Whether what was refused last does not fit."""
        return bool(self.refused) and isinstance(self.refused[-1], BudgetError)

    def _number(self, over: PipelineAxis, runs: int, products: Seconds) -> Seconds:
        """Search the schedules of so many micro-batches; their best time, infinite if the floor is above what is known. Those
        of a large program are left for `settle`, unless there is a deadline, by which there is to be a plan."""
        if over.floor(products, runs) >= self.seconds:
            self.fared["slower by their floor"] += 1
            return math.inf
        if not self.large:
            return self._schedules(over, runs, forms(over.options, over.ranks))
        least = self._alone(over, runs)
        if self.settings.deadline.seconds < math.inf:
            self.settle()
        return least

    def _alone(self, over: PipelineAxis, runs: int, *, guess: bool = True) -> Seconds:
        """What a step takes by the first schedule if each stage holds one micro-batch at a time, a `guess` by the first stage
        or by all of them; infinite if there is none."""
        if self._ended():
            return math.inf
        schedule, count = next(forms(over.options, over.ranks))
        try:
            cuts = self._cuts(over, runs)
            cut = cuts.chosen(over.mesh, over.axis, replace(over.options, schedule=schedule, stages=count), runs)
            steps = cuts.steps(cut.starts)
            stages = guessed(steps, cut, cuts.shares(cut.starts), over.beyond) if guess else hoped(steps, cut, over.planner)
        except AutoparError as error:
            self.refused.append(error)
            return math.inf
        least = Clock(cut.schedule).seconds(stages)
        self._hoped.append(Hope(seconds=least, over=over, runs=runs, stages=stages, guessed=guess))
        return least

    def settle(self) -> None:
        """Plan the stages of a large program by the first schedule, those first that may be fastest, until the others cannot be
        faster. Where all micro-batches in flight do not fit, more of them, which are smaller, may."""
        tried = {(one.over, one.runs) for one in (*self._hoped, *self._swept)}
        while self._hoped:
            best = min(self._hoped, key=_seconds)
            self._hoped.remove(best)
            over, runs = best.over, best.runs
            if best.seconds >= self.seconds:
                self.fared["slower with one micro-batch in flight"] += 1
                self._swept.append(best)
                continue
            if best.guessed:
                found = self._alone(over, runs, guess=False)
            elif (found := self._schedules(over, runs, [next(forms(over.options, over.ranks))])) < math.inf:
                self._swept.append(replace(best, seconds=found))
            if found == math.inf and over.options.microbatches == AUTO and self._short():
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
            with suppress(ConstraintError):  # fewer regions than stages, or one micro-batch
                least = min([least, *(self._hoped_by(one, way) for way in _least_idle(one))])
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
        """What a step may take by another schedule than the first, by what is hoped for of its stages."""
        schedule, stages = way
        cuts, asked = self._cuts(one.over, one.runs), replace(one.over.options, schedule=schedule, stages=stages)
        cut = cuts.chosen(one.over.mesh, one.over.axis, asked, one.runs)
        return one.by(cut.schedule, cuts.shares(cut.starts))

    def refine(self) -> None:
        """Try all schedules of a large program where 1f1b was fastest."""
        for best in sorted(self._swept, key=_seconds)[:REFINED]:
            self._schedules(best.over, best.runs, filter(self._promises(best), forms(best.over.options, best.over.ranks)))

    def _schedules(self, over: PipelineAxis, runs: int, ways: Iterable[ScheduledStages]) -> Seconds:
        """Search schedules of so many micro-batches; the best time of those that were planned, or else what one of them takes
        at least."""
        known, slower = list[StagedStep](), math.inf
        if self._ended():
            return math.inf
        try:
            cuts = self._cuts(over, runs)
        except ConstraintError as error:
            self.refused.append(error)
            return math.inf
        for schedule, stages in ways:
            if self._ended():
                break
            asked = replace(over.options, schedule=schedule, stages=stages)
            try:
                cut = cuts.chosen(over.mesh, over.axis, asked, runs)
                if no_faster(cut, known, self.seconds, even=self.large):
                    self.fared["no faster by the time of their schedule"] += 1
                    continue
                steps = cuts.steps(cut.starts)
                if self.large and self.seconds < math.inf:
                    least = self._slower(steps, cut, over, cuts.shares(cut.starts))
                    if least < math.inf:
                        self.fared["slower with one micro-batch in flight"] += 1
                        slower = min(slower, least)
                        continue
                made = staged(steps, over.mesh, over.axis, cut, over.planner, self.seconds)
            except SlowerStagesError as error:
                self.fared["slower by their first stages"] += 1
                slower = min(slower, error.seconds)
                continue
            except AutoparError as error:
                self.refused.append(error)
                continue
            self.fared["planned"] += 1
            known.append(made)
            if made.seconds < self.seconds:
                self.seconds, self.without, self.found = made.seconds, None, (made, over.planner, asked)
        return min((made.seconds for made in known), default=slower)

    def _slower(self, steps: StageSteps, cut: Cut, over: PipelineAxis, shares: Sequence[float]) -> Seconds:
        """What a step takes that is no faster than what is known even with one micro-batch in flight a stage, as guessed from
        the first one or by all; infinite where it may be faster."""
        for known in (partial(guessed, shares=shares), hoped):
            least = Clock(cut.schedule).seconds(known(steps, cut, planner=over.planner))
            if least >= self.seconds:
                return least
        return math.inf

    def _cuts(self, over: PipelineAxis, runs: int) -> StageCuts:
        """The cuts of a step of so many micro-batches, for all meshes, whose device is one."""
        if runs not in self._known_cuts:
            assert over.mesh.device is not None, "a mesh is planned with its device"
            self._known_cuts[runs] = StageCuts(microbatches(self.program, runs), over.mesh.device)
        return self._known_cuts[runs]

    def _ended(self) -> bool:
        """Whether the deadline has come, and something was tried."""
        return self.settings.deadline.passed and (self.seconds < math.inf or bool(self.refused))

    def plan(self) -> Plan:
        """The plan of the best that was found. Raises the error of what is nearest to one, if nothing was."""
        fared = f"{self.fared.pop('planned', 0)} pipelines planned"
        searched = "; ".join([fared, *(f"{count} {how}" for how, count in self.fared.items() if count)])
        if self.settings.deadline.passed:
            searched += f"; until {self.settings.deadline.text}"
        if self.without is not None:
            return replace(to_plan(self.without, self.options), searched=f"no stages is best: {searched}")
        if self.found is None:
            if self.settings.deadline.passed:
                raise TimeLimitError(self.settings.deadline)
            short = [error for error in self.refused if isinstance(error, BudgetError)]
            if not short:
                raise self.refused[0]
            raise short[0] if self.options.pipeline == AUTO else short[-1]
        made, planner, _ = self.found
        self._warn(made)
        open_ = AUTO in (self.options.pipeline, self.options.microbatches, self.options.schedule)
        return written(made, planner, self.options, searched if open_ else "")

    def _warn(self, made: StagedStep) -> None:
        """Warn of parameters that a plan without stages could pad, and that are whole in stages."""
        if self.options.strategy not in PADDED or self.options.pipeline == AUTO:
            return
        odd = rooms(made.steps.step.program, without_axis(made.mesh, made.axis).sizes)
        if odd:
            error = ConstraintError(
                "dims that the mesh does not divide are not padded in pipeline stages: planned whole there",
                parameters=", ".join(list(odd)[:4]),
                fix="sizes that the axes divide, or no pipeline",
            )
            warnings.warn(str(error), stacklevel=4)


def _seconds(tried: Hope) -> Seconds:
    return tried.seconds


def _least_idle(one: Hope) -> list[ScheduledStages]:
    """Two stages a rank by the schedule that idles least, where this is open."""
    return [way for way in forms(one.over.options, one.over.ranks) if way == (LEAST_IDLE, 2 * one.over.ranks)]


__all__ = ["PipelineSearch", "make_pipeline_plan", "plan_on", "plan_pipeline", "search_pipeline"]
