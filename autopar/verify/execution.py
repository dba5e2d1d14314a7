"""Runs a program for a comparison, with gradients: sequentially on one device, or a rank's part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from autopar.capture import Captured
from autopar.capture.signature import Signature
from autopar.codegen import ModuleState, OutputLayout, ParallelModule, emit
from autopar.codegen.pipeline_module import PipelineModule
from autopar.ir.layout import I
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.training_step import TrainingStep
from autopar.operators import writes
from autopar.passes.to_float64 import wide
from autopar.runtime.storage import with_dtype
from autopar.runtime.world import connect
from autopar.search_space.assignment import Assignment
from autopar.search_space.candidates import INVARIANT, candidate
from autopar.verify.reference import Loss, differentiated_sum


def results(
    module: ParallelModule, program: Program, inputs: Sequence[torch.Tensor], loss: Loss = differentiated_sum
) -> dict[tuple[str, str], torch.Tensor]:
    """Outputs, gradients and written buffers of one forward and backward on this rank, by kind and name.

    `loss` selects what is differentiated from the outputs.
    """
    given = [one.clone().requires_grad_(value.requires_grad) for one, value in zip(inputs, program.inputs, strict=True)]
    outputs = _forward_backward(module, given, loss)
    ends = zip(program.outputs, outputs, strict=True)
    result = {("output", end.path): tensor for end, tensor in ends if tensor is not None}
    held = dict(module.named_parameters())
    for parameter in program.parameters:
        tensor = held.get(parameter.names[0])
        gradient = None if tensor is None else tensor.grad
        if parameter.value.requires_grad and gradient is not None:
            result["gradient", parameter.names[0]] = gradient
    result |= {("gradient", v.name): x.grad for v, x in zip(program.inputs, given, strict=True) if x.grad is not None}
    stored = dict(module.named_buffers()) | held
    written = dict.fromkeys(name for op in program.ops for name in writes(op))
    return result | {("buffer", name): stored[name] for name in written if name in stored}


def _forward_backward(module: ParallelModule, inputs: Sequence[torch.Tensor], loss: Loss) -> Sequence[torch.Tensor | None]:
    """The outputs of a step, joined over micro-batches, with gradients in `.grad`; None for an output of another rank."""
    if module.autopar.steps is None and not isinstance(module, PipelineModule):
        outputs = module.run(inputs)
        total = loss(outputs)
        if total is not None:
            total.backward()  # type: ignore[no-untyped-call]
        return outputs
    found: list[list[torch.Tensor]] = []

    def differentiated(outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        found.append([output.detach() for output in outputs])
        return loss(outputs)

    module.accumulate(inputs, differentiated)
    return module.joined(found)


def sequential(captured: Captured, tensors: Mapping[str, torch.Tensor]) -> ParallelModule:
    """The captured program as a module on one device, without process groups."""
    return on_one_device(TrainingStep(program=captured.program), captured.signature, tensors)


def on_one_device(step: TrainingStep, signature: Signature, tensors: Mapping[str, torch.Tensor]) -> ParallelModule:
    """A step of one micro-batch, perhaps padded, as a module on one device, without process groups."""
    program, mesh = step.program, Mesh.of(1)
    context = connect(mesh, device="cpu")
    given = program.given
    assignment = Assignment(
        ops={op.name: candidate(op, None, program.values, (INVARIANT,)) for op in program.ops},
        given={value.name: (I,) for value in given},
        outputs={o.path: (I,) for o in program.outputs},
        routes={},
    )
    outputs = [OutputLayout(shape=program.values[o.value].shape, layout=(I,), split=False) for o in program.outputs]
    state = ModuleState(plan=None, signature=signature, context=context, seed=0, outputs=outputs)
    values = (p.value for p in (*program.parameters, *program.buffers))
    held = {value.name: _copy(with_dtype(tensors[value.name], value.dtype), value.requires_grad) for value in values}
    graph = emit(step, assignment, dict.fromkeys((op.name for op in program.ops), None), context)
    return ParallelModule(graph, program, held, state)


def _copy(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    copied = tensor.detach().clone()
    return nn.Parameter(copied, requires_grad) if isinstance(tensor, nn.Parameter) else copied


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in double precision; a parameter stays a parameter."""
    wider = tensor.detach().to(wide(tensor.dtype))
    return nn.Parameter(wider, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wider


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """max |found - expected| / (1 + max |expected|), ignoring equal infinities; infinite for tensors of different shapes."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    common = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.detach().to(common), expected.detach().to(common)
    alike = expected.isinf() & (found == expected)
    found, expected = found.masked_fill(alike, 0), expected.masked_fill(alike, 0)
    return float((found - expected).abs().max() / (1 + expected.abs().max()))


def largest(errors: Iterable[float]) -> float:
    """The largest error; NaN if any error is."""
    found = list(errors)
    return float("nan") if any(error != error for error in found) else max(found)
