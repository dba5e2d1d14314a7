"""Where a program is cut into pipeline stages: at module paths, or so that a step by the schedule is shortest.

stages=["h.2", "h.4"]     three stages, the second and third of which begin with these modules
stages=4                  four stages: regions of one device's prices, put together by `pipeline.stage_search`
stages="auto"             as many as the pipeline's axis has ranks

schedule="1f1b+2"         1f1b, with two forwards more before the first backward of each rank
schedule="table.csv"      what a file says, with its number of stages and of micro-batches
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.analysis.fits import fit_of
from autopar.analysis.fusion import fused
from autopar.analysis.regions import regions
from autopar.analysis.signatures import signature
from autopar.analysis.weights import weights
from autopar.errors import ConstraintError, MeshError
from autopar.formulation.prices import Prices, op_seconds
from autopar.ir.mesh import Device, Mesh, Seconds
from autopar.ir.program import Op, Program
from autopar.ir.training_step import TrainingStep
from autopar.passes.stage_regions import made_again, stage_starts
from autopar.pipeline.clock import StageSeconds
from autopar.pipeline.named_schedules import CHUNKS, named
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.stage_search import StagePartition, partition
from autopar.plan.options import AUTO, Options
from autopar.plan.stages import StageSteps
from autopar.planning.schedule_file import fitting, is_file
from autopar.search_space.candidates import INVARIANT, candidate

STEADY = 4  # micro-batches for each rank, after which their actions repeat
WORTH = 1e-2  # of a step, that cuts within blocks are to save by rough prices
NODES, ACTIONS = 500, 200_000  # of the search for a cut by rough prices, and actions that the clock times for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The places of the ops with which stages begin, the modules in which these are, and the schedule of the stages."""

    starts: tuple[int, ...]
    modules: tuple[str, ...]
    name: str
    schedule: PipelineSchedule


