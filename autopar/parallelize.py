"""Build this rank's module from a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from glob import escape

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture import Captured
from autopar.capture.held_tensors import held_tensors
from autopar.capture.python_state import Settings
from autopar.codegen import ModuleState, OutputLayout, ParallelModule, Steps, emit
from autopar.errors import ConstraintError, InputError, PlanError
from autopar.ir.dynamic_dims import Size, declared, describe_sizes, dim_sizes
from autopar.ir.layout import I, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.training_step import MicrobatchLoop, TrainingStep
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.resolved import ResolvedPlan, read_plan
from autopar.planning.memories import check_disk, check_host
from autopar.planning.optimize import sharded
from autopar.planning.planner import connected_mesh, planned_mesh, resolve_program, stored_layouts
from autopar.planning.respecialize import Respecializer, varied
from autopar.planning.shared_storage import stored_as
from autopar.planning.source import ModelSource, serves
from autopar.runtime.disk import folder_of
from autopar.runtime.input_parts import InputParts
from autopar.runtime.progress import phases, progress
from autopar.runtime.random import agreed_seed
from autopar.runtime.rank_consistency import check_program, from_rank_0
from autopar.runtime.storage import all_plain, store, with_dtype
from autopar.runtime.world import Context, connect
from autopar.search_space.assignment import Assignment
from autopar.search_space.candidates import INVARIANT, candidate


def build(
    model: nn.Module,
    sample_input: object,
    mesh: object,
    plan: Plan | None,
    options: Options,
    *,
    sharded_inputs: bool = False,
    over: ParallelModule | None = None,
) -> ParallelModule:
    """See `autopar.parallelize`."""
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else None
    priced = connected_mesh(mesh, options, plan)
    options = options.under(plan)
    bare = priced.bare
    context = _context_of(over, bare) if over else replace(connect(bare, device_mesh=device_mesh), disk=str(options.disk))
    source = ModelSource(model, sample_input, options)
    captured = source.read(dim_sizes(plan.dynamic) if plan else {})
    sizes = sizes_of(plan, options, captured)
    check_program(captured.program, context, sharded_inputs=sharded_inputs)
    source = replace(source, options=_as_stored(over, captured.program, options)) if over else source
    source = source.hollow(captured)

    def planned() -> ResolvedPlan:
        return read_plan(plan, captured.program, context.mesh) if plan else _planned(source, captured, priced, sizes)

    resolved = _from_rank_0(planned, captured, context)
    if over:
        parallel = _assembled_over(over, captured, resolved, sharded_inputs=sharded_inputs)
    else:
        parallel = assembled(captured, tensors_of(model), resolved, context, sharded_inputs=sharded_inputs)
    parallel.autopar.mode, parallel.autopar.settings = model.training, Settings.of(model, captured.kept, captured.constants)
    parallel.autopar.decided = captured.decided.stored(parallel.local_buffers)
    parallel.autopar.vary(_Sized(source, resolved), resolved.plan.dynamic)
    parallel.autopar.other = _refuse_training if resolved.plan.inference else _Other(source, captured, priced, resolved.plan)
    return parallel.train(model.training)


def _from_rank_0(make: Callable[[], ResolvedPlan], captured: Captured, context: Context) -> ResolvedPlan:
    """Plan on rank 0, which keeps its own assignment; the other ranks read the plan's text."""
    if context.device_mesh is None:
        return make()
    own: list[ResolvedPlan] = []

    def text() -> str:
        own.append(make())
        line = own[0].plan.to_json()
        Plan.from_json(line)  # where others cannot read it, every rank raises the error
        return line

    line = from_rank_0(text, context)
    return own[0] if own else read_plan(Plan.from_json(line), captured.program, context.mesh)


def sizes_of(plan: Plan | None, options: Options, captured: Captured) -> tuple[Size, ...]:
    """The dynamic sizes; raises PlanError if a plan has others than requested."""
    asked = declared(options.dynamic, captured.signature.shapes)
    if plan is None:
        return asked
    if asked and [(s.name, s.places) for s in asked] != [(s.name, s.places) for s in plan.dynamic]:
        raise PlanError(
            f"the plan was made for other sizes than dynamic={dict(options.dynamic)} says",
            plan="; ".join(map(str, plan.dynamic)) or "fixed sizes",
            fix="autopar.plan(..., dynamic=...): the plan keeps the declaration",
        )
    return plan.dynamic


def _planned(source: ModelSource, captured: Captured, mesh: Mesh, sizes: Sequence[Size]) -> ResolvedPlan:
    """Plan a captured model with dynamic sizes."""
    with progress("planning: analysing the program") as tell:
        found = resolve_program(captured.program, mesh, source.options, phases(tell))
    return varied(found, sizes, source.program_at)


