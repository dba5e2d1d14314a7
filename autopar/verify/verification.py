"""Verification: the parallel model against the sequential one, in float64, on real processes.

captured program in float64, on one device      reference outputs and gradients
the same program under the plan, with gloo      every rank compares its part with the reference
captured program in its own dtype               compared with the user's module
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopar.capture import Captured, Signature
from autopar.codegen import ParallelModule
from autopar.errors import InputError
from autopar.formulation.prices import Prices
from autopar.ir.dynamic_dims import declared, describe_sizes, dim_sizes, numbers
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, overload
from autopar.ir.schema import bound
from autopar.operators import row_of
from autopar.operators.facts import OpKind
from autopar.parallelize import assemble, tensors_of
from autopar.passes.no_dropout import CONSTANTS, drawn, without_dropout
from autopar.passes.to_float64 import promote, wide
from autopar.pipelining import assembled_stages
from autopar.plan.assignment_text import as_planned
from autopar.plan.options import Options
from autopar.plan.plan import Collective, Plan
from autopar.plan.resolved import ResolvedPlan, read_plan
from autopar.plan.stages import ResolvedPipeline, loss_of, read_any, read_pipeline
from autopar.planning.pipeline_search import plan_pipeline
from autopar.planning.pipeline_stages import without_axis
from autopar.planning.planner import at_sizes, collectives_of, connected_mesh, read_program, resolve_program, with_dynamic_sizes
from autopar.planning.respecialize import respecializer, varied_plan
from autopar.runtime.custom_ops import Operators
from autopar.runtime.recorder import Issued, recorded
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import connect
from autopar.verify.execution import doubled, error, largest, results, sequential
from autopar.verify.reference import Loss, arguments, differentiated_sum, module_results
from autopar.verify.report import Report, ReportRow

DOUBLE, SINGLE = 1e-9, 1e-4  # largest error that counts as equal
DRAWN = {  # what notes say of draws
    OpKind.DRAW: f"numbers were {CONSTANTS[OpKind.DRAW]}",
    OpKind.DRAW_INTEGERS: "integers were the least of their range",
    OpKind.DRAW_COUNTS: f"counts were {CONSTANTS[OpKind.DRAW_COUNTS]}",
    OpKind.DRAW_CLASSES: "classes were the first that have a weight",
}
ROUNDINGS = 8  # units of rounding by which a low-precision program may differ from the module


def verify(
    model: nn.Module, sample_input: object, mesh: object, plan: Plan | None, options: Options, pool: WorkerPool | None = None
) -> Report:
    """Compare a model's parallel run with its sequential one; see `autopar.verify`. `pool` provides running workers."""
    tensors = tensors_of(model)
    if empty := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise InputError(f"{empty[0]} is on the meta device and has no data to compare", fix="build the model with weights")
    place = connected_mesh(mesh, options, plan)
    options = options.under(plan)
    captured = read_program(model, sample_input, options)
    if plan is None:
        plan = _planned(model, sample_input, captured, place, options)
        place = connected_mesh(mesh, options, plan)  # of which the plan may have cut an axis
    else:
        plan = _at_sample(plan, model, sample_input, captured, options)
        read_any(plan, captured.program, place)  # raises before any process is started if the plan is for another program
    inputs = captured.signature.bind(*arguments(sample_input))
    rows, surplus, missing = compare(captured, tensors, inputs, plan, place, pool)
    with torch.set_grad_enabled(not plan.inference):
        rows += _against_module(model, sample_input, captured, tensors, inputs, as_given=options.precision is None)
    notes = [*_notes(captured.program), *(f"may vary: {size}" for size in plan.dynamic)]
    if ("use_cache", False) in captured.signature.defaults and "use_cache" not in arguments(sample_input)[1]:
        notes.append("the module ran without use_cache, as the sample has it; the parallel one with use_cache=False")
    return Report(plan=plan, rows=tuple(rows), surplus=surplus, missing=missing, notes=tuple(notes))


def _planned(model: nn.Module, sample_input: object, captured: Captured, mesh: Mesh, options: Options) -> Plan:
    """A plan for the captured program and its dynamic sizes."""
    sizes = declared(options.dynamic, captured.signature.shapes)
    if options.pipeline is None:
        return with_dynamic_sizes(resolve_program(captured.program, mesh, options), sizes, model, sample_input).plan
    plan = plan_pipeline(captured.program, mesh, options)
    return varied_plan(plan, captured.program, sizes, at_sizes(plan, model, sample_input))


