"""Building: from a plan to this rank's module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture import Captured
from autopar.codegen import ParallelModule, State, emit
from autopar.errors import PlanError

from autopar.mesh import Mesh
from autopar.plan import Plan, resolve
from autopar.planner import Options, located, plan_program, read_program
from autopar.runtime.agreement import check_program, from_rank_0
from autopar.runtime.random import agreed_seed
from autopar.runtime.storage import store
from autopar.runtime.world import Context, connect
from autopar.solver.formulate import analyse


def build(model: nn.Module, sample_input: object, mesh: object, plan: Plan | None, options: Options) -> ParallelModule:
    """See `autopar.parallelize`."""
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else None
    if plan is not None:
        check_mesh(plan, Mesh.of(mesh))
    context = connect(Mesh.of(mesh), device_mesh=device_mesh)
    captured = read_program(model, sample_input)
    check_program(captured.program.hash, context)
    line = None
    if not any(context.coordinates):
        made = plan or plan_program(captured.program, located(mesh, options), options)
        line = made.to_json()
    agreed = Plan.from_json(from_rank_0(line, context))
    return assemble(captured, tensors_of(model), agreed, context)


def assemble(captured: Captured, tensors: Mapping[str, torch.Tensor], plan: Plan, context: Context) -> ParallelModule:
    """The module of a captured program under a plan; `tensors` holds the whole parameters and buffers by name."""
    program = captured.program
    check_mesh(plan, context.mesh)
    analysis = analyse(program, context.mesh)
    decisions = resolve(plan, program, analysis.fits)
    held = [p.value.name for p in (*program.parameters, *program.buffers)]
    stored = store({name: tensors[name] for name in held}, decisions.given, context)
    outputs = [(program.values[o.value].shape, decisions.outputs[o.path]) for o in program.outputs]
    state = State(plan=plan, signature=captured.signature, context=context, seed=agreed_seed(context), outputs=outputs)
    return ParallelModule(emit(program, decisions, dict(analysis.fits), context), program, stored, state)


def check_mesh(plan: Plan, mesh: Mesh) -> None:
    """Raise PlanError if a plan is none or was made for another mesh."""
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is a {type(plan).__name__}", fix="autopar.plan(...), or autopar.Plan.load(path) for a saved one")
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
    return found | dict(model.named_buffers(remove_duplicate=False))



