"""The search space of a pipeline (splits of an axis, numbers, schedules), with lower bounds on the step.

See `pipeline_search` and `large_pipelines`, which try them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.cost_model import CATALOG
from autopar.cost_models.links import connect
from autopar.ir.device import Seconds
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.pipeline.clock import StageSeconds
from autopar.pipeline.named_schedules import AHEAD, DEFERRED
from autopar.plan.options import AUTO, Options
from autopar.planning.pipeline_stages import Cut, without_axis
from autopar.planning.schedule_file import is_file, read_schedule
from autopar.planning.stage_plans import StagePlanner
from autopar.simulator.figures import products_at_peak
from autopar.solver.settings import SearchSettings

ScheduledStages = tuple[str, int | str | Sequence[str]]  # a schedule, and the stages that it has
WHOLE = ("gpipe", "1f1b")  # schedules of one stage a rank and of backwards in one piece
CHUNKS = (2, 3, 4)  # stages a rank that are tried where their number is open


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineAxis:
    """A mesh with a pipeline axis, its options, and what is known about stages there: from the `planner`, and from the one
    `beyond` the budget, which has ample memory.
    """

    mesh: Mesh
    axis: str
    options: Options
    planner: StagePlanner
    beyond: StagePlanner

    @staticmethod
    def of(mesh: Mesh, axis: str, options: Options, settings: SearchSettings) -> PipelineAxis:
        """The pipeline axis of a mesh, searched with these settings; if it is cut off another axis, constraints apply to the
        rest.
        """
        spatial = without_axis(mesh, axis)
        if options.pipeline == AUTO:
            options = replace(options, constraints=_on(spatial, mesh, options.constraints))
        planner = StagePlanner(spatial, mesh.links[mesh.axes.index(axis)], options, settings)
        return PipelineAxis(mesh=mesh, axis=axis, options=options, planner=planner, beyond=planner.beyond())

    @functools.cached_property
    def hiding(self) -> PipelineAxis:
        """The axis with a planner that assumes hidden messages, except for as many micro-batches as there are cuts."""
        known = self.planner
        waiting = StagePlanner(known.mesh, known.link, known.options, known.settings, waiting=self.ranks - 1)
        return replace(self, planner=waiting)

    @property
    def ranks(self) -> int:
        """The size of the pipeline's axis."""
        return self.mesh.sizes[self.mesh.axes.index(self.axis)]

    def floor(self, products: Seconds, runs: int) -> Seconds:
        """A lower bound over the open schedules, if the step's products take so long without stages."""
        if self.options.schedule.partition("+")[0] not in WHOLE:
            return products
        return self.ranks * products / (runs * (1 - (1 - 1 / runs) ** self.ranks))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Hope:
    """Stages guessed from the first one, which holds one micro-batch at a time, for so many micro-batches over an axis.

    `dropped` is the share of the other micro-batches' memory that does not fit, with as many in flight as in the first
    schedule.
    """

    over: PipelineAxis
    runs: int
    stages: Sequence[StageSeconds]
    dropped: float = 0.0

    def busy(self) -> Seconds:
        """The step if no rank were ever idle."""
        return sum(self.runs * stage.busy + stage.once for stage in self.stages) / self.over.ranks

    def made_again(self) -> Seconds:
        """The estimated cost of recomputing what is dropped: the same share of the forwards."""
        return self.dropped * self.runs * sum(stage.forward for stage in self.stages) / self.over.ranks

    def by(self, cut: Cut, shares: Sequence[float]) -> Seconds:
        """The estimated step in other stages with these shares of the program, under another schedule."""
        first = self.stages[0]
        whole = first.times(sum(stage.busy for stage in self.stages) / first.busy)
        return cut.waits_filled([whole.times(share) for share in shares])[1]


def forms(options: Options, ranks: int) -> Iterator[ScheduledStages]:
    """The schedules and numbers of stages that the options leave open, least memory first.

    A compiled backward is not split in halves.
    """
    chosen = options.schedule == AUTO and options.compiled
    return (form for form in _forms(options, ranks) if not (chosen and form[0].partition("+")[0] in DEFERRED))


