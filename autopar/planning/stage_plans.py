"""Plans the stages of a pipeline one after the other on the mesh without its axis; equal stages are solved once.

stage 0 planned like any program; the values that it sends keep their layouts stage 1 planned, which receives these; ...

or with what they send in given layouts, those of the whole program (`StagePlanner.sending`). A micro-batch counts for more than
one where ranks wait while the pipeline fills and drains (`Cut.repeats`).

A stage is solved for one micro-batch in flight first: if all ranks hold their stages' plans with all that the schedule has in
flight, these are the best. Else each stage has a share of its rank's memory (`planning.memory_shares`): it takes a plan that
fits of those that the same stage has with more in flight, if that is within `FLIGHTS_GAP`, or is solved with what they all hold
in the rows of the memory.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape

from autopar.analysis.analysis import Analysis
from autopar.analysis.deferrable import deferrable
from autopar.errors import BudgetError
from autopar.formulation.read_solution import assignment
from autopar.formulation.step_time import StepPrices, parts_of_step, step_events
from autopar.ir.device import Bytes, Link, Seconds
from autopar.ir.layout import Layout, text
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.training_step import StageMoment, TrainingStep
from autopar.memory.in_flight import StageMemory
from autopar.memory.rank_memory import HeldStage
from autopar.pipeline.clock import StageSeconds
from autopar.plan.assignment_text import describe
from autopar.plan.budget import parse_bytes
from autopar.plan.options import PLENTY, Options
from autopar.plan.pipeline import moments
from autopar.plan.plan import Plan
from autopar.plan.stages import StageSteps
from autopar.plan.text import size_text
from autopar.planning.memory_shares import NO_FLOORS, MemoryNeed, MemoryShare, memory_shares
from autopar.planning.model_checks import without_rule
from autopar.planning.no_plan import SMALLEST, explained
from autopar.planning.optimize import Optimized, analysed, solution_time, solved, transferred
from autopar.planning.pipeline_bound import repeated
from autopar.planning.pipeline_stages import Cut
from autopar.planning.planner import to_plan
from autopar.planning.stage_signature import signature_of
from autopar.search_space.constraints import constrained, targets
from autopar.solver.settings import DEFAULTS, SearchSettings

FLIGHTS_GAP = 1e-2
"""Relative gap to the plan with one micro-batch in flight up to which a stage takes a plan with more of them than its own.

The equal stages of Llama-3 70B in 32 have 31 to 20 in flight, whose plans take 1.1 to 0% longer, and 4 CPU seconds each."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Solved:
    """The solution of a stage: its seconds, the layouts of outputs and stored tensors in order, and its memory."""

    found: Optimized
    seconds: StageSeconds
    outputs: tuple[Layout, ...]
    stored: tuple[Layout, ...]
    memory: StageMemory


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StagePlan:
    """A planned stage: its seconds, memory need and holdings, and the layouts in which it sends its outputs, by path."""

    step: TrainingStep
    options: Options
    seconds: StageSeconds
    need: MemoryNeed
    held: HeldStage
    outputs: Mapping[str, Layout]
    found: Optimized  # its own solution, or that of a stage like it


@dataclass(frozen=True, slots=True, kw_only=True)
class UncutPlan:
    """A whole step that is not cut into stages: its seconds, and the layout of each value."""

    seconds: Seconds
    layouts: Mapping[str, str]