class _Sized:
    """Builds the module for other dynamic sizes, under the same plan and over the same stored parameters."""

    def __init__(self, source: ModelSource, resolved: ResolvedPlan) -> None:
        self.source, self.resizer = source, Respecializer(resolved)

    def __call__(self, parallel: ParallelModule, numbers: tuple[int, ...]) -> ParallelModule:
        """The module for these numbers of the plan's sizes."""
        state, sizes = parallel.autopar, self.resizer.plan.dynamic
        captured = self.source.read(dim_sizes(sizes, numbers))
        resolved = self.resizer.plan_for(captured.program, describe_sizes(sizes, numbers))
        held, sharded_inputs = _held(parallel, captured.program), state.inputs.sharded
        made = _emitted(captured, held, resolved, state.context, state.rng_state.seed, sharded_inputs)
        made.autopar.rng_state = state.rng_state
        return made


class _Other:
    """Builds the module for the other mode (training or evaluation) on first use, over the same stored parameters."""

    def __init__(self, source: ModelSource, captured: Captured, mesh: Mesh, plan: Plan) -> None:
        self.source, self.captured, self.mesh, self.plan = source, captured, mesh, plan

    def __call__(self, parallel: ParallelModule) -> ParallelModule | None:
        """The module for `parallel`'s current mode; None if only flags differ, so that its own graph works."""
        source = self.source.in_mode(parallel.training)
        captured = source.read(dim_sizes(self.plan.dynamic))
        if serves(self.captured, captured, parallel.training):
            return None
        state, program = parallel.autopar, captured.program
        held = _held(parallel, program)
        given = [value.name for value in program.inputs] if state.inputs.sharded else []
        options = replace(
            source.options,
            strategy="auto",
            budget=None,
            constraints={escape(name): self.plan.layouts[name] for name in (*held, *given)},
            microbatches=self.plan.microbatches,
        )
        source = replace(source, options=options)
        sizes = [replace(size, multiple=1) for size in self.plan.dynamic]
        resolved = _from_rank_0(lambda: _planned(source, captured, self.mesh, sizes), captured, state.context)
        twin = _emitted(captured, held, resolved, state.context, state.rng_state.seed, state.inputs.sharded)
        twin.autopar.rng_state = state.rng_state  # one count of calls, whichever mode the model was captured in
        twin.autopar.vary(_Sized(source, resolved), resolved.plan.dynamic)
        return twin


def _refuse_training(parallel: ParallelModule) -> ParallelModule:
    """Refuse training mode: a module for inference has no other mode."""
    raise InputError("the module was planned for inference, and is in training mode", fix='eval(), or mode="training"')


def _held(parallel: ParallelModule, program: Program) -> dict[str, torch.Tensor]:
    """The parameters and buffers that a module holds for a program."""
    tensors = tensors_of(parallel)
    return {p.value.name: tensors[p.value.name] for p in (*program.parameters, *program.buffers)}


def _context_of(over: ParallelModule, mesh: Mesh) -> Context:
    """The mesh that a module's tensors are stored on. Raises PlanError if another one was requested."""
    context = over.autopar.context
    if (context.mesh.axes, context.mesh.sizes) != (mesh.axes, mesh.sizes):
        raise PlanError("over= is a module on another mesh", over=context.mesh, mesh=mesh)
    return context


def _as_stored(over: ParallelModule, program: Program, options: Options) -> Options:
    """Constrain the options to the layouts in which another program's module stores the tensors that this one uses.

    Raises PlanError if it lacks some of them, and ConstraintError if other layouts were requested.
    """
    tensors, plan = tensors_of(over), over.autopar.plan
    assert plan is not None, "it was built from a plan"
    for stored in (*program.parameters, *program.buffers):
        name, shape, dtype = stored.value.name, stored.value.shape, stored.value.dtype
        other = tensors.get(name)
        if other is None or (tuple(other.shape), other.dtype) != (shape, dtype):
            has = "nothing of that name" if other is None else f"{other.dtype} of {list(other.shape)}"
            fix = "two programs of one model, which differ in the sample and in attributes only"
            raise PlanError(f"{name} is {dtype} of {list(shape)}, and over= has {has}", fix=fix)
    for name, layout in stored_layouts(plan, program).items():
        asked = options.constraints.get(name, layout)
        if any(one not in ("*", other) for one, other in zip(asked.split(", "), layout.split(", "), strict=False)):
            what = f"{name} is asked for as {asked}, and over= has it as {layout}"
            raise ConstraintError(what, fix="leave the constraint out")
    return stored_as(plan, program, options)


def _assembled_over(
    over: ParallelModule, captured: Captured, resolved: ResolvedPlan, *, sharded_inputs: bool
) -> ParallelModule:
    """Build a module over the tensors of another one. Raises PlanError if the plan has them in other layouts."""
    state, program = over.autopar, resolved.program
    assert state.plan is not None, "it was built from a plan"
    for name, layout in stored_layouts(state.plan, program).items():
        if (own := resolved.plan.layouts[name]) != layout:
            fix = f"plan with the constraint {{{name!r}: {layout!r}}}, or leave plan= out"
            raise PlanError(f"the plan stores {name} as {own}, and over= has it as {layout}", fix=fix)
    made = _emitted(captured, _held(over, program), resolved, state.context, state.rng_state.seed, sharded_inputs)
    made.autopar.rng_state = state.rng_state
    return made