def _at_sample(plan: Plan, model: nn.Module, sample_input: object, captured: Captured, options: Options) -> Plan:
    """The plan at the sample's sizes, if it was made for others."""
    found = numbers(plan.dynamic, captured.signature.shapes)
    if found == tuple(size.sample for size in plan.dynamic):
        return plan
    planned = read_program(model, sample_input, options, dim_sizes(plan.dynamic))
    read = read_any(plan, planned.program, plan.mesh)
    return respecializer(read).plan_for(captured.program, describe_sizes(plan.dynamic, found)).plan


def _notes(program: Program) -> Iterator[str]:
    """Notes for the report: which random ops were made deterministic and which were not."""
    certain = without_dropout(program)
    fixed = [before != after for before, after in zip(program.ops, certain.ops, strict=True) if not drawn(before)]
    if any(fixed):
        yield "dropout was 0 on both sides"
    kinds = {row_of(op).kind for op in program.ops if drawn(op)}
    yield from (f"random {said} on both sides" for kind, said in DRAWN.items() if kind in kinds)
    for op in certain.ops:
        named = dict(bound(op))
        idle = named.get("p") == 0 or named.get("dropout_p") == 0 or named.get("dropout") == 0 or named.get("training") is False
        if torch.Tag.nondeterministic_seeded in overload(op.target).tags and not idle:
            yield f"{op.target} draws random numbers of its own{f' at {op.source}' if op.source else ''}: expect it to differ"


def compare(
    captured: Captured,
    tensors: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    plan: Plan,
    mesh: Mesh,
    pool: WorkerPool | None,
) -> tuple[list[ReportRow], tuple[str, ...], tuple[str, ...]]:
    """Run a program in float64, sequentially here and in parallel on workers.

    Returns a row per tensor, the collectives issued beyond the plan, and those of the plan that were not issued. `captured` is
    the program of the global batch; the sequential run does not cut it into micro-batches.

    A plan in stages differentiates its loss alone, other plans all scalars; a tensor is compared on the ranks that have it.
    """
    program = promote(without_dropout(captured.program))
    wide_tensors = {name: doubled(tensor) for name, tensor in tensors.items()}
    for parameter in program.parameters:  # a gradient that capture lost is told by `_against_module`
        wide_tensors[parameter.value.name].requires_grad_(parameter.value.requires_grad)
    batch = [doubled(tensor.detach()) for tensor in inputs]
    reference = results(sequential(replace(captured, program=program), wide_tensors), program, batch, _loss(plan, program))
    read: ResolvedPlan | ResolvedPipeline
    if plan.pipeline:
        read = read_pipeline(plan, program, alike=True)
    else:
        read = read_plan(replace(plan, hash=as_planned(plan, program).hash), program, mesh)
    plan = read.plan
    payload = _Payload(
        captured=replace(captured, program=program, signature=wide_signature(captured.signature)),
        plan=plan,
        tensors=wide_tensors,
        inputs=batch,
        operators=Operators.of(op.target for op in program.ops) if plan.mesh.size > 1 else Operators(),
        reference=reference,
    )
    if plan.mesh.size == 1:
        ranks = [check(payload)]
    elif pool is not None:
        ranks = _on_workers(pool, payload, plan.mesh.size)
    else:
        with WorkerPool(plan.mesh.size, preload=["autopar.verify.verification"]) as own:
            ranks = _on_workers(own, payload, plan.mesh.size)
    rows = [
        ReportRow(what=what, name=name, error=_error(ranks, what, name), tolerance=DOUBLE) for what, name in payload.reference
    ]
    issued = Counter(line for place, log in _logs(plan, ranks) for line in _lines(place, log))
    planned = Counter(line for place, of_plan in _expected(read, mesh) for line in _lines(place, of_plan))
    return rows, tuple((issued - planned).elements()), tuple((planned - issued).elements())


def _error(ranks: Sequence[RankResult], what: str, name: str) -> float:
    """The largest error of a tensor over the ranks that have it; infinite if none does."""
    return largest([errors[what, name] for errors, _ in ranks if (what, name) in errors] or [math.inf])


def _lines(place: str, collectives: Iterable[Issued | Collective]) -> Iterator[str]:
    return (f"{place}{one.kind} {one.axis} {one.bytes} {one.where}" for one in collectives)


def _logs(plan: Plan, ranks: Sequence[RankResult]) -> Iterator[tuple[str, Sequence[Issued]]]:
    """The collectives that rank 0 issued; with stages, by position, those of the first rank at each position of its axis."""
    if plan.pipeline is None:
        yield "", ranks[0][1]
        return
    axis = plan.axes.index(plan.pipeline.axis)
    for place in range(plan.sizes[axis]):
        yield f"{plan.pipeline.axis}={place}: ", ranks[place * math.prod(plan.sizes[axis + 1 :])][1]


