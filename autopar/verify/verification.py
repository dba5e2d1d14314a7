"""Verification: the parallel model against the sequential one, in float64, on real processes.

captured program, promoted, on one device      reference outputs, loss, gradients
the same program under the plan, gloo          every rank compares what it has with the reference
captured program, own dtype                    against the user's module itself
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from autopar.analysis.analysis import analyse
from autopar.capture import Captured, Signature
from autopar.codegen import ModuleState, OutputLayout, ParallelModule, emit
from autopar.errors import InputError
from autopar.formulation.prices import Prices
from autopar.ir.dynamic_dims import declared, describe_sizes, dim_sizes, numbers
from autopar.ir.layout import I
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, overload
from autopar.ir.schema import bound
from autopar.operators import writes
from autopar.parallelize import assemble, check_mesh, tensors_of
from autopar.passes.no_dropout import HALF, drawn, without_dropout
from autopar.passes.to_float64 import promote, wide
from autopar.plan.assignment_text import as_planned, resolve
from autopar.plan.options import Options
from autopar.plan.plan import Collective, Plan
from autopar.plan.resolved import read_plan
from autopar.planning.planner import collectives_of, connected_mesh, read_program, resolve_program, with_dynamic_sizes
from autopar.planning.respecialize import Respecializer
from autopar.runtime.custom_ops import Operators
from autopar.runtime.recorder import Issued, recorded
from autopar.runtime.storage import full_tensor, with_dtype
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import connect
from autopar.search_space.assignment import Assignment
from autopar.search_space.candidates import INVARIANT, candidate
from autopar.verify.reference import arguments, differentiated_sum, module_results

DOUBLE, SINGLE = 1e-9, 1e-4  # largest error that counts as equal
ROUNDINGS = 8  # by which a program in a narrow dtype may differ from the module: a mean is rounded once more, or less


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """One tensor compared: `error` is max |a - b| / (1 + max |b|), the largest of all ranks."""

    what: str  # "output", "gradient", "buffer", or "capture" (the captured program against the user's module)
    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of `autopar.verify`.

    `surplus` and `missing` are the collectives, as "kind axis bytes pass", in which rank 0's step differs from the plan's list.
    """

    plan: Plan
    rows: tuple[ReportRow, ...]
    surplus: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows) and not self.surplus and not self.missing

    @property
    def max_error(self) -> float:
        """The largest error of the float64 comparison."""
        return max((row.error for row in self.rows if row.what != "capture"), default=0.0)

    def __str__(self) -> str:
        table = Table("", "tensor", "max error", "allowed", "", box=None)
        for row in self.rows:
            table.add_row(row.what, row.name, f"{row.error:.1e}", f"{row.tolerance:.0e}", "" if row.ok else "DIFFERS")
        console = Console(width=110, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(table)
        lines = [line.rstrip() for line in capture.get().splitlines()]
        lines += [f"issued, but not in the plan: {entry}" for entry in self.surplus]
        lines += [f"in the plan, but not issued: {entry}" for entry in self.missing]
        verdict = "equal" if self.ok else "NOT equal"
        return "\n".join([*lines, *self.notes, f"{verdict}: max error {self.max_error:.1e} over {len(self.rows)} tensors"])


def verify(
    model: nn.Module, sample_input: object, mesh: object, plan: Plan | None, options: Options, pool: WorkerPool | None = None
) -> Report:
    """See `autopar.verify`; `pool` reuses running workers."""
    tensors = tensors_of(model)
    if empty := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise InputError(f"{empty[0]} is on the meta device and has no data to compare", fix="build the model with weights")
    if plan is not None:
        check_mesh(plan, Mesh.of(mesh))
    options = options.under(plan)
    captured = read_program(model, sample_input, options.precision, options.reduce)
    place = connected_mesh(mesh, options)
    if plan is None:
        plan = _planned(model, sample_input, captured, place, options)
    plan = _at_sample(plan, model, sample_input, captured, options)
    read_plan(plan, captured.program, place)  # refuses a plan for another program before any process starts
    inputs = captured.signature.bind(*arguments(sample_input))
    rows, surplus, missing = compare(captured, tensors, inputs, plan, place, pool)
    rows += _against_module(model, sample_input, captured, tensors, inputs)
    notes = (*_notes(captured.program), *(f"may vary: {size}" for size in plan.dynamic))
    return Report(plan=plan, rows=tuple(rows), surplus=surplus, missing=missing, notes=notes)


def _planned(model: nn.Module, sample_input: object, captured: Captured, mesh: Mesh, options: Options) -> Plan:
    """A plan for what was captured, and for the sizes that may vary."""
    sizes = declared(options.dynamic, captured.signature.shapes)
    return with_dynamic_sizes(resolve_program(captured.program, mesh, options), sizes, model, sample_input).plan


def _at_sample(plan: Plan, model: nn.Module, sample_input: object, captured: Captured, options: Options) -> Plan:
    """A plan at the sample's sizes, which may be others than those for which it was made."""
    found = numbers(plan.dynamic, captured.signature.shapes)
    if found == tuple(size.sample for size in plan.dynamic):
        return plan
    planned = read_program(model, sample_input, options.precision, options.reduce, dim_sizes(plan.dynamic))
    resizer = Respecializer(read_plan(plan, planned.program, plan.mesh))
    return resizer.plan_for(captured.program, describe_sizes(plan.dynamic, found)).plan


def _notes(program: Program) -> Iterator[str]:
    """What a reader should know of the comparison: what was made certain, and what draws in spite of it."""
    certain = without_dropout(program)
    fixed = [before != after for before, after in zip(program.ops, certain.ops, strict=True) if not drawn(before)]
    if any(fixed):
        yield "dropout was 0 on both sides"
    if any(map(drawn, program.ops)):
        yield f"what is drawn at random was {HALF} on both sides"
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
    """Run sequentially here and in parallel on workers, in float64; errors, and how the collectives differ from the plan's.

    `captured` is for the whole batch; sequentially it runs at once.
    """
    program = promote(without_dropout(captured.program))
    doubled = {name: _double(tensor) for name, tensor in tensors.items()}
    batch = [_double(tensor.detach()) for tensor in inputs]
    reference = _results(sequential(replace(captured, program=program), doubled), program, batch)
    part = as_planned(plan, program)
    payload = _Payload(
        captured=replace(captured, program=program, signature=_wide(captured.signature)),
        plan=replace(plan, hash=part.hash),
        tensors=doubled,
        inputs=batch,
        operators=Operators.of(op.target for op in program.ops) if plan.mesh.size > 1 else Operators(),
        reference=reference,
    )
    if plan.mesh.size == 1:
        answers = [check(payload)]
    elif pool is not None:
        answers = _answers(pool, payload, plan.mesh.size)
    else:
        with WorkerPool(plan.mesh.size, preload=["autopar.verify.verification"]) as own:
            answers = _answers(own, payload, plan.mesh.size)
    rows = [
        ReportRow(what=what, name=name, error=_largest(errors[what, name] for errors, _ in answers), tolerance=DOUBLE)
        for what, name in answers[0][0]
    ]
    issued = Counter(f"{c.kind} {c.axis} {c.bytes} {c.where}" for c in answers[0][1])
    planned = Counter(f"{c.kind} {c.axis} {c.bytes} {c.where}" for c in _expected(part, payload.plan, mesh))
    return rows, tuple((issued - planned).elements()), tuple((planned - issued).elements())


def _expected(program: Program, plan: Plan, mesh: Mesh) -> Iterable[Collective]:
    """The plan's list, for the promoted program on CPUs, where some operators save other things."""
    analysis = replace(analyse(program, mesh), cpu=True)
    return collectives_of(analysis, resolve(plan, program, analysis.fits), Prices(mesh=mesh))


Answer = tuple[dict[tuple[str, str], float], list[Issued]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Payload:
    """What a worker needs to build its part and to judge it."""

    captured: Captured
    plan: Plan
    tensors: dict[str, torch.Tensor]
    inputs: list[torch.Tensor]
    operators: Operators
    reference: dict[tuple[str, str], torch.Tensor]


def _answers(pool: WorkerPool, payload: _Payload, size: int) -> list[Answer]:
    return pool.run("autopar.verify.verification:check", payload, ranks=size, keep=True)  # type: ignore[return-value]


def check(payload: _Payload) -> Answer:
    """On one rank: the errors of this rank's outputs and gradients, and the collectives that it issued."""
    payload.operators.unpack()
    context = connect(payload.plan.mesh, device="cpu")
    module = assemble(payload.captured, payload.tensors, payload.plan, context)
    with recorded(context.axes) as log:
        found = _results(module, payload.captured.program, payload.inputs)
    errors = {key: _error(full_tensor(found[key]).detach(), expected) for key, expected in payload.reference.items()}
    return errors, list(log)


def _results(module: ParallelModule, program: Program, inputs: Sequence[torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
    """Outputs and gradients of one forward and backward."""
    given = [one.clone().requires_grad_(value.requires_grad) for one, value in zip(inputs, program.inputs, strict=True)]
    outputs = _stepped(module, given)
    result = {("output", o.path): tensor for o, tensor in zip(program.outputs, outputs, strict=True)}
    held = dict(module.named_parameters())
    for parameter in program.parameters:
        tensor = held[parameter.names[0]]
        gradient = tensor.grad
        if parameter.value.requires_grad and gradient is not None:
            result["gradient", parameter.names[0]] = gradient
    result |= {("gradient", v.name): x.grad for v, x in zip(program.inputs, given, strict=True) if x.grad is not None}
    stored = dict(module.named_buffers())
    written = dict.fromkeys(name for op in program.ops for name in writes(op))
    return result | {("buffer", name): stored[name] for name in written}


def _stepped(module: ParallelModule, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The outputs of a forward, after its backward; of several where a step has micro-batches."""
    if module.autopar.steps is None:
        outputs = module.run(inputs)
        loss = differentiated_sum(outputs)
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        return outputs
    found: list[list[torch.Tensor]] = []

    def differentiated(outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        found.append([output.detach() for output in outputs])
        return differentiated_sum(outputs)

    module.accumulate(inputs, differentiated)
    return module.joined(found)


def sequential(captured: Captured, tensors: Mapping[str, torch.Tensor]) -> ParallelModule:
    """The captured program as a module on one device, no process needed."""
    program, mesh = captured.program, Mesh.of(1)
    context = connect(mesh, device="cpu")
    given = program.given
    assignment = Assignment(
        ops={op.name: candidate(op, None, program.values, (INVARIANT,)) for op in program.ops},
        given={value.name: (I,) for value in given},
        outputs={o.path: (I,) for o in program.outputs},
        routes={},
    )
    outputs = [OutputLayout(shape=program.values[o.value].shape, layout=(I,), split=False) for o in program.outputs]
    state = ModuleState(plan=None, signature=captured.signature, context=context, seed=0, outputs=outputs)
    values = (p.value for p in (*program.parameters, *program.buffers))
    held = {value.name: _copy(with_dtype(tensors[value.name], value.dtype)) for value in values}
    graph = emit(program, assignment, dict.fromkeys((op.name for op in program.ops), None), context)
    return ParallelModule(graph, program, held, state)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _against_module(
    model: nn.Module, sample: object, captured: Captured, tensors: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[ReportRow]:
    """The captured program against the user's module, in its own dtype: outputs, what is written, and the worst gradient."""
    program = without_dropout(captured.program)
    ours = _results(sequential(replace(captured, program=program), tensors), program, [one.detach() for one in inputs])
    theirs = module_results(model, sample, captured)
    coarse = [torch.finfo(v.dtype).eps for v in program.values.values() if v.dtype.is_floating_point]
    tolerance = max(SINGLE, ROUNDINGS * max(coarse, default=0.0))
    for what, name in theirs.keys() - ours.keys():
        ours[what, name] = tensors[name] if what == "buffer" else torch.zeros_like(theirs[what, name])
    errors = {key: _error(ours[key].detach(), expected) for key, expected in theirs.items()}
    rows = [(name if what == "output" else f"{what} {name}", e) for (what, name), e in errors.items() if what != "gradient"]
    gradients = {name: error for (what, name), error in errors.items() if what == "gradient"}
    if gradients:
        worst = max(gradients, key=lambda name: (math.isnan(gradients[name]), gradients[name]))
        rows.append((f"gradients, the worst {worst}", gradients[worst]))
    return [ReportRow(what="capture", name=name, error=error, tolerance=tolerance) for name, error in rows]


def _double(tensor: torch.Tensor) -> torch.Tensor:
    doubled = tensor.detach().to(wide(tensor.dtype))
    return nn.Parameter(doubled, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else doubled


def _wide(signature: Signature) -> Signature:
    planned = tuple(replace(p, dtype=wide(p.dtype)) for p in signature.tensors)
    return replace(signature, tensors=planned, returned=signature.returned.flat)  # the workers do not know the user's classes


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    common = torch.complex128 if expected.is_complex() else torch.float64
    expected = expected.detach().to(common)
    return float((found.to(common) - expected).abs().max() / (1 + expected.abs().max()))


def _largest(errors: Iterable[float]) -> float:
    """The largest error; NaN if any is."""
    found = list(errors)
    return float("nan") if any(error != error for error in found) else max(found)