def assemble(captured: Captured, tensors: Mapping[str, torch.Tensor], plan: Plan, context: Context) -> ParallelModule:
    """Build the module of a captured program from a plan's text; `tensors` holds the whole parameters and buffers by name.

    Raises PlanError if the plan was made for another program or mesh.
    """
    planned_mesh(plan, context.mesh)
    return assembled(captured, tensors, read_plan(plan, captured.program, context.mesh), context)


def assembled(
    captured: Captured,
    tensors: Mapping[str, torch.Tensor],
    resolved: ResolvedPlan,
    context: Context,
    *,
    sharded_inputs: bool = False,
) -> ParallelModule:
    """Build the module of a captured program from a resolved plan, with this rank's parts of the whole tensors.

    With `sharded_inputs` a call takes this rank's parts of the batch.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_host(resolved.plan, ranks)
    if resolved.plan.disk_memory:
        check_disk(resolved.plan, ranks, folder_of(context.disk))
    program = resolved.program
    held = [p.value.name for p in (*program.parameters, *program.buffers)]
    cast = {name: with_dtype(tensors[name], program.values[name].dtype) for name in held}
    stored = store(cast, {name: resolved.assignment.given[name] for name in held}, context)
    for tensor in stored.values() if resolved.plan.inference else ():
        tensor.requires_grad_(False)
    return _emitted(captured, stored, resolved, context, agreed_seed(context), sharded_inputs)


def _emitted(
    captured: Captured,
    stored: Mapping[str, torch.Tensor],
    resolved: ResolvedPlan,
    context: Context,
    seed: int,
    sharded_inputs: bool,
) -> ParallelModule:
    """Build the module over tensors stored in the plan's layouts."""
    plan, step, program, assignment = resolved.plan, resolved.step, resolved.program, resolved.assignment
    split = sharded(program, plan.options.get("outputs") or None)
    outputs = [
        OutputLayout(shape=step.batch_shape(o.value), layout=assignment.outputs[o.path], split=split(o))
        for o in program.outputs
    ]
    plain = all_plain(stored.values())
    steps = steps_of(step.loop, assignment.given, context, unsharded=plain) if step.loop else None
    given = [value.name for value in program.inputs if value not in step.hoisted]
    paths = dict(zip((planned.path for planned in captured.signature.tensors), given, strict=True))
    inputs = InputParts(
        context=context,
        shapes={path: step.batch_shape(name) for path, name in paths.items()},
        layouts={path: assignment.given[name] for path, name in paths.items()},
        sharded=sharded_inputs,
    )
    fits = dict(resolved.analysis.fits)
    own = {name: assignment.given[name] for name in given} if sharded_inputs else {}
    graph = emit(step, assignment, fits, context, training=captured.training, unsharded=plain, given=own)
    state = ModuleState(
        plan=plan, signature=captured.signature, context=context, seed=seed, outputs=outputs, steps=steps, inputs=inputs
    )
    return ParallelModule(graph, program, stored, state)


def steps_of(
    loop: MicrobatchLoop,
    given: Mapping[str, Layout],
    context: Context,
    *,
    unsharded: bool,
    gathers: MicrobatchLoop | None = None,
) -> Steps:
    """Add to a loop the graph that runs once per step, on every rank for the whole batch; inputs that `gathers`, by default
    this loop itself, hoists are gathered for it. `unsharded` says whether the module stores plain tensors.
    """
    hoisted, size, gathered = loop.hoisted, len(context.mesh.sizes), _read((gathers or loop).hoisted)
    if hoisted is None:
        return Steps(loop=loop, hoisted=None, gathered=gathered)
    whole = Assignment(
        ops={op.name: candidate(op, None, hoisted.values, (INVARIANT,) * size) for op in hoisted.ops},
        given={**dict.fromkeys(hoisted.values, (I,) * size), **given, **{value.name: (I,) * size for value in hoisted.inputs}},
        outputs={output.path: (I,) * size for output in hoisted.outputs},
        routes={},
    )
    fits = dict.fromkeys((op.name for op in hoisted.ops), None)
    graph = emit(TrainingStep(program=hoisted), whole, fits, context, unsharded=unsharded)
    return Steps(loop=loop, hoisted=graph, gathered=gathered)


def _read(program: Program | None) -> frozenset[int]:
    """The positions of the inputs that a program reads or returns."""
    if program is None:
        return frozenset()
    read = {name for op in program.ops for name in op.operands} | {output.value for output in program.outputs}
    return frozenset(place for place, value in enumerate(program.inputs) if value.name in read)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under every name that it has."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    return found | {name: held.tensor for name, held in held_tensors(model).items()}
