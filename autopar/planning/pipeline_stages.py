"""Where a program is cut into pipeline stages: at module paths, or so that a step by the schedule is shortest.

stages=["h.2", "h.4"]     three stages, the second and third of which begin with these modules
stages=4                  four stages: regions of one device's prices, put together by `pipeline.stage_search`
stages="auto"             as many as the pipeline's axis has ranks

schedule="1f1b+2"         1f1b, with two forwards more before the first backward of each rank; so "zb-h1+2"
schedule="table.csv"      what a file says, with its number of stages and of micro-batches
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.analysis.fits import fit_of
from autopar.analysis.fusion import fused
from autopar.analysis.regions import regions
from autopar.analysis.signatures import signature
from autopar.analysis.summed_gradients import with_sums
from autopar.analysis.weights import weights
from autopar.errors import ConstraintError, MeshError
from autopar.formulation.prices import Prices, op_seconds
from autopar.ir.device import Device, Link, Seconds
from autopar.ir.mesh import Mesh
from autopar.ir.program import Op, Program
from autopar.ir.training_step import TrainingStep
from autopar.passes.stage_regions import fine_starts, made_again, of_one_stage, passing_bytes, stage_starts
from autopar.pipeline.clock import StageSeconds, clock_of
from autopar.pipeline.named_schedules import AHEAD, CHUNKS, named
from autopar.pipeline.rank_balance import balanced
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.stage_search import StageArray, StagePartition, StageTable, partition, seconds_with
from autopar.pipeline.weight_gradients import waits_filled
from autopar.plan.options import AUTO, Options
from autopar.plan.stages import StageSteps
from autopar.planning.schedule_file import fitting, is_file
from autopar.search_space.candidates import INVARIANT, candidate

STEADY = 4  # micro-batches for each rank, after which their actions repeat
WORTH = 1e-2  # of a step, that other cuts or layouts are to save by what is known of them
SMALL = 0.1  # of the seconds of a region: what is not cut off it
NODES, ACTIONS = 500, 200_000  # of the search for a cut by rough prices, and actions that the clock times for it
RECUT = 4  # times as many, by what planned stages take
PARTS = (
    8  # of the micro-batches, to which those for which ranks wait are rounded: by quarters Llama-3 8B takes 1.214 s, 1.171 so
)
ALIKE = StageSeconds(forward=1.0, backward_input=1.2, backward_weight=0.8)
"""A stage of which others are alike: between products alone, 1 : 1 : 1, and Llama-3 8B's planned stages, 1 : 1.3 : 0.6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The places of the ops with which stages begin, the modules in which these are, and the schedule of the stages."""

    starts: tuple[int, ...]
    modules: tuple[str, ...]
    name: str
    schedule: PipelineSchedule

    @property
    def repeats(self) -> int:
        """The micro-batches for which a step takes long enough, if stages are alike: those of the schedule, and those for which
        ranks wait, to an eighth of the former.

        A second of a micro-batch costs a step so many times as much as one of what is done once.
        """
        runs, stages = self.schedule.microbatches, self.schedule.stages
        seconds = clock_of(self.schedule).seconds([ALIKE] * stages)
        full = runs * ALIKE.busy * stages / len(self.schedule.ranks)
        return math.ceil(runs * round(PARTS * seconds / full) / PARTS)

    def waits_filled(self, stages: Sequence[StageSeconds]) -> tuple[Cut, Seconds]:
        """The cut with its W where ranks of stages that take so long would wait, and the seconds of a step: see
        `pipeline.weight_gradients`. A schedule that a file gives is run as it stands there."""
        if is_file(self.name):
            return self, clock_of(self.schedule).seconds(stages)
        schedule, seconds = waits_filled(self.schedule, stages)
        return replace(self, schedule=schedule), seconds


