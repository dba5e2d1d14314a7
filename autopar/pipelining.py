"""Build this rank's module from a plan with pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

from autopar.capture import Captured
from autopar.capture.python_state import Settings
from autopar.codegen import ModuleState, OutputLayout, ParallelModule, emit
from autopar.codegen.pipeline_module import PipelineModule, PipelineParts, PipelineState, StageModule
from autopar.ir.dynamic_dims import describe_sizes, dim_sizes
from autopar.ir.layout import I, Layout, local_shape
from autopar.ir.mesh import AutoMesh, Mesh
from autopar.ir.program import Value
from autopar.parallelize import build, sizes_of, steps_of, tensors_of
from autopar.pipeline.schedule import ActionKind
from autopar.plan.options import AUTO, Options
from autopar.plan.pipeline import Pipeline
from autopar.plan.plan import Plan
from autopar.plan.stages import ResolvedPipeline, hoisting, loss_of, read_pipeline
from autopar.planning.optimize import sharded
from autopar.planning.pipeline_search import make_pipeline_plan, plan_pipeline
from autopar.planning.plan_cache import cached
from autopar.planning.planner import connected_mesh, connected_meshes, make_plan, read_program
from autopar.planning.respecialize import StagesRespecializer, varied_plan
from autopar.planning.source import ModelSource, serves
from autopar.planning.stages_alike import check_stored, given_alike, planned_alike, stored_by_rank
from autopar.runtime.input_parts import InputParts
from autopar.runtime.lost_ranks import exchanging
from autopar.runtime.pipeline import CrossingPart, PipelineRank
from autopar.runtime.random import agreed_seed
from autopar.runtime.rank_consistency import check_program, from_rank_0
from autopar.runtime.rank_failures import StepFailures
from autopar.runtime.storage import STORED, all_plain, store, with_dtype
from autopar.runtime.world import Context, FlattenedAxes, connect, without_processes


def build_pipeline(
    model: nn.Module,
    sample_input: object,
    mesh: object,
    plan: Plan | None,
    options: Options,
    *,
    sharded_inputs: bool = False,
) -> PipelineModule | ParallelModule:
    """See `autopar.parallelize`; if the plan decides whether there are stages, rank 0 plans before anything is built."""
    if options.pipeline == AUTO:
        plan = plan or planned_by_rank_0(model, sample_input, mesh, options)
        options = replace(options, pipeline=plan.pipeline.axis if plan.pipeline else None, microbatches=plan.microbatches)
        if plan.pipeline is None:
            return build(model, sample_input, mesh, plan, options, sharded_inputs=sharded_inputs)
    return _built(model, sample_input, mesh, plan, options, sharded_inputs=sharded_inputs)


def planned_by_rank_0(
    model: nn.Module, sample_input: object, mesh: object, options: Options, plans: Path | None = None
) -> Plan:
    """The plan that rank 0 makes, or finds in the folder `plans`, sent to every rank before anything is built."""
    if isinstance(mesh, AutoMesh):
        context = connect(Mesh.of((mesh.devices,)))
    else:
        device_mesh = mesh if isinstance(mesh, DeviceMesh) else None
        context = connect(connected_mesh(mesh, options).bare, device_mesh=device_mesh)

    def make() -> Plan:
        if options.pipeline is None:
            return make_plan(model, sample_input, mesh, options).plan
        return make_pipeline_plan(model, sample_input, mesh, options)

    def text() -> str:
        if plans is None:
            return make().to_json()
        program = read_program(model, sample_input, options).program
        return cached(plans, program, connected_meshes(mesh, options, program), options, make).to_json()

    return Plan.from_json(from_rank_0(text, context))


def _built(
    model: nn.Module, sample_input: object, mesh: object, plan: Plan | None, options: Options, *, sharded_inputs: bool
) -> PipelineModule:
    """Build the module of a plan with a pipeline; rank 0 makes the plan if there is none."""
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else None
    priced = connected_mesh(mesh, options, plan)
    options = options.under(plan)
    context = connect(priced.bare, device_mesh=device_mesh)
    source = ModelSource(model, sample_input, options)
    captured = source.read(dim_sizes(plan.dynamic) if plan else {})
    sizes = sizes_of(plan, options, captured)
    check_program(captured.program, context, sharded_inputs=sharded_inputs)
    source = source.hollow(captured)

    def planned() -> str:
        if plan is not None:
            return plan.to_json()
        made = plan_pipeline(captured.program, priced, options)
        return varied_plan(made, captured.program, sizes, source.program_at).to_json()

    found = read_pipeline(Plan.from_json(from_rank_0(planned, context)), captured.program)
    module = assembled_stages(captured, tensors_of(model), found, context, sharded_inputs=sharded_inputs)
    module.autopar.mode, module.autopar.settings = model.training, Settings.of(model, captured.kept, captured.constants)
    module.autopar.decided = captured.decided.stored(module.local_buffers)
    module.autopar.vary(_SizedStages(source, found), found.plan.dynamic)
    module.autopar.other = _OtherStages(source, captured, priced, found)
    return module.train(model.training)


def assembled_stages(
    captured: Captured,
    tensors: Mapping[str, torch.Tensor],
    found: ResolvedPipeline,
    context: Context,
    *,
    sharded_inputs: bool = False,
) -> PipelineModule:
    """Build the module of a captured program from a plan in stages, with this rank's parts of rank 0's whole tensors.

    With `sharded_inputs` a call takes this rank's parts of the batch, equal along the pipeline's axis.
    """
    assert found.plan.pipeline is not None, "the plan has a pipeline"
    axes, shapes = found.plan.stages[0].axes, captured.signature.shapes
    layouts = {
        path: dict(zip(axes, layout, strict=True)) | {found.plan.pipeline.axis: I}
        for path, layout in zip(shapes, given_alike(found).values(), strict=False)
    }
    inputs = InputParts(
        context=context,
        shapes=shapes,
        layouts={path: tuple(states[axis] for axis in context.mesh.axes) for path, states in layouts.items()},
        sharded=sharded_inputs,
    )
    return _Builder(captured, found, context, inputs).module(tensors)


class _SizedStages:
    """Builds the stages for other dynamic sizes, under the same plan and over the same stored parameters."""

    def __init__(self, source: ModelSource, found: ResolvedPipeline) -> None:
        self.source, self.resizer = source, StagesRespecializer(found)

    def __call__(self, parallel: ParallelModule, numbers: tuple[int, ...]) -> PipelineModule:
        """The module for these numbers of the plan's sizes."""
        sizes = self.resizer.plan.dynamic
        captured = self.source.read(dim_sizes(sizes, numbers))
        return _over(parallel, captured, self.resizer.plan_for(captured.program, describe_sizes(sizes, numbers)))


