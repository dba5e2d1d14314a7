"""Building: from a plan to this rank's module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from glob import escape

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture import Captured
from autopar.capture.signature import on_meta
from autopar.capture.skeleton import attributes, skeleton
from autopar.codegen import ParallelModule, Returned, State, Steps, emit
from autopar.decisions import Decisions
from autopar.errors import PlanError
from autopar.ir import Program
from autopar.layout import I
from autopar.mesh import Mesh
from autopar.passes import normalise
from autopar.passes.candidates import INVARIANT, candidate
from autopar.passes.without_dropout import switched, without_training
from autopar.plan import Plan, as_planned, resolve
from autopar.planner import Options, located, plan_program, read_program, sharded
from autopar.runtime.agreement import check_program, from_rank_0
from autopar.runtime.random import agreed_seed
from autopar.runtime.storage import store, typed
from autopar.runtime.world import Context, connect
from autopar.solver.analysis import Analysis, analyse


def build(model: nn.Module, sample_input: object, mesh: object, plan: Plan | None, options: Options) -> ParallelModule:
    """See `autopar.parallelize`."""
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else None
    if plan is not None:
        check_mesh(plan, Mesh.of(mesh))
    options = options.under(plan)
    context = connect(Mesh.of(mesh), device_mesh=device_mesh)
    captured = read_program(model, sample_input, options.precision, options.reduce)
    check_program(captured.program.hash, context)
    place = located(mesh, options)
    made = from_rank_0(lambda: (plan or plan_program(captured.program, place, options)).to_json(), context)
    parallel = assemble(captured, tensors_of(model), Plan.from_json(made), context)
    parallel.autopar.mode = model.training
    parallel.autopar.other = _Other(skeleton(model).module, on_meta(sample_input), captured, place, options)
    return parallel.train(model.training)


class _Other:
    """The same model in the other mode: captured and planned when first needed, over the parameters as they are stored."""

    def __init__(self, model: nn.Module, sample: object, captured: Captured, mesh: Mesh, options: Options) -> None:
        self.model, self.sample, self.captured, self.mesh, self.options = model, sample, captured, mesh, options

    def __call__(self, parallel: ParallelModule) -> ParallelModule | None:
        """The module for `parallel`'s present mode; None if its own graph serves, because its flags are all that differs."""
        precision, reduce = self.options.precision, self.options.reduce
        captured = read_program(self.model.train(parallel.training), self.sample, precision, reduce)
        live = any(map(switched, captured.program.ops))
        if not parallel.training and not live and _quiet(captured.program) == _quiet(self.captured.program):
            return None
        state, program = parallel.autopar, captured.program
        assert state.plan is not None
        held = [p.value.name for p in (*program.parameters, *program.buffers)]
        options = replace(
            self.options,
            strategy="auto",
            budget=None,
            constraints={escape(name): state.plan.layouts[name] for name in held},
            microbatches=state.plan.microbatches,
        )
        made = from_rank_0(lambda: plan_program(program, self.mesh, options).to_json(), state.context)
        tensors = tensors_of(parallel)
        return put_together(
            captured, {name: tensors[name] for name in held}, Plan.from_json(made), state.context, state.draws.seed
        )


def _quiet(program: Program) -> str:
    """The hash of a program as evaluation runs it."""
    return normalise(without_training(program)).hash


def assemble(captured: Captured, tensors: Mapping[str, torch.Tensor], plan: Plan, context: Context) -> ParallelModule:
    """The module of a captured program under a plan; `tensors` holds the whole parameters and buffers by name."""
    check_mesh(plan, context.mesh)
    captured = replace(captured, program=as_planned(plan, captured.program))
    program = captured.program
    analysis = analyse(program, context.mesh)
    decisions = resolve(plan, program, analysis.fits)
    held = [p.value.name for p in (*program.parameters, *program.buffers)]
    cast = {name: typed(tensors[name], program.values[name].dtype) for name in held}
    stored = store(cast, {name: decisions.given[name] for name in held}, context)
    return _emitted(captured, decisions, analysis, stored, plan, context, agreed_seed(context))


def put_together(
    captured: Captured, stored: Mapping[str, torch.Tensor], plan: Plan, context: Context, seed: int
) -> ParallelModule:
    """A module over tensors that are stored already as the plan says."""
    captured = replace(captured, program=as_planned(plan, captured.program))
    analysis = analyse(captured.program, context.mesh)
    decisions = resolve(plan, captured.program, analysis.fits)
    return _emitted(captured, decisions, analysis, stored, plan, context, seed)


def _emitted(
    captured: Captured,
    decisions: Decisions,
    analysis: Analysis,
    stored: Mapping[str, torch.Tensor],
    plan: Plan,
    context: Context,
    seed: int,
) -> ParallelModule:
    program = captured.program
    split = sharded(program, plan.options.get("outputs") or None)
    outputs = [
        Returned(shape=program.whole(o.value), layout=decisions.outputs[o.path], split=split(o)) for o in program.outputs
    ]
    steps = _steps(program, decisions, context) if program.loop else None
    state = State(plan=plan, signature=captured.signature, context=context, seed=seed, outputs=outputs, steps=steps)
    graph = emit(program, decisions, dict(analysis.fits), context, training=captured.training)
    return ParallelModule(graph, program, stored, state)


def _steps(program: Program, decisions: Decisions, context: Context) -> Steps:
    """The loop of a program, with the graph of what it computes ahead: every rank does so for the whole batch."""
    assert program.loop is not None
    ahead, size = program.loop.ahead, len(context.mesh.sizes)
    if ahead is None:
        return Steps(loop=program.loop, ahead=None)
    whole = Decisions(
        ops={op.name: candidate(op, None, ahead.values, (INVARIANT,) * size) for op in ahead.ops},
        given={**decisions.given, **{value.name: (I,) * size for value in ahead.inputs}},
        outputs={output.path: (I,) * size for output in ahead.outputs},
        routes={},
    )
    return Steps(loop=program.loop, ahead=emit(ahead, whole, dict.fromkeys((op.name for op in ahead.ops), None), context))


def check_mesh(plan: Plan, mesh: Mesh) -> None:
    """Raise PlanError if a plan is none or was made for another mesh."""
    if not isinstance(plan, Plan):
        fix = "autopar.plan(...), or autopar.Plan.load(path) for a saved one"
        raise PlanError(f"plan is a {type(plan).__name__}", fix=fix)
    if (plan.axes, plan.sizes) != (mesh.axes, mesh.sizes):
        raise PlanError(
            "the plan was made for another mesh",
            plan=plan.mesh,
            mesh=mesh,
            fix="plan again for this mesh; a plan holds the size of every axis",
        )


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under every name that it has."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False)) | dict(attributes(model))