def without_axis(mesh: Mesh, axis: str) -> Mesh:
    """The mesh of one stage: without the pipeline's axis, or of one device where there is no other axis.

    Raises MeshError for an axis that the mesh does not have.
    """
    if axis not in mesh.axes:
        raise MeshError(f"the mesh has no axis {axis!r} for the pipeline", mesh=mesh, fix=f"one of {', '.join(mesh.axes)}")
    at = mesh.axes.index(axis)
    if len(mesh.axes) == 1:
        return Mesh(axes=mesh.axes, sizes=(1,), links=mesh.links, device=mesh.device)
    axes, sizes, links = ((*kept[:at], *kept[at + 1 :]) for kept in (mesh.axes, mesh.sizes, mesh.links))
    return Mesh(axes=axes, sizes=sizes, links=links, device=mesh.device)


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
            raise ConstraintError(what, fix=f"a multiple of {ranks} stages: more than {ranks} are several chunks a rank")
        if count > len(found.firsts):
            fix = f"at most {len(found.firsts)} stages, or a pipeline axis of at most so many ranks"
            raise ConstraintError(f"the model has {len(found.firsts)} regions, which are fewer than {count} stages", fix=fix)
        name, schedule = options.schedule, given
        if schedule is None:
            name, schedule = _schedule(options.schedule, ranks, count // ranks, microbatches)
        if schedule.deferred and microbatches == 1:
            raise ConstraintError(f"the schedule {name} defers gradients of weights, of one micro-batch", fix="two, or 1f1b")
        if schedule.deferred and options.compiled:
            what = f"the schedule {name} defers gradients of weights, which a compiled backward makes at once"
            raise ConstraintError(what, fix='schedule="1f1b" or "interleaved"; or plan without compiled=True')
        starts = starts or found.balanced(given or _few(name, ranks, count // ranks, microbatches))
        return Cut(starts=starts, modules=tuple(map(found.module, starts)), name=name, schedule=schedule)


def _number(options: Options, ranks: int, starts: Sequence[int] | None) -> int:
    stages = len(starts) if starts else options.stages
    return stages if isinstance(stages, int) else ranks * CHUNKS.get(options.schedule, 1)


def _schedule(asked: str, ranks: int, chunks: int, microbatches: int) -> tuple[str, PipelineSchedule]:
    """The schedule of this name, by default 1f1b, or interleaved where a rank has several chunks."""
    usual = "1f1b" if chunks == 1 else "interleaved"
    name = usual if asked == AUTO else asked
    base, plus, ahead = name.partition("+")
    known = not plus or (base == "1f1b" and re.fullmatch("[0-9]{1,6}", ahead) is not None)
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
        self._compiled = fused(program) if device.compiled else program  # whose ops are priced
        self._prices = Prices(mesh=Mesh(axes=("device",), sizes=(1,), device=device))
        self._balanced: dict[PipelineSchedule, tuple[int, ...]] = {}

    def module(self, start: int) -> str:
        """The module of the op at this place."""
        return self.program.ops[start].name.partition(":")[0]

    def starts(self, paths: Sequence[object]) -> tuple[int, ...]:
        """The first op, and those of the regions that begin with these modules. Raises ConstraintError if there are none such,
        in order."""
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
        """The first op of the region that begins with a module."""
        begins = {self.module(first): first for first in reversed(self.firsts)}
        for module, first in begins.items():
            if isinstance(path, str) and path and _within(module, path):
                before = (op.name for op in self.program.ops[:first] if _within(op.name, path))
                if self.again.issuperset(before):
                    return first
        known = [module for module, first in sorted(begins.items(), key=lambda one: one[1]) if module and first]
        fix = "a module at which a stage can begin, as above" if known else "how many stages: regions begin in no module"
        raise ConstraintError(f"no stage of the pipeline can begin at {path!r}", known=", ".join(known), fix=fix)

    def balanced(self, schedule: PipelineSchedule) -> tuple[int, ...]:
        """The starts by which a schedule is fastest, of regions that one device runs whole."""
        if schedule not in self._balanced:
            self._balanced[schedule] = self._searched(schedule)
        return self._balanced[schedule]

    def shares(self, starts: tuple[int, ...]) -> list[float]:
        """The part of the seconds of one device that each of the stages has which begin with these ops."""
        before = dict(zip((*self.firsts, len(self.program.ops)), map(sum, self._seconds), strict=True))
        whole = before[len(self.program.ops)]
        return [(before[stop] - before[start]) / whole for start, stop in itertools.pairwise((*starts, len(self.program.ops)))]

    def _searched(self, schedule: PipelineSchedule) -> tuple[int, ...]:
        """The best cuts; those within blocks only where they are worth it, as stages that are alike are planned once."""
        last, ends = len(self.firsts), {end + 1 for end in regions(self.program)}
        blocks = [region for region, first in enumerate(self.firsts) if not region or first in ends]
        within = self._best(schedule, range(last + 1))
        if schedule.stages <= len(blocks) < last:
            between = self._best(schedule, [*blocks, last])
            within = within if within.seconds < (1 - WORTH) * between.seconds else between
        return tuple(self.firsts[cut] for cut in within.cuts[:-1])

    def _best(self, schedule: PipelineSchedule, places: Sequence[int]) -> StagePartition:
        """The best of the cuts before these regions; where a rank has one stage, such that it reads a parameter if there are
        any: optimizers want some."""
        seconds, read = [self._seconds[region] for region in places], [self._parameters[region] for region in places]

        def price(stage: int, start: int, stop: int) -> StageSeconds:
            (a, b), (c, d) = seconds[start], seconds[stop]
            return StageSeconds(forward=c - a, backward_input=(d - b) / 2, backward_weight=(d - b) / 2)

        def stored(stage: int, start: int, stop: int) -> StageSeconds | None:
            return price(stage, start, stop) if read[start] < read[stop] else None

        search = functools.partial(
            partition,
            schedule,
            len(places) - 1,
            nodes=NODES,
            simulations=max(1, ACTIONS // sum(map(len, schedule.ranks))),
            start=_even([sum(both) for both in seconds], schedule.stages),
        )
        found = search(price=stored) if schedule.stages == len(schedule.ranks) else None
        found = found or search(price=price)
        assert found is not None, "there are as many regions as stages, and every stage has a price"
        return replace(found, cuts=tuple(places[cut] for cut in found.cuts))

    @functools.cached_property
    def _parameters(self) -> list[int]:
        """How many ops that no other stage runs read a parameter, or a view or cast of one, before each region and in all."""
        ops, known = self.program.ops, weights(self.program)
        reading = (op.name not in self.again and not known.isdisjoint(op.operands) for op in ops)
        reads = [0, *itertools.accumulate(reading)]
        return [reads[first] for first in (*self.firsts, len(ops))]

    @functools.cached_property
    def _seconds(self) -> list[tuple[Seconds, Seconds]]:
        """Seconds of the forward and of the backward of all regions before each one, and of all; alike ops are priced once."""
        program, priced, seconds = self._compiled, dict[str, tuple[Seconds, Seconds]](), [(0.0, 0.0)]
        for first, stop in itertools.pairwise([*self.firsts, len(program.ops)]):
            there, back = seconds[-1]
            for op in program.ops[first:stop]:
                alike = signature(op, program.values)
                if alike not in priced:
                    priced[alike] = self._priced(op)
                there, back = there + priced[alike][0], back + priced[alike][1]
            seconds.append((there, back))
        return seconds

    def _priced(self, op: Op) -> tuple[Seconds, Seconds]:
        """Seconds of the forward and of the backward of an op, whole."""
        fitted, values = fit_of(self.program, op.name), self.program.values
        ((both,), (there,)) = op_seconds(op, fitted, [candidate(op, None, values, (INVARIANT,))], values, self._prices)
        return there, both - there


def _even(before: Sequence[Seconds], stages: int) -> tuple[int, ...]:
    """Cuts into stages of which the squares of the seconds add up to least; `before` has the seconds of all regions before
    each, and of all."""
    regions = len(before) - 1
    cost: dict[int, tuple[float, tuple[int, ...]]] = {
        stop: (before[stop] ** 2, (0, stop)) for stop in range(1, regions - stages + 2)
    }
    for stage in range(1, stages):
        cost = {
            stop: min(
                (cost[k][0] + (before[stop] - before[k]) ** 2, (*cost[k][1], stop)) for k in range(stage, stop) if k in cost
            )
            for stop in range(stage + 1, regions - stages + stage + 2)
        }
    return cost[regions][1]


def _within(name: str, path: str) -> bool:
    module = name.partition(":")[0]
    return module == path or module.startswith(f"{path}.")


__all__ = ["Cut", "StageCuts", "without_axis"]