class _OtherStages:
    """Builds the stages for the other mode (training or evaluation) on first use, over the same stored parameters."""

    def __init__(self, source: ModelSource, captured: Captured, mesh: Mesh, found: ResolvedPipeline) -> None:
        self.source, self.captured, self.mesh, self.found = source, captured, mesh, found

    def __call__(self, parallel: ParallelModule) -> PipelineModule | None:
        """The module for `parallel`'s current mode; None if only flags differ, so that its own stages work."""
        source, plan = self.source.in_mode(parallel.training), self.found.plan
        captured = source.read(dim_sizes(plan.dynamic))
        if serves(self.captured, captured, parallel.training):
            return None
        sizes = [replace(size, multiple=1) for size in plan.dynamic]

        def planned() -> str:
            given = given_alike(self.found) if parallel.autopar.inputs.sharded else {}
            made = planned_alike(captured.program, self.found, self.mesh, source.options, given)
            return varied_plan(made, captured.program, sizes, source.program_at).to_json()

        text = from_rank_0(planned, parallel.autopar.context)
        found = read_pipeline(Plan.from_json(text), captured.program)
        check_stored(self.found, found)
        twin = _over(parallel, captured, found)
        twin.autopar.vary(_SizedStages(source, found), found.plan.dynamic)
        return twin


def _over(parallel: ParallelModule, captured: Captured, found: ResolvedPipeline) -> PipelineModule:
    """Build the stages of another program over a module's tensors."""
    assert isinstance(parallel, PipelineModule), "it has stages"
    state = parallel.autopar
    inputs = state.inputs.resized(captured.signature.shapes)
    builder = _Builder(captured, found, state.context, inputs, parallel.autopar.stages.rank)
    made = builder.over(tensors_of(parallel), state.rng_state.seed)
    made.autopar.rng_state = state.rng_state
    return made


