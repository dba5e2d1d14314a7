"""What is left open of a pipeline: parts of an axis, numbers, schedules; and the least that a step may take.

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
    """A mesh with the axis of a pipeline, what is asked for on it, and what is known of stages there: by the `planner`, and
    by the one `beyond` the budget, whose memory is plenty."""

    mesh: Mesh
    axis: str
    options: Options
    planner: StagePlanner
    beyond: StagePlanner

    @staticmethod
    def of(mesh: Mesh, axis: str, options: Options, settings: SearchSettings) -> PipelineAxis:
        """This axis of a mesh, whose stages are searched by these settings; where it is cut off another one, constraints are
        those on what is left."""
        spatial = without_axis(mesh, axis)
        if options.pipeline == AUTO:
            options = replace(options, constraints=_on(spatial, mesh, options.constraints))
        planner = StagePlanner(spatial, mesh.links[mesh.axes.index(axis)], options, settings)
        return PipelineAxis(mesh=mesh, axis=axis, options=options, planner=planner, beyond=planner.beyond())

    @functools.cached_property
    def hiding(self) -> PipelineAxis:
        """The axis with a planner for which messages hide beside the computing, but for those of the first and the last
        micro-batches, as if as many of these waited as there are cuts."""
        known = self.planner
        waiting = StagePlanner(known.mesh, known.link, known.options, known.settings, waiting=self.ranks - 1)
        return replace(self, planner=waiting)

    @property
    def ranks(self) -> int:
        """The size of the pipeline's axis."""
        return self.mesh.sizes[self.mesh.axes.index(self.axis)]

    def floor(self, products: Seconds, runs: int) -> Seconds:
        """What a step takes at least by the schedules that are open, if its products take so long without stages."""
        if self.options.schedule.partition("+")[0] not in WHOLE:
            return products
        return self.ranks * products / (runs * (1 - (1 - 1 / runs) ** self.ranks))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Hope:
    """Stages of so many micro-batches over an axis that are guessed from the first one, which holds one of them at a time.

    `dropped` is the share of what the others would hold that does not fit into the memory, with as many in flight as the first
    schedule has.
    """

    over: PipelineAxis
    runs: int
    stages: Sequence[StageSeconds]
    dropped: float = 0.0

    def busy(self) -> Seconds:
        """What a step would take in which no rank is ever idle."""
        return sum(self.runs * stage.busy + stage.once for stage in self.stages) / self.over.ranks

    def made_again(self) -> Seconds:
        """About what a step takes longer as what is dropped is made again: as large a share of its forwards."""
        return self.dropped * self.runs * sum(stage.forward for stage in self.stages) / self.over.ranks

    def by(self, cut: Cut, shares: Sequence[float]) -> Seconds:
        """What a step would take in other stages, by another schedule, that have these shares of the program."""
        first = self.stages[0]
        whole = first.times(sum(stage.busy for stage in self.stages) / first.busy)
        return cut.waits_filled([whole.times(share) for share in shares])[1]


def forms(options: Options, ranks: int) -> Iterator[ScheduledStages]:
    """The schedules and numbers of stages that options leave open, those first that hold least.

    A backward that is compiled does not come in halves.
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
    """How many micro-batches a step has where that is not open: as is asked for, or as in the file of its schedule."""
    if isinstance(options.microbatches, int):
        return options.microbatches
    return read_schedule(options.schedule).microbatches if is_file(options.schedule) else None


def doubled(numbers: Iterable[int]) -> Iterator[int]:
    """The numbers of which each is at least twice the one before.

    >>> list(doubled([1, 2, 3, 4, 6, 12]))
    [1, 2, 4, 12]
    """
    last = 0
    for number in numbers:
        if number >= 2 * last:
            yield number
            last = number


def nearest(numbers: Sequence[int], near: float) -> int:
    """The place of the number by which `near` has the smallest factor.

    >>> nearest([1, 2, 4, 8, 16], 5)
    2
    """
    return min(range(len(numbers)), key=lambda place: abs(math.log(numbers[place] / near)))


def climbed(
    numbers: Sequence[int], near: float, seconds: Callable[[int], Seconds], short: Callable[[], bool]
) -> tuple[Seconds, int, int]:
    """The best time over some numbers, the number that has it, and how many were left out.

    From the one that is nearest to `near` up, until one is slower, and down only if none above is faster, until one is slower
    or was `short` of memory: fewer micro-batches, or ranks, hold more.

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
    """A mesh cut for so many ranks of a pipeline; links are those of the parts, unless they were given with the mesh."""
    cut, device = mesh.cut(ranks), mesh.device
    assert device is not None, "a mesh is planned with its device"
    of_device = connect(replace(mesh, links=()), device).links == mesh.links
    return connect(replace(cut, links=()), device) if of_device else cut


def _on(spatial: Mesh, mesh: Mesh, constraints: Mapping[str, str]) -> dict[str, str]:
    """Constraints on a mesh as those on what is left of it for a stage, which may lack the outermost axis."""
    if len(spatial.sizes) == 1 and len(mesh.sizes) == 1:
        return dict(constraints)
    whole = mesh.joined.axes == spatial.axes
    return {name: line if whole else line.partition(",")[2].strip() for name, line in constraints.items()}


def products_floor(program: Program, mesh: Mesh, options: Options) -> Seconds:
    """Seconds in which all devices at their peak do the products of a step; 0 where prices are not the catalog's."""
    device = mesh.device
    assert device is not None, "a mesh is planned with its device"
    if options.cost_model.name != CATALOG.name or device.rates:
        return 0.0
    return products_at_peak(program, device) / mesh.size


__all__ = ["Hope", "PipelineAxis", "climbed", "cut_mesh", "doubled", "forms", "given_microbatches", "nearest", "products_floor"]
