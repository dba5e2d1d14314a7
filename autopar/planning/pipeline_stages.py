"""Cuts a program into pipeline stages: at module paths, or so that a step under the schedule is shortest.

stages=["h.2", "h.4"]     three stages; the second and third begin with these modules
stages=4                  four stages: regions of one device's prices, put together by `pipeline.stage_search`
stages="auto"             one per rank of the pipeline's axis

schedule="1f1b+2"         1f1b, with two forwards more before the first backward of each rank; so "zb-h1+2"
schedule="table.csv"      from a file, with its number of stages and micro-batches
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.errors import ConstraintError, MeshError
from autopar.ir.device import Device, Link, Seconds
from autopar.ir.mesh import Mesh
from autopar.ir.training_step import TrainingStep
from autopar.pipeline.clock import StageSeconds, clock_of
from autopar.pipeline.named_schedules import CHUNKS, named, parts
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.weight_gradients import waits_filled
from autopar.plan.options import AUTO, Options
from autopar.plan.stages import StageSteps
from autopar.planning.cut_regions import CutRegions
from autopar.planning.schedule_file import fitting, is_file

STEADY = 4  # micro-batches for each rank, after which their actions repeat
WORTH = 5e-3  # of a step, that other cuts or layouts are to save by what is known of them
PARTS = (
    8  # of the micro-batches, to which those for which ranks wait are rounded: by quarters Llama-3 8B takes 1.214 s, 1.171 so
)
ALIKE = StageSeconds(forward=1.0, backward_input=1.2, backward_weight=0.8)
"""A stage of which others are alike: between products alone, 1 : 1 : 1, and Llama-3 8B's planned stages, 1 : 1.3 : 0.6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The ops where stages begin, their modules, and the schedule of the stages."""

    starts: tuple[int, ...]
    modules: tuple[str, ...]
    name: str
    schedule: PipelineSchedule

    @property
    def repeats(self) -> int:
        """The length of a step in micro-batches, for equal stages: those of the schedule plus the waiting of ranks, rounded to
        an eighth of the former.

        One second of a micro-batch costs a step this many times as much as one second of work done once.
        """
        runs, stages = self.schedule.microbatches, self.schedule.stages
        seconds = clock_of(self.schedule).seconds([ALIKE] * stages)
        full = runs * ALIKE.busy * stages / len(self.schedule.ranks)
        return math.ceil(runs * round(PARTS * seconds / full) / PARTS)

    def waits_filled(self, stages: Sequence[StageSeconds]) -> tuple[Cut, Seconds]:
        """The cut with W placed where ranks would wait for stages of these seconds, and the step time: see
        `pipeline.weight_gradients`. A schedule from a file is run unchanged.
        """
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


class StageCuts:
    """The cuts of a step (the program of one micro-batch) for any number of ranks, by one device's prices."""

    def __init__(self, step: TrainingStep, device: Device) -> None:
        self.step, self._regions = step, CutRegions(step.program, device)
        self._steps: dict[tuple[int, ...], StageSteps] = {}

    def steps(self, starts: tuple[int, ...]) -> StageSteps:
        """The steps of the stages that begin at these ops."""
        if starts not in self._steps:
            self._steps[starts] = StageSteps(self.step, starts)
        return self._steps[starts]

    def shares(self, starts: tuple[int, ...]) -> list[float]:
        """The shares of the program's seconds, at rough prices, of the stages that begin at these ops."""
        return self._regions.shares(starts)

    def messages(self, starts: tuple[int, ...], link: Link, devices: int) -> float:
        """The largest ratio of messages to computing in a stage at rough prices, if so many devices share both."""
        return self._regions.messages(starts, link, devices)

    def recut(self, cut: Cut, known: Sequence[StageSeconds]) -> tuple[Cut, float]:
        """New stages for the same schedule, by the seconds of a cut's stages, and their step time relative to the cut's."""
        ranks, runs = len(cut.schedule.ranks), cut.schedule.microbatches
        chunks = cut.schedule.stages // ranks
        _, schedule = _schedule(cut.name, ranks, chunks, runs)
        _, few = _schedule(cut.name, ranks, chunks, min(runs, STEADY * ranks))
        found = self._regions.recut(few, runs - few.microbatches, cut.starts, known)
        modules = tuple(map(self._regions.module, found.starts))
        made = replace(cut, starts=found.starts, modules=modules, schedule=schedule)
        return made, found.seconds / found.before

    def chosen(self, mesh: Mesh, axis: str, options: Options, microbatches: int) -> Cut:
        """The requested stages, for the ranks of the mesh's axis.

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
            raise ConstraintError(
                f"the schedule {name} defers gradients of weights, which takes more than one micro-batch", fix="two, or 1f1b"
            )
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
    """The schedule with this name, by default 1f1b, or interleaved if a rank has several chunks."""
    usual = "1f1b" if chunks == 1 else "interleaved"
    name = usual if asked == AUTO else asked
    base, ahead = parts(name)
    return name, named(base, ranks, microbatches, chunks=chunks, ahead=ahead)


def _few(name: str, ranks: int, chunks: int, microbatches: int) -> PipelineSchedule:
    """A schedule with few micro-batches: a steady state repeats, so more than a few per rank add nothing.

    With one stage per rank it is always 1f1b, so that schedules have the same cuts.
    """
    few = min(microbatches, STEADY * ranks)
    several = "zb-v" if name == "zb-v" else "interleaved"
    return named("1f1b" if chunks == 1 else several, ranks, few, chunks=chunks)


__all__ = ["Cut", "StageCuts", "without_axis"]