class StagePlanner:
    """Plans stages on a mesh without the pipeline's axis, whose link connects them; solutions are cached.

    To choose the layouts of messages, a step is assumed to wait for those of all micro-batches, or of `waiting` ones. The clock
    gives the actual waiting.
    """

    def __init__(
        self, mesh: Mesh, link: Link, options: Options, settings: SearchSettings = DEFAULTS, *, waiting: int | None = None
    ) -> None:
        self.mesh, self.link, self.options, self.settings = mesh, link, replace(options, pipeline=None), settings
        self.waiting = waiting
        self._known: dict[str, _Solved | BudgetError] = {}
        self._full: dict[str, list[_Solved]] = {}  # with more micro-batches in flight, where one alone did not suffice
        self._written: dict[Optimized, Plan] = {}  # the first plan that was written of a solution
        self._uncut: dict[tuple[str, int], UncutPlan] = {}  # by the step, and by what it is to repeat
        self._sent: Mapping[str, str] = {}
        self._single: list[StagePlanner] = []  # the one of `over_single_axes`, once there is one

    @property
    def limit(self) -> Bytes:
        """The memory limit of a rank."""
        return parse_bytes(self.options.budget, self.mesh)

    def uncut(self, step: TrainingStep, repeats: int) -> UncutPlan:
        """The best plan of a whole step, on the mesh of a stage and in any memory."""
        key = step.hash, repeats
        if key not in self._uncut:
            options = replace(self.options, budget=PLENTY)
            analysis = analysed(repeated(StageSteps(step, (0,)).made(0, {}), repeats), self.mesh, options)
            found = solved(analysis, self.mesh, options, settings=self.settings)
            chosen = assignment(found.formulated, found.solution)
            layouts = describe(step.program, chosen, analysis.fits, self.mesh.sizes)[1]
            self._uncut[key] = UncutPlan(seconds=solution_time(found.memory_model, found.solution), layouts=layouts)
        return self._uncut[key]

    def beyond(self) -> StagePlanner:
        """A planner with ample memory that shares the cache."""
        found = copy.copy(self)
        found.options = replace(self.options, budget=PLENTY)
        return found

    def sending(self, layouts: Mapping[str, str]) -> StagePlanner:
        """A planner that sends these values in these layouts, and shares the cache."""
        found = copy.copy(self)
        found._sent = layouts
        return found

    def over_single_axes(self) -> StagePlanner:
        """A planner whose messages go over one axis each, sharing the cache of such stages."""
        mesh = replace(self.mesh, flattened=())
        known = self._single or [StagePlanner(mesh, self.link, self.options, self.settings, waiting=self.waiting)]
        self._single[:] = known
        found = copy.copy(known[0])
        found.options, found._sent = self.options, self._sent
        return found

    def alone(self, steps: StageSteps, cut: Cut) -> Iterator[StagePlan]:
        """Plan the stages in order: each receives what the previous one sends, and shared tensors are stored alike.

        Each holds one micro-batch at a time, whatever its schedule has in flight: this is quickly solved, and hardly slower
        than a plan that holds them all. Raises StageBudgetError if one has no plan that fits.
        """
        whole = MemoryShare(bytes=self.limit, part=1.0, room=self.limit)
        return self._planned(steps, cut, [whole] * cut.schedule.stages, alone=True)

    def within(
        self,
        steps: StageSteps,
        cut: Cut,
        alone: Sequence[StagePlan],
        *,
        rooms: Sequence[Bytes] = (),
        floors: Mapping[int, Bytes] = NO_FLOORS,
    ) -> Iterator[StagePlan]:
        """Plan the stages in order, with all micro-batches in flight.

        The peaks of a rank's stages add up to at most its entry of `rooms`, by default the limit. Each gets a share by its plan
        `alone`, and at least its entry of `floors`, if any. Raises StageBudgetError if one has no plan that fits.
        """
        needs, rooms = [stage.need for stage in alone], rooms or [self.limit] * len(cut.schedule.ranks)
        return self._planned(steps, cut, memory_shares(cut.schedule, needs, rooms, floors))

    def _planned(
        self, steps: StageSteps, cut: Cut, shares: Sequence[MemoryShare], *, alone: bool = False
    ) -> Iterator[StagePlan]:
        constrained(steps.step, self.mesh, self.options.constraints)  # which raises for what is in no stage
        wanted = {**self._sent, **_by_value(steps.step.program, self.options.constraints)}
        readers = Counter(name for stage in steps.stages for name in _stored(stage.program))
        layouts: Mapping[str, Layout] = {}
        whole = ", ".join(["I"] * len(self.mesh.sizes))
        alike = {buffer.value.name: whole for buffer in steps.step.program.buffers if buffer.value.name in steps.hoisting}
        repeats = cut.repeats if self.mesh.size > 1 else steps.step.microbatches  # one device has nothing to choose by it
        for place, share in enumerate(shares):
            # a W with none in flight holds no more than the I before it
            times = tuple(dict.fromkeys(now for now in moments(cut.schedule, place) if now.flights))
            step = self._with(steps.made(place, layouts, repeats=repeats), times)
            known, names = wanted | alike, step.program.values.keys() - step.received.keys()
            of_stage = {escape(name): line for name, line in known.items() if name in names}
            asked = replace(self.options, constraints=of_stage)
            made = self._within(step, asked, share, place, alone=alone)
            drops = made.found.formulated.drops
            memory = made.memory.dropping(several=step.flights > 1) if drops else made.memory
            program, ends = step.program, dict(zip(_stored(step.program), made.stored, strict=True))
            layouts = {output.path: layout for output, layout in zip(program.outputs, made.outputs, strict=True)}
            alike |= {
                name: text(layout, program.values[name].shape, self.mesh.sizes)
                for name, layout in ends.items()
                if readers[name] > 1
            }
            yield StagePlan(
                step=step,
                options=asked,
                seconds=made.seconds,
                need=MemoryNeed(alone=memory.alone, peak=memory.peak(times)),
                held=HeldStage(memory=memory, names=_held(step)),
                outputs=layouts,
                found=made.found,
            )

    def written(self, stage: StagePlan) -> Plan:
        """The plan of a stage under its own names."""
        alike = self._written.get(stage.found)
        made = to_plan(self.named(stage), stage.options, alike=alike)
        self._written.setdefault(stage.found, made)
        return replace(made, options=self.options.text())

    def named(self, stage: StagePlan) -> Optimized:
        """The solution of a stage under its own names."""
        return transferred(stage.found, analysed(stage.step, self.mesh, stage.options), stage.options)

    def _within(self, step: TrainingStep, options: Options, share: MemoryShare, place: int, *, alone: bool) -> _Solved:
        """Solve a stage to fit into its share of a rank's memory with all micro-batches in flight, or with one (`alone`): the
        best plan with one in flight if that fits.
        """
        assert step.stage is not None, "it is a stage"
        best: _Solved | None = None
        full = options if share.bytes == self.limit else replace(options, budget=share.bytes)
        try:
            with suppress(BudgetError):
                best = self._solved(self._with(step, ()), options)
            if best is None:
                return self._solved(step, full)
            fits = alone or best.memory.peak(step.stage.moments) <= share.bytes
            return best if fits else self._fuller(step, full, best, share)
        except BudgetError as unfit:
            error = explained(unfit)
            least = int(str(error.details[SMALLEST]).removeprefix("budget="))
            raise StageBudgetError(
                place,
                least,
                best is None and share.bytes >= self.limit,
                f"stage {place} of the pipeline: no plan fits into {size_text(share.bytes)} per device with {step.flights} "
                f"micro-batches in flight; the smallest budget of such a stage is {size_text(least)}",
                **{SMALLEST: f"budget={share.budget(least, self.limit)}"},
                filled=error.details["filled"],
                fix="more micro-batches of fewer samples, more stages, 1f1b in the place of gpipe, or a larger budget",
            ) from None

    def _with(self, step: TrainingStep, times: tuple[StageMoment, ...]) -> TrainingStep:
        """The stage to solve, with the moments of a schedule."""
        assert step.stage is not None, "it is a stage"
        flights = max((now.flights for now in times), default=1)
        hidden = max(1.0, step.microbatches / self.waiting) if self.waiting else 1.0
        return replace(step, stage=replace(step.stage, flights=flights, moments=times, link=self.link.faster(hidden)))

    def _fuller(self, step: TrainingStep, options: Options, best: _Solved, share: MemoryShare) -> _Solved:
        """A stage solved with all micro-batches in flight, or like an equal one, if that fits and is hardly slower than the
        `best` plan with one.
        """
        assert step.stage is not None, "it is a stage"
        least = step.microbatches * best.seconds.busy + best.seconds.once
        known = self._full.setdefault(signature_of(self._with(step, ()), replace(options, budget=None)), [])
        for made in known:
            own = step.microbatches * made.seconds.busy + made.seconds.once
            if made.memory.peak(step.stage.moments) <= share.bytes and own <= (1 + FLIGHTS_GAP) * least:
                return made
        known.append(self._solved(step, options))
        return known[-1]

    def _solved(self, step: TrainingStep, options: Options) -> _Solved:
        """The solution of a stage, or of an equal one from the cache."""
        key = signature_of(step, options)
        if key not in self._known:
            cheapest = self._known.get(signature_of(step, replace(options, budget=PLENTY)))
            if isinstance(cheapest, _Solved) and cheapest.memory.alone <= parse_bytes(options.budget, self.mesh):
                self._known[key] = cheapest
                return cheapest
            try:
                self._known[key] = self._solve(step, options)
            except BudgetError as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, BudgetError):
            raise known
        return known

    def _solve(self, step: TrainingStep, options: Options) -> _Solved:
        """Solve a stage with one more micro-batch for each that ranks wait for; also returns its seconds."""
        assert step.stage is not None, "it is a stage"
        analysis = analysed(step, self.mesh, options)
        without_rule(analysis, strict=options.strict)
        waited = analysed(repeated(step, step.stage.repeats), self.mesh, options) if step.loop else analysis
        found = solved(waited, self.mesh, options, settings=self.settings).searched
        if waited is not analysis:
            found = _as_run(found, analysis, options)
        chosen, liveness = assignment(found.formulated, found.solution), found.memory_model.liveness
        return _Solved(
            found=found,
            seconds=stage_seconds(found, found.formulated.step_prices),
            outputs=tuple(chosen.outputs[output.path] for output in step.program.outputs),
            stored=tuple(chosen.given[name] for name in _stored(step.program)),
            memory=liveness.stage_memory(chosen),
        )