def _expected(read: ResolvedPlan | ResolvedPipeline, mesh: Mesh) -> Iterator[tuple[str, Iterable[Collective]]]:
    """The collectives that a plan for a float64 program expects, in the form of `_logs`."""
    if isinstance(read, ResolvedPlan):
        yield "", _on_cpu(read, mesh)
        return
    pipeline = read.plan.pipeline
    assert pipeline is not None, "the plan has a pipeline"
    on = without_axis(mesh, pipeline.axis)
    for stage, rank in sorted(pipeline.order.rank_of.items()):
        yield f"{pipeline.axis}={rank}: ", _on_cpu(read.resolved[stage], on)


def _on_cpu(read: ResolvedPlan, mesh: Mesh) -> Iterable[Collective]:
    """The collectives of a plan on CPUs, where some operators save other tensors."""
    return collectives_of(replace(read.analysis, cpu=True), read.assignment, Prices(mesh=mesh))


def _loss(plan: Plan, program: Program) -> Loss:
    """Select what is differentiated from a program's outputs under a plan."""
    if plan.pipeline is None:
        return differentiated_sum
    place = [output.value for output in program.outputs].index(loss_of(program))
    return lambda outputs: outputs[place]


RankResult = tuple[dict[tuple[str, str], float], list[Issued]]  # errors by kind and name, and issued collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class _Payload:
    """What a worker needs to build its part of the model and compare its results."""

    captured: Captured
    plan: Plan
    tensors: dict[str, torch.Tensor]
    inputs: list[torch.Tensor]
    operators: Operators
    reference: dict[tuple[str, str], torch.Tensor]


def _on_workers(pool: WorkerPool, payload: _Payload, size: int) -> list[RankResult]:
    return pool.run("autopar.verify.verification:check", payload, ranks=size, keep=True)  # type: ignore[return-value]


def check(payload: _Payload) -> RankResult:
    """Run on one rank; returns the errors of outputs and gradients, and the collectives issued."""
    payload.operators.unpack()
    plan, program = payload.plan, payload.captured.program
    context = connect(plan.mesh, device="cpu")
    if plan.pipeline:
        stages = read_pipeline(plan, program)
        module: ParallelModule = assembled_stages(payload.captured, payload.tensors, stages, context)
    else:
        module = assemble(payload.captured, payload.tensors, plan, context)
    with recorded(context.known_axes) as log:
        found = results(module, program, payload.inputs, _loss(plan, program))
    expected = ((key, tensor) for key, tensor in payload.reference.items() if key in found)
    return {key: error(full_tensor(found[key]).detach(), tensor) for key, tensor in expected}, list(log)


def _against_module(
    model: nn.Module,
    sample: object,
    captured: Captured,
    tensors: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    as_given: bool,
) -> list[ReportRow]:
    """Compare the captured program with the user's module in its own dtype: outputs, buffers, and the worst gradient.

    `as_given` says that the plan keeps the module's precision, so that outputs must have its dtypes too.
    """
    program = without_dropout(captured.program)
    ours = results(sequential(replace(captured, program=program), tensors), program, [one.detach() for one in inputs])
    theirs = module_results(model, sample, captured)
    coarse = [torch.finfo(v.dtype).eps for v in program.values.values() if v.dtype.is_floating_point]
    tolerance = max(SINGLE, ROUNDINGS * max(coarse, default=0.0))
    for what, name in theirs.keys() - ours.keys():
        ours[what, name] = tensors[name] if what == "buffer" else torch.zeros_like(theirs[what, name])
    errors = {key: error(ours[key].detach(), expected) for key, expected in theirs.items()}
    if as_given:
        errors |= {
            key: math.inf for key, expected in theirs.items() if key[0] == "output" and ours[key].dtype != expected.dtype
        }
    rows = [(name if what == "output" else f"{what} {name}", e) for (what, name), e in errors.items() if what != "gradient"]
    gradients = {name: error for (what, name), error in errors.items() if what == "gradient"}
    if gradients:
        worst = max(gradients, key=lambda name: (math.isnan(gradients[name]), gradients[name]))
        rows.append((f"gradients, the worst {worst}", gradients[worst]))
    return [ReportRow(what="capture", name=name, error=error, tolerance=tolerance) for name, error in rows]


def wide_signature(signature: Signature) -> Signature:
    """The signature of the program in double precision, without the user's classes."""
    planned = tuple(replace(p, dtype=wide(p.dtype)) for p in signature.tensors)
    return replace(signature, tensors=planned, returned=signature.returned.flat)  # workers cannot import the user's classes