class _Builder:
    """Builds this rank's module from a plan that has been read."""

    def __init__(
        self,
        captured: Captured,
        found: ResolvedPipeline,
        context: Context,
        inputs: InputParts,
        rank: PipelineRank | None = None,
    ) -> None:
        assert found.plan.pipeline is not None, "the plan has a pipeline"
        self.captured, self.found, self.context, self.inputs = captured, found, context, inputs
        self.pipeline: Pipeline = found.plan.pipeline
        self.axis = context.axis(self.pipeline.axis)
        self.stage_context = _without(context, self.pipeline.axis)
        for axis in sorted(set[int]().union(*(one.assignment.axes for one in found.resolved))):
            self.stage_context.over(self.stage_context.mesh.axes_over(axis))  # now: some ranks emit no code over it
        self.rank, self.layouts = rank or self._rank(), stored_by_rank(found)
        self.mine = [stage for stage, rank in sorted(self.pipeline.order.rank_of.items()) if rank == self.axis.index]

    def _rank(self) -> PipelineRank:
        """This rank's position on the pipeline's axis; the module is built by all ranks."""
        group = _resolve_process_group(GroupName(self.axis.group)) if self.axis.group else None
        failures = StepFailures.of(self.context)
        return PipelineRank(index=self.axis.index, group=group, device=self.context.device, failures=failures)

    def module(self, tensors: Mapping[str, torch.Tensor]) -> PipelineModule:
        """The module, with this rank's parts of rank 0's tensors."""
        seed = agreed_seed(self.context)
        return self.over(self._stored(tensors), seed)

    def over(self, tensors: Mapping[str, torch.Tensor], seed: int) -> PipelineModule:
        """Build the module over tensors stored in the plan's layouts; tensors that it does not use are ignored."""
        plan, step = self.found.plan, self.found.step
        stored = {name: tensors[name] for name in self.layouts[self.axis.index]}
        unsharded = all_plain(stored.values())
        stages = {number: self._stage(number, stored, unsharded, seed) for number in self.mine}
        read = {value.name for stage in stages.values() for value in stage.program.inputs}
        loop = hoisting(step, read)
        steps = steps_of(loop, {}, self.stage_context, unsharded=unsharded, gathers=step.loop) if loop else None
        for stage in stages.values():
            stage.module.autopar.steps = steps
        parts = PipelineParts(
            pipeline=self.pipeline,
            rank=self.rank,
            stages=stages,
            program=step.program,
            inputs=tuple(value.name for value in step.program.inputs if value not in step.hoisted or value.name in read),
            loss=[output.value for output in step.program.outputs].index(loss_of(step.program)),
        )
        state = PipelineState(parts, plan, self.captured.signature, self.context, seed, steps, self.inputs)
        state.alike, state.storage = False, self.stage_context
        return PipelineModule(stored, state)

    def _stored(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The stored tensors of this rank's stages.

        Rank 0 sends each tensor whole to the first rank of the stages that read it; that rank distributes it.
        """
        empty = [{name: tensor.is_meta for name, tensor in tensors.items()}]
        if self.context.device_mesh is not None:
            with exchanging(STORED):
                dist.broadcast_object_list(empty, src=0, device=self.context.device)
        own: dict[str, torch.Tensor] = {}
        for rank, known in sorted(self.layouts.items()):
            for name in known:
                dtype = self.found.step.program.values[name].dtype
                tensor = with_dtype(tensors[name], dtype)
                if rank == self.axis.index:
                    own[name] = tensor
                if rank and not empty[0][name]:
                    self._carry(tensor, rank, own, name)
        mine = self.layouts[self.axis.index]
        return store(own, mine, self.stage_context, [empty[0][name] for name in own])

    def _carry(self, tensor: torch.Tensor, rank: int, own: dict[str, torch.Tensor], name: str) -> None:
        """Send a whole tensor from rank 0 to the first rank at a position of the pipeline's axis."""
        if self.context.device_mesh is None or any(self.stage_context.coordinates):  # ranks as threads have all of them
            return
        if self.axis.index == 0:
            dist.send(tensor.detach().to(self.context.device).contiguous(), self.rank.peer(rank), group=self.rank.group)
        elif self.axis.index == rank:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.context.device)
            dist.recv(whole, self.rank.peer(0), group=self.rank.group)
            is_parameter = isinstance(tensor, nn.Parameter)
            own[name] = nn.Parameter(whole, requires_grad=tensor.requires_grad) if is_parameter else whole

    def _stage(self, number: int, stored: Mapping[str, torch.Tensor], unsharded: bool, seed: int) -> StageModule:
        resolved = self.found.resolved[number]
        step, program, chosen = resolved.step, resolved.program, resolved.assignment
        outputs: Sequence[OutputLayout] = ()
        if not step.sends:
            split = sharded(program, self.found.plan.options.get("outputs") or None)
            outputs = [
                OutputLayout(shape=self.found.step.batch_shape(o.value), layout=chosen.outputs[o.path], split=split(o))
                for o in program.outputs
            ]
        fits, training = dict(resolved.analysis.fits), self.captured.training
        deferred = self.pipeline.order.deferred
        given = {value.name: layout for value, layout in self._given() if value in program.inputs}
        graph = emit(
            step, chosen, fits, self.stage_context, training=training, unsharded=unsharded, given=given, deferred=deferred
        )
        state = ModuleState(
            plan=resolved.plan, signature=self.captured.signature, context=self.stage_context, seed=seed, outputs=outputs
        )
        backwards = self.pipeline.order.microbatches_of(number, ActionKind.BACKWARD)
        state.accumulator.defer_all = deferred or backwards != sorted(backwards)
        back = {crossing.value for crossing in self.pipeline.crossings if crossing.gradient}
        received = [self._part(program.values[name], step.received[name], back) for name in step.received]
        sent = [self._part(program.values[o.value], chosen.outputs[o.path], back) for o in program.outputs if step.sends]
        return StageModule(
            module=ParallelModule(graph, program, stored, state),
            program=program,
            received=tuple(received),
            sent=tuple(sent),
        )

    def _given(self) -> Iterator[tuple[Value, Layout]]:
        """The inputs that ranks pass in parts, and the layouts of these parts on the mesh of a stage."""
        axes = [self.context.mesh.axes.index(axis) for axis in self.stage_context.mesh.axes]
        layouts = self.inputs.layouts.values() if self.inputs.sharded else ()
        for value, layout in zip(self.found.step.program.inputs, layouts, strict=False):
            yield value, tuple(layout[axis] for axis in axes)

    def _part(self, value: Value, layout: Layout, back: set[str]) -> CrossingPart:
        shape = local_shape(value.shape, layout, self.stage_context.mesh.sizes)
        return CrossingPart(name=value.name, shape=shape, dtype=value.dtype, gradient=value.name in back)


def _without(context: Context, axis: str) -> Context:
    """The mesh of this rank's stages, made of the processes that share them."""
    axes = tuple(one for one in context.axes if one.name != axis)
    if not axes:
        alone = replace(context.axis(axis), size=1, index=0, group="")
        mesh = Mesh(axes=(axis,), sizes=(1,))
        return replace(without_processes(mesh, (alone,), context.device), disk=context.disk)
    mesh = Mesh(axes=tuple(one.name for one in axes), sizes=tuple(one.size for one in axes))
    places = [place for place, one in enumerate(context.axes) if one.name != axis]
    over = FlattenedAxes(mesh.name_of, axes, lambda found: context.over(tuple(places[at] for at in found)).group)
    if context.device_mesh is None:
        return replace(context, mesh=mesh, axes=axes, over=over)
    grid = context.device_mesh
    if grid.mesh_dim_names is None:
        grid = DeviceMesh(grid.device_type, grid.mesh, mesh_dim_names=context.mesh.axes)
    kept = tuple(name for name, one in zip(grid.mesh_dim_names or (), context.axes, strict=True) if one.name != axis)
    return replace(context, mesh=mesh, device_mesh=grid[kept], axes=axes, over=over)


__all__ = ["assembled_stages", "build_pipeline"]