def _forms(options: Options, ranks: int) -> Iterator[ScheduledStages]:
    stages, asked = options.stages, options.schedule
    several = tuple(("interleaved", chunks * ranks) for chunks in CHUNKS) if ranks > 1 else ()
    if asked != AUTO:
        yield from several if (asked, stages) == ("interleaved", AUTO) else [(asked, stages)]
        return
    match stages:
        case int():
            count = stages
        case str():
            count = ranks
        case _:
            count = len(stages) + 1
    if count > ranks and count % ranks == 0:
        yield "interleaved", stages
        if count == 2 * ranks:
            yield "zb-v", stages
        return
    for base in AHEAD:
        yield base, stages
        ahead = 1
        while ahead < ranks:
            yield f"{base}+{ahead}", stages
            ahead = ranks - 1 if ahead < ranks - 1 <= 2 * ahead else 2 * ahead
    if stages == AUTO:
        yield from several
        if several:
            yield "zb-v", 2 * ranks
    yield "gpipe", stages


def given_microbatches(options: Options) -> int | None:
    """The fixed number of micro-batches, if any: as requested, or as in the schedule's file."""
    if isinstance(options.microbatches, int):
        return options.microbatches
    return read_schedule(options.schedule).microbatches if is_file(options.schedule) else None


def doubled(numbers: Iterable[int]) -> Iterator[int]:
    """A subset of the numbers in which each is at least twice the previous one.

    >>> list(doubled([1, 2, 3, 4, 6, 12]))
    [1, 2, 4, 12]
    """
    last = 0
    for number in numbers:
        if number >= 2 * last:
            yield number
            last = number


def nearest(numbers: Sequence[int], near: float) -> int:
    """The index of the number with the smallest ratio to `near`.

    >>> nearest([1, 2, 4, 8, 16], 5)
    2
    """
    return min(range(len(numbers)), key=lambda place: abs(math.log(numbers[place] / near)))


def climbed(
    numbers: Sequence[int], near: float, seconds: Callable[[int], Seconds], short: Callable[[], bool]
) -> tuple[Seconds, int, int]:
    """The best time over some numbers, the number that has it, and how many were skipped.

    Climbs up from the one nearest to `near` until one is slower, then down if none above is faster, until one is slower or was
    `short` of memory: fewer micro-batches, or ranks, hold more.

    >>> climbed([1, 2, 4, 8, 16], 4, {4: 3.0, 8: 2.0, 16: 5.0}.__getitem__, lambda: False)
    (2.0, 8, 2)
    """
    start = nearest(numbers, near)
    first, left = seconds(numbers[start]), 0
    best = first, numbers[start]
    for side, fewer in ((numbers[start + 1 :], False), (numbers[:start][::-1], True)):
        before = first
        if best[0] < first < math.inf:
            left += len(side)
            break
        for place, number in enumerate(side):
            if fewer and before == math.inf and short():
                break
            found = seconds(number)
            best = min(best, (found, number))
            if found > before or found == before < math.inf:
                left += len(side) - place - 1
                break
            before = found
    return *best, left


def cut_mesh(mesh: Mesh, ranks: int) -> Mesh:
    """Cut a mesh for so many pipeline ranks; links are those of the parts, unless they were given with the mesh."""
    cut, device = mesh.cut(ranks), mesh.device
    assert device is not None, "a mesh is planned with its device"
    of_device = connect(replace(mesh, links=()), device).links == mesh.links
    return connect(replace(cut, links=()), device) if of_device else cut


def _on(spatial: Mesh, mesh: Mesh, constraints: Mapping[str, str]) -> dict[str, str]:
    """Constraints on a mesh, restricted to the mesh of a stage, which may lack the outermost axis."""
    if len(spatial.sizes) == 1 and len(mesh.sizes) == 1:
        return dict(constraints)
    whole = mesh.joined.axes == spatial.axes
    return {name: line if whole else line.partition(",")[2].strip() for name, line in constraints.items()}


def products_floor(program: Program, mesh: Mesh, options: Options) -> Seconds:
    """Seconds for a step's products on all devices at their peak; 0 if prices are not the catalog's."""
    device = mesh.device
    assert device is not None, "a mesh is planned with its device"
    if options.cost_model.name != CATALOG.name or device.rates:
        return 0.0
    return products_at_peak(program, device) / mesh.size


__all__ = ["Hope", "PipelineAxis", "climbed", "cut_mesh", "doubled", "forms", "given_microbatches", "nearest", "products_floor"]
