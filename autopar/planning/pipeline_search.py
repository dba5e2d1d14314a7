"""Searches for a pipeline: its number of ranks, of micro-batches, and its schedule.

    no stages                                                             `plan_search`
    for each number of ranks that is left open, of micro-batches          `Mesh.cut`: the outermost axis; the least bound first
        for 1f1b, zb-h1, with forwards ahead, interleaved, zb-v, gpipe    passed over by its bound, or by the clock
            plan the stages, time the step

The candidate of least bound is bounded more tightly: by the floor of its products, then by the price of the whole step on ranks
that are never idle, then by that under each schedule (`pipeline_bound`). When no tighter bound is left it is planned, and the
search ends when the least bound is no less than the best plan. Prices are over all strategies, hence no more than for a named
one, and for links without latency: stages may send weights in fewer messages than the whole step.

For the floor, the products of a step take F seconds on all devices at their peak. With t_s the seconds of stage s for one of m
micro-batches, each rank with one stage and backwards in one piece, `stage_search` has T >= sum_{q<s} t_q + m t_s for every s;
of stages that together take p F / m the least such T has all of these equal:

    T >= p F / (m (1 - (1 - 1/m)^p))              and T >= F with several stages a rank, or with backwards in halves

Large programs are not searched to the end: see `large_pipelines`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from autopar.analysis.recompute_policy import check_blocks
from autopar.errors import AutoparError, ConstraintError
from autopar.ir.device import Seconds
from autopar.ir.dynamic_dims import declared
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.microbatches import counts
from autopar.plan.options import AUTO, Options
from autopar.plan.plan import Plan
from autopar.planning.large_pipelines import LargePipelineSearch
from autopar.planning.mesh_shapes import LARGE
from autopar.planning.pipeline_bound import UncutStep
from autopar.planning.pipeline_checks import check_options, check_program
from autopar.planning.pipeline_space import PipelineAxis, ScheduledStages, forms
from autopar.planning.pipeline_trials import PipelineTrials
from autopar.planning.plan_search import best_shape, limited
from autopar.planning.planner import at_sizes, connected_meshes, read_program, to_plan
from autopar.planning.respecialize import varied_plan
from autopar.solver.settings import DEFAULTS, SearchSettings


def make_pipeline_plan(model: nn.Module, sample_input: object, mesh: object, options: Options) -> Plan:
    """Capture a model and plan it in stages; see `autopar.plan`."""
    settings = limited(DEFAULTS, options)
    captured = read_program(model, sample_input, options)
    sizes = declared(options.dynamic, captured.signature.shapes)
    with settings.deadline.heard():
        plan = search_pipeline(captured.program, connected_meshes(mesh, options, captured.program), options, settings).plan()
    return varied_plan(plan, captured.program, sizes, at_sizes(plan, model, sample_input))


def plan_on(program: Program, meshes: Sequence[Mesh], options: Options) -> Plan:
    """The fastest plan of a captured program on any of these meshes, with stages if requested."""
    if options.pipeline is not None:
        return search_pipeline(program, meshes, options).plan()
    return to_plan(best_shape(program, meshes, options, lambda phase: None), options)


def plan_pipeline(program: Program, mesh: Mesh, options: Options, settings: SearchSettings = DEFAULTS) -> Plan:
    """Plan a captured program in stages, or without if that is left open, on a mesh with device and links.

    Raises what planning raises, and ConstraintError or MeshError if the stages, schedule or axis do not exist.
    """
    return search_pipeline(program, (mesh,), options, settings).plan()


def search_pipeline(
    program: Program, meshes: Sequence[Mesh], options: Options, settings: SearchSettings = DEFAULTS
) -> PipelineTrials:
    """Run the search over one mesh, or several shapes of one, to its end."""
    check_options(options)
    check_blocks(program, options.recompute)
    kind = LargePipelineSearch if len(program.ops) > LARGE else PipelineSearch
    search = kind(program, options, limited(settings, options))
    for mesh in meshes:
        if options.pipeline == AUTO:
            search.both(mesh)
        else:
            assert options.pipeline is not None, "a pipeline is asked for"
            check_program(program)
            search.over(mesh, options.pipeline)
    search.finish()
    search.fared["shapes of the mesh"] += len(meshes) if len(meshes) > 1 else 0
    return search


class PipelineSearch(PipelineTrials):
    """The exhaustive search over ranks, micro-batches and schedules, lowest bound first, until the rest is proven no faster;
    all of it runs in `finish`.
    """

    def __init__(self, program: Program, options: Options, settings: SearchSettings) -> None:
        super().__init__(program, options, settings)
        self._open: list[_OpenSchedules] = []

    def both(self, mesh: Mesh) -> None:
        self.whole(mesh, self.options.microbatches)
        for ranks in self.ways_to_cut(mesh):
            self.cut(mesh, ranks)

    def numbers(self, over: PipelineAxis, products: Seconds) -> Seconds:
        self._open += (_OpenSchedules(self, over, runs, over.floor(products, runs)) for runs in counts(self.program))
        return math.inf

    def number(self, over: PipelineAxis, runs: int) -> Seconds:
        self._open.append(_OpenSchedules(self, over, runs, 0.0))
        return math.inf

    def finish(self) -> None:
        """Tighten the bound of the open candidate with the lowest one, again and again; plan it when there is no tighter
        bound.
        """
        left = sorted((one.bound, place) for place, one in enumerate(self._open))
        while left and not self.ended:
            bound, place = heapq.heappop(left)
            one = self._open[place]
            if bound >= self.seconds:
                self.fared["slower by their bound"] += 1 + len(left)
                break
            alone = not left and self.seconds == math.inf
            if not alone and not self.settings.deadline.passed and one.refined():
                heapq.heappush(left, (one.bound, place))
            else:
                self.schedules(one.over, one.runs, one.faster())


class _OpenSchedules:
    """The unplanned schedules of so many micro-batches over an axis, and a `bound` on all of them.

    It is first that of the products, then that of the whole step on ranks that are never idle, then the least of the `bounds`
    by schedule.
    """

    def __init__(self, search: PipelineTrials, over: PipelineAxis, runs: int, floor: Seconds) -> None:
        self.search, self.over, self.runs, self.bound = search, over, runs, floor
        self.ways = list(forms(over.options, over.ranks))
        self.bounds: list[Seconds] = []
        self._uncut: UncutStep | None = None

    def refined(self) -> bool:
        """Compute the next tighter, more expensive bound; returns whether there is one."""
        if self.bounds:
            return False
        try:
            if self._uncut is None:
                planner, step = self.over.planner, self.search.cuts(self.over, self.runs).step
                mesh, options = planner.mesh.without_latency(), replace(planner.options, strategy=AUTO)
                self._uncut = UncutStep(step, mesh, planner.link, options, planner.settings)
                self.bound = max(self.bound, self._uncut.busy(self.over.ranks))
                return True
            self.bounds = [self._bounded(self._uncut, schedule, stages) for schedule, stages in self.ways]
        except AutoparError:  # which planning will say
            return False
        self.bound = min(self.bounds)
        return True

    def faster(self) -> Iterator[ScheduledStages]:
        """The schedules that may beat the best known, lowest bound first."""
        bounds = self.bounds or [self.bound] * len(self.ways)
        for bound, way in sorted(zip(bounds, self.ways, strict=True), key=lambda one: one[0]):
            if bound < self.search.seconds:
                yield way

    def _bounded(self, uncut: UncutStep, schedule: str, stages: int | str | Sequence[str]) -> Seconds:
        """The bound of the step under a schedule; infinite if the program has too few stages."""
        asked = replace(self.over.options, schedule=schedule, stages=stages)
        try:
            cut = self.search.cuts(self.over, self.runs).chosen(self.over.mesh, self.over.axis, asked, self.runs)
        except ConstraintError as error:
            self.search.refused.append(error)
            return math.inf
        return max(self.bound, uncut.roughly(cut.schedule))


__all__ = ["PipelineSearch", "make_pipeline_plan", "plan_on", "plan_pipeline", "search_pipeline"]
