"""The search for a pipeline: how many ranks it has, how many micro-batches, and by which schedule they pass.

    for each number of ranks that is left open, 1 (no stages) first       `Mesh.cut`: the outermost axis
        for each number of micro-batches, the fewest first                passed over below its floor
            for 1f1b, zb-h1, with forwards ahead, interleaved, zb-v, gpipe    passed over where the clock says: no faster
                plan the stages, time the step

The floor is proven. The products of a step take F seconds on all devices at their peak. With t_s the seconds of stage s for one
of m micro-batches, each rank with one stage and backwards in one piece, `stage_search` has T >= sum_{q<s} t_q + m t_s for every
s; of stages that together take p F / m the least such T has all of these equal:

    T >= p F / (m (1 - (1 - 1/m)^p))              and T >= F with several stages a rank, or with backwards in halves

Large programs are not searched to the end: see `large_pipelines`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from autopar.ir.device import Seconds
from autopar.ir.dynamic_dims import declared
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.microbatches import counts
from autopar.plan.options import AUTO, Options
from autopar.plan.plan import Plan
from autopar.planning.large_pipelines import LargePipelineSearch
from autopar.planning.mesh_shapes import LARGE
from autopar.planning.pipeline_checks import check_options, check_program
from autopar.planning.pipeline_space import PipelineAxis, forms
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
) -> PipelineTrials:
    """The search over one mesh, or several shapes of one, run to its end."""
    check_options(options)
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
    """Every number of ranks and of micro-batches and every schedule, but for what is proven to be no faster."""

    def both(self, mesh: Mesh) -> None:
        self.whole(mesh, self.options.microbatches)
        for ranks in self.ways_to_cut(mesh):
            self.cut(mesh, ranks)

    def numbers(self, over: PipelineAxis, products: Seconds) -> Seconds:
        faster = (runs for runs in counts(self.program) if not self.below_floor(over, runs, products))
        return min((self.number(over, runs) for runs in faster), default=math.inf)

    def number(self, over: PipelineAxis, runs: int) -> Seconds:
        return self.schedules(over, runs, forms(over.options, over.ranks))

    def finish(self) -> None:
        pass


__all__ = ["PipelineSearch", "make_pipeline_plan", "plan_on", "plan_pipeline", "search_pipeline"]