def without_axis(mesh: Mesh, axis: str) -> Mesh:
    """The mesh of one stage: without the pipeline's axis, or of one device where there is no other axis.

    Raises MeshError for an axis that the mesh does not have.
    """
    if axis not in mesh.axes:
        raise MeshError(f"the mesh has no axis {axis!r} for the pipeline", mesh=mesh, fix=f"one of {', '.join(mesh.axes)}")
    return mesh.without(axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recut:
    """Other starts of stages, which take `seconds` where the known ones take `before`, both by the same law."""

    starts: tuple[int, ...]
    seconds: Seconds
    before: Seconds


class StageCuts:
    """The cuts of a step, of the program of one micro-batch, for any number of ranks, by the prices of a device."""

    def __init__(self, step: TrainingStep, device: Device) -> None:
        self.step, self._regions = step, _Regions(step.program, device)
        self._steps: dict[tuple[int, ...], StageSteps] = {}

    def steps(self, starts: tuple[int, ...]) -> StageSteps:
        """The steps of the stages that begin with these ops."""
        if starts not in self._steps:
            self._steps[starts] = StageSteps(self.step, starts)
        return self._steps[starts]

    def shares(self, starts: tuple[int, ...]) -> list[float]:
        """The parts of the program's seconds, by rough prices, in the stages that begin with these ops."""
        return self._regions.shares(starts)

    def messages(self, starts: tuple[int, ...], link: Link, devices: int) -> float:
        """The largest part that messages are of what a stage computes by rough prices, if so many devices share both."""
        return self._regions.messages(starts, link, devices)

    def recut(self, cut: Cut, known: Sequence[StageSeconds]) -> tuple[Cut, float]:
        """Stages for the same schedule by what those of a cut take, and what their step takes, in parts of that of the cut."""
        ranks, runs = len(cut.schedule.ranks), cut.schedule.microbatches
        chunks = cut.schedule.stages // ranks
        _, schedule = _schedule(cut.name, ranks, chunks, runs)
        _, few = _schedule(cut.name, ranks, chunks, min(runs, STEADY * ranks))
        found = self._regions.recut(few, runs - few.microbatches, cut.starts, known)
        modules = tuple(map(self._regions.module, found.starts))
        made = replace(cut, starts=found.starts, modules=modules, schedule=schedule)
        return made, found.seconds / found.before

    def chosen(self, mesh: Mesh, axis: str, options: Options, microbatches: int) -> Cut:
        """The stages that the options ask for, of which the axis of the mesh has the ranks.

        Raises ConstraintError for stages that the program or the schedule does not have.
        """
        ranks, found = dict(zip(mesh.axes, mesh.sizes, strict=True))[axis], self._regions
        paths = options.stages if isinstance(options.stages, Sequence) and not isinstance(options.stages, str) else None
        starts = None if paths is None else found.starts(paths)
        given = None
        if is_file(options.schedule):
            asked = None if options.stages == AUTO else _number(options, ranks, starts)
            given = fitting(options.schedule, ranks, asked, microbatches)
        count = given.stages if given and not starts else _number(options, ranks, starts)
        if count % ranks or not count:
            what = f"{count} stages cannot be shared by the {ranks} ranks of mesh axis {axis!r}"
            raise ConstraintError(what, fix=f"a multiple of {ranks} stages: more than {ranks} are several a rank")
        if count > len(found.firsts):
            most = len(found.firsts)
            fewer = f"stages={most} at most, or a pipeline axis of at most so many ranks"
            fix = fewer if most > 1 else "a plan without pipeline="
            stages = "stages at most" if most > 1 else "stage only, as no stage can begin within it"
            raise ConstraintError(f"the model can be cut into {most} {stages}, not into {count}", fix=fix)
        name, schedule = options.schedule, given
        if schedule is None:
            name, schedule = _schedule(options.schedule, ranks, count // ranks, microbatches)
        if schedule.deferred and microbatches == 1:
            raise ConstraintError(f"the schedule {name} defers gradients of weights, of one micro-batch", fix="two, or 1f1b")
        if schedule.deferred and options.compiled:
            what = f"the schedule {name} defers gradients of weights, which a compiled backward makes at once"
            raise ConstraintError(what, fix='schedule="1f1b" or "interleaved"; or plan without compiled=True')
        few = given or _few(name, ranks, count // ranks, microbatches)
        starts = starts or found.balanced(few, microbatches - few.microbatches)
        return Cut(starts=starts, modules=tuple(map(found.module, starts)), name=name, schedule=schedule)


def _number(options: Options, ranks: int, starts: Sequence[int] | None) -> int:
    stages = len(starts) if starts else options.stages
    return stages if isinstance(stages, int) else ranks * CHUNKS.get(options.schedule, 1)


def _schedule(asked: str, ranks: int, chunks: int, microbatches: int) -> tuple[str, PipelineSchedule]:
    """The schedule of this name, by default 1f1b, or interleaved where a rank has several chunks."""
    usual = "1f1b" if chunks == 1 else "interleaved"
    name = usual if asked == AUTO else asked
    base, plus, ahead = name.partition("+")
    known = not plus or (base in AHEAD and re.fullmatch("[0-9]{1,6}", ahead) is not None)
    made = named(base if known else name, ranks, microbatches, chunks=chunks, ahead=int(ahead) if plus and known else 0)
    return name, made


def _few(name: str, ranks: int, chunks: int, microbatches: int) -> PipelineSchedule:
    """A schedule of some micro-batches: a steady state repeats, so that more of them than a few a rank say nothing new.

    With one stage a rank it is 1f1b whatever the name, so that schedules differ in nothing else.
    """
    few = min(microbatches, STEADY * ranks)
    several = "zb-v" if name == "zb-v" else "interleaved"
    return named("1f1b" if chunks == 1 else several, ranks, few, chunks=chunks)


class _Regions:
    """The regions of a program; `firsts` has the place of the first op of each, `again` what each stage runs for itself."""

    def __init__(self, program: Program, device: Device) -> None:
        self.program, self.again = program, made_again(program)
        self.firsts = stage_starts(program)
        self._whole = fused(program) if device.compiled else with_sums(program)  # whose ops are priced
        self._prices = Prices(mesh=Mesh(axes=("device",), sizes=(1,), device=device))
        self._balanced: dict[tuple[PipelineSchedule, int], tuple[int, ...]] = {}

    def module(self, start: int) -> str:
        """The module of the op at this place."""
        return self.program.ops[start].name.partition(":")[0]

    def starts(self, paths: Sequence[object]) -> tuple[int, ...]:
        """The first op, and those with which these modules begin. Raises ConstraintError if there are none such, in order."""
        found = [0, *(self._starting(path) for path in paths)]
        for (before, after), path in zip(itertools.pairwise(found), paths, strict=True):
            if after <= before:
                what = (
                    f"the stages of the pipeline are not in the order of the program: {path} does not come after the one before"
                )
                raise ConstraintError(
                    what, stages=", ".join(map(str, paths)), fix="module paths in the order in which they run"
                )
        return tuple(found)

    def _starting(self, path: object) -> int:
        """The first op of a module, at which a stage can begin. Raises ConstraintError for another module, and what is none."""
        if isinstance(path, str) and path and (found := self._place(path)):
            return found
        known = ", ".join(self._named())
        fix = "a module at which a stage can begin, as above" if known else "how many stages: regions begin in no module"
        raise ConstraintError(f"no stage of the pipeline can begin at {path!r}", known=known, fix=fix)

    def _place(self, path: str) -> int:
        """The op with which a stage begins at a module: not between what reads a buffer and what writes it; 0 if none does."""
        places = [place for place, op in enumerate(self.program.ops) if _within(op.name, path)]
        own = next((place for place in places if self.program.ops[place].name not in self.again), 0)
        region = next((place for place in places if place <= own and place in self.firsts), own)
        return 0 if region in self._joined else region

    @functools.cached_property
    def _joined(self) -> frozenset[int]:
        return of_one_stage(self.program)

    def _named(self) -> Iterator[str]:
        """The modules at which stages can begin, in the order of the program; of those that begin alike the outermost."""
        parts = [op.name.partition(":")[0].split(".") for op in self.program.ops]
        paths = dict.fromkeys(".".join(own[: end + 1]) for own in parts for end in range(len(own)))
        found: dict[int, str] = {}
        for path in filter(None, paths):
            found.setdefault(self._place(path), path)
        yield from (path for place, path in sorted(found.items()) if place)

    def balanced(self, schedule: PipelineSchedule, more: int) -> tuple[int, ...]:
        """The starts by which a schedule with so many micro-batches more is fastest, of regions that one device runs whole."""
        if (schedule, more) not in self._balanced:
            self._balanced[schedule, more] = self._searched(schedule, more)
        return self._balanced[schedule, more]

    def shares(self, starts: tuple[int, ...]) -> list[float]:
        """The part of the seconds of one device that each of the stages has which begin with these ops."""
        before = [sum(both) for both in self._before]
        whole = before[len(self.program.ops)]
        return [(before[stop] - before[start]) / whole for start, stop in itertools.pairwise((*starts, len(self.program.ops)))]

    def messages(self, starts: tuple[int, ...], link: Link, devices: int) -> float:
        """What a message before each stage takes that is split over so many devices, in parts of the stage; the largest."""
        passing = passing_bytes(self.program)
        before = [sum(self._before[place]) for place in (*starts, len(self.program.ops))]
        stages = [(stop - start) / devices for start, stop in itertools.pairwise(before)]
        sent = [link.send(passing[start] / devices) for start in starts[1:]]
        return max((2 * one / (stage or math.inf) for one, stage in zip(sent, stages[1:], strict=True)), default=0.0)

    def recut(self, schedule: PipelineSchedule, more: int, starts: Sequence[int], known: Sequence[StageSeconds]) -> Recut:
        """The starts by which the schedule is fastest, by what planned stages take, which have other `starts`; also between any
        two matrix products that a region has.

        Each part of a planned stage takes as much of its seconds as of those of one device, a message as long for each byte as
        the messages of the plan.
        """
        places, ends, passing = [*self._fine(), stop := len(self.program.ops)], [*starts, stop], passing_bytes(self.program)
        there, back = (np.array(parts) for parts in zip(*self._before, strict=True))
        takes = zip(*((one.forward, one.backward_input, one.backward_weight, one.once) for one in known), strict=True)
        taken = [
            np.interp(rough[places], rough[ends], [0.0, *itertools.accumulate(parts)])
            for rough, parts in zip((there, back, back, back), takes, strict=True)
        ]
        unit = sum(one.activations for one in known[:-1]) / max(1, sum(passing[start] for start in starts[1:]))
        sent = unit * np.array([passing[place] for place in places], dtype=np.float64)
        forward, backward_input, backward_weight, once = map(_between, taken)
        seconds = np.stack([
            forward, backward_input, backward_weight,
            np.broadcast_to(sent, forward.shape), np.broadcast_to(sent[:-1, None], forward.shape), once,
        ])  # fmt: skip
        runs = schedule.microbatches + more
        work = (runs * (taken[0] + taken[1] + taken[2]) + taken[3]).tolist()
        found = self._best(schedule, more, places, seconds, work, actions=RECUT * ACTIONS)
        return Recut(starts=found.cuts[:-1], seconds=found.seconds, before=seconds_with(clock_of(schedule), known, more))

    def _fine(self) -> list[int]:
        """The places at which stages may begin, but those that cut a part off which is small beside its region."""
        wide, found = sorted(self.firsts), list[int]()
        work = [sum(both) for both in self._before]
        for place in fine_starts(self.program):
            region = bisect_right(wide, place) - 1
            first, stop = wide[region], (*wide, len(self.program.ops))[region + 1]
            least = SMALL * (work[stop] - work[first])
            if place == first or min(work[place] - work[found[-1]], work[stop] - work[place]) >= least:
                found.append(place)
        return found

    def _searched(self, schedule: PipelineSchedule, more: int) -> tuple[int, ...]:
        """The best cuts; those within blocks only where they are worth it, as stages that are alike are planned once."""
        stop, ends = len(self.program.ops), {end + 1 for end in regions(self.program)}
        blocks = [first for first in self.firsts if not first or first in ends]
        within = self._roughly(schedule, more, [*self.firsts, stop])
        if schedule.stages <= len(blocks) < len(self.firsts):
            between = self._roughly(schedule, more, [*blocks, stop])
            within = within if within.seconds < (1 - WORTH) * between.seconds else between
        return within.cuts[:-1]

    def _roughly(self, schedule: PipelineSchedule, more: int, places: Sequence[int]) -> StagePartition:
        """The best of the cuts before these ops by the prices of one device."""
        before = [self._before[place] for place in places]
        forward, backward = (_between(np.array(sums)) for sums in zip(*before, strict=True))
        none = np.zeros_like(forward)
        seconds = np.stack([forward, backward / 2, backward / 2, none, none, none])
        return self._best(schedule, more, places, seconds, [sum(both) for both in before])

    def _best(
        self,
        schedule: PipelineSchedule,
        more: int,
        places: Sequence[int],
        seconds: StageArray,
        work: Sequence[Seconds],
        *,
        actions: int = ACTIONS,
    ) -> StagePartition:
        """The best of the cuts before these ops, of which it has the places; where a rank has one stage, such that it reads a
        parameter if there are any: optimizers want some. `seconds` are those of a `StageTable`, and `work` what is before
        each."""
        read = _between(np.array([self._parameters[place] for place in places]))
        search = functools.partial(
            partition,
            schedule,
            nodes=NODES,
            simulations=max(1, actions // sum(map(len, schedule.ranks))),
            start=balanced(work, schedule),
            more=more,
        )
        ways = [read > 0] if schedule.stages == len(schedule.ranks) else []
        tables = (StageTable(seconds=seconds, fits=fits) for fits in (*ways, np.ones_like(read, dtype=bool)))
        found = next((one for table in tables if (one := search([table] * schedule.stages))), None)
        assert found is not None, "there are as many regions as stages, and every stage has a price"
        return replace(found, cuts=tuple(places[cut] for cut in found.cuts))

    @functools.cached_property
    def _parameters(self) -> list[int]:
        """How many ops that no other stage runs read a parameter, or a view or cast of one, before each op and in all."""
        ops, known = self.program.ops, weights(self.program)
        reading = (op.name not in self.again and not known.isdisjoint(op.operands) for op in ops)
        return [0, *itertools.accumulate(reading)]

    @functools.cached_property
    def _before(self) -> list[tuple[Seconds, Seconds]]:
        """Seconds of the forward and of the backward of all ops before each one, and of all; alike ops are priced once."""
        program, priced, seconds = self._whole, dict[object, tuple[Seconds, Seconds]](), [(0.0, 0.0)]
        for op in program.ops:
            alike = signature(op, program.values), op.summed
            if alike not in priced:
                priced[alike] = self._priced(op)
            there, back = seconds[-1]
            seconds.append((there + priced[alike][0], back + priced[alike][1]))
        return seconds

    def _priced(self, op: Op) -> tuple[Seconds, Seconds]:
        """Seconds of the forward and of the backward of an op, whole."""
        fitted, values = fit_of(self.program, op.name), self.program.values
        ((both,), (there,)) = op_seconds(op, fitted, [candidate(op, None, values, (INVARIANT,))], values, self._prices)
        return there, both - there


def _between(sums: StageArray) -> StageArray:
    """What is between each place but the last and each place, by what is before each."""
    return sums - sums[:-1, None]


def _within(name: str, path: str) -> bool:
    module = name.partition(":")[0]
    return module == path or module.startswith(f"{path}.")


__all__ = ["Cut", "StageCuts", "without_axis"]