def _as_run(found: Optimized, analysis: Analysis, options: Options) -> Optimized:
    """The solution for the actual number of micro-batches, with the same relative gap as for the priced number."""
    made, known = transferred(found, analysis, options), found.solution
    seconds = solution_time(made.memory_model, made.solution)
    bound = known.bound * seconds / known.seconds if known.seconds else 0.0
    return replace(made, solution=replace(known, seconds=seconds, bound=bound))


class StageBudgetError(BudgetError):
    """A `stage` has no plan that fits into its share; it needs at least `least` bytes. `never`: not even one micro-batch in
    flight fits into a rank's whole memory, so no schedule does.
    """

    def __init__(self, stage: int, least: Bytes, never: bool, what: str, **details: object) -> None:
        super().__init__(what, **details)
        self.stage, self.least, self.never = stage, least, never


def _stored(program: Program) -> list[str]:
    return [held.value.name for held in (*program.parameters, *program.buffers)]


def _held(step: TrainingStep) -> tuple[str, ...]:
    """What a stage holds for the whole step: inputs of the batch, and stored tensors."""
    return tuple(value.name for value in step.program.given if value.name not in step.received)


def _by_value(program: Program, constraints: Mapping[str, str]) -> dict[str, str]:
    """The constraints with globs replaced by names of values."""
    known = list(targets(program)) if constraints else []
    return {value: line for glob, line in constraints.items() for name, value in known if fnmatchcase(name, glob)}


def stage_seconds(found: Optimized, prices: StepPrices) -> StageSeconds:
    """The seconds of a stage per micro-batch, and once per step, at these prices."""
    chosen, program = assignment(found.formulated, found.solution), found.formulated.program
    parts = parts_of_step(step_events(found.memory_model.liveness.schedule(chosen), prices), prices, once=chosen.once)
    weights = sum(prices.weight(program.op[name], chosen.ops[name], w) for name, (_, w) in deferrable(program).items())
    runs = found.formulated.analysis.step.microbatches
    return StageSeconds(
        forward=parts["forward"] / runs,
        backward_input=(parts["backward"] - weights) / runs,
        backward_weight=weights / runs,
        once=parts["once"],
    )


__all__ = ["StageBudgetError", "StagePlan", "StagePlanner", "stage_seconds"]
