"""Restores the problem and solution of an existing plan, at current prices, as if it had just been solved.

plan, model -> program, assignment -> the problem in which a solution stands for that assignment -> the solution
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from torch import nn

from autopar.analysis.analysis import analyse
from autopar.errors import ConstraintError, MeshError, PlanError
from autopar.formulation.read_solution import NoSolutionError, solution_of
from autopar.ir.device import Device
from autopar.ir.mesh import Mesh
from autopar.plan.options import AUTO, Options
from autopar.plan.plan import Plan
from autopar.plan.resolved import ResolvedPlan, read_plan
from autopar.planning.optimize import NAMED, Optimized, Stop, analysed, problem_of
from autopar.planning.planner import Planned, connected_mesh, read_program
from autopar.planning.recompute_policies import NARROWER


def planned_before(
    plan: Plan, model: nn.Module, sample_input: object, device: str | Device | None = None, stop: Stop = lambda phase: None
) -> tuple[Planned, Options]:
    """Restore an existing plan with its model and options; `stop` is called at the end of each phase.

    Args:
        plan: made for this model and sample, without pipeline stages.
        model: may be on `meta`.
        sample_input: the global batch.
        device: the device that the plan names, by default its catalog entry.

    Raises:
        PlanError: the plan was made for another model, sample or device, has pipeline stages or custom prices, or is not a
            solution of the problem posed by its options.
        MeshError: the catalog has no such device.
    """
    if plan.pipeline:
        fix = "name the model with the options of the plan, which is then made again"
        raise PlanError("a plan in pipeline stages answers no questions about its model", pipeline=plan.pipeline.axis, fix=fix)
    if model_of_prices := plan.options.get("cost_model"):
        what = "the plan was priced by a cost model of your own, which its file does not hold"
        raise PlanError(what, cost_model=model_of_prices, fix="plan the model again with it")
    try:
        options = Options.read(plan.options, device=device or plan.device)
        mesh = connected_mesh(plan.mesh.devices, options, plan)
    except MeshError as error:
        fix = f"device= an autopar.Device, or the profile.json from which {plan.device} comes"
        raise MeshError(error.what, **{**error.details, "fix": fix}) from error
    if mesh.device is not None and mesh.device.name != plan.device:
        fix = f"leave the device out, or plan the model again for {mesh.device.name}"
        raise PlanError(f"the plan was made for {plan.device}, not for {mesh.device.name}", plan=plan.hash, fix=fix)
    captured = read_program(model, sample_input, options)
    stop("capture")
    resolved = read_plan(plan, captured.program, mesh)
    for found in _readings(resolved, mesh, options):
        stop("formulate")
        return Planned(resolved=resolved, captured=captured, solved=found, phases={}), options
    raise PlanError(
        "the plan is not a solution of the problem that its options pose",
        plan=plan.hash,
        strategy=plan.options["strategy"],
        fix="plan the model again: the plan was edited, or made by other rules than those of now",
    )


def _readings(resolved: ResolvedPlan, mesh: Mesh, options: Options) -> Iterator[Optimized]:
    """The plan as a solution: of the requested strategy, else of a better one; with all recomputation, else a narrower policy;
    with all members of a class alike, else each by itself.
    """
    plan, step = resolved.plan, resolved.step
    folded = analysed(step, mesh, options), analyse(step, mesh, repeated=False)
    strategies = dict.fromkeys((options.strategy, *(NAMED if options.strategy == "auto" else ())))
    policies = dict.fromkeys((options.recompute, *(NARROWER if options.recompute == AUTO else ())))
    for analysis, policy, strategy in itertools.product(folded, policies, strategies):
        with suppress(ConstraintError, NoSolutionError):
            model = problem_of(analysis, mesh, options.stepped, replace(options, strategy=strategy, recompute=policy))
            solution = solution_of(model.formulated, resolved.assignment, gap=plan.gap, status=plan.status)
            yield Optimized(memory_model=model, solution=solution, optimizer=options.stepped, strategy=strategy)


__all__ = ["planned_before"]
