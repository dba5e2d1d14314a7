"""Running a Program op by op on real tensors, to compare it with the module it was captured from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from autopar.capture import Assumptions, Captured, capture
from autopar.capture.assumptions import NOTHING
from autopar.ir.program import Argument, Program, Ref, overload
from autopar.passes import normalise


def run(program: Program, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The program's outputs for these inputs, parameters and buffers; checks that every result is as the program says."""
    env = every(program, tensors)
    return [env[output.value] for output in program.outputs]


def every(program: Program, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every value of the program by name."""
    env = dict(tensors)

    def real(argument: Argument) -> object:
        if isinstance(argument, tuple):
            return [real(part) for part in argument]
        if isinstance(argument, torch.device):
            return torch.device("cpu")
        return env[argument.name] if isinstance(argument, Ref) else argument

    for op in program.ops:
        found = overload(op.target)(*map(real, op.args), **{name: real(argument) for name, argument in op.kwargs})
        results = [found] if isinstance(found, torch.Tensor) else list(found)
        for value, tensor in zip(op.results, results, strict=True):
            said = (value.shape, value.dtype, value.requires_grad)
            assert (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) == said, f"{op} gives {tensor.shape}"
            env[value.name] = tensor
    return env


def held(program: Program, model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers under the program's names."""
    known: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    known |= dict(model.named_buffers(remove_duplicate=False))
    return {one.value.name: known[one.value.name] for one in (*program.parameters, *program.buffers)}


def outputs(program: Program, model: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The program's outputs with the model's weights."""
    named = {value.name: tensor for value, tensor in zip(program.inputs, inputs, strict=True)}
    return run(program, held(program, model) | named)


def check(
    model: nn.Module, *inputs: torch.Tensor, assumptions: Assumptions = NOTHING, at: Sequence[torch.Tensor] = ()
) -> Captured:
    """Capture a model that returns tensors; the program and its normal form give the module's outputs and gradients.

    They are compared for these inputs, or for those in `at`.
    """
    captured = capture(model, inputs, assumptions=assumptions)
    inputs = tuple(at) or inputs
    expected = _flat(model(*inputs))
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = _gradients(expected, weights)
    for program in (captured.program, normalise(captured.program)):
        found = outputs(program, model, captured.signature.bind(inputs, {}))
        assert len(found) == len(expected)
        for a, b in zip((*found, *_gradients(found, weights)), (*expected, *gradients), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, equal_nan=True)
            assert a.requires_grad == b.requires_grad
    return captured


def _flat(result: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _gradients(results: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    total = sum((r.double().sin().sum() for r in results if r.requires_grad), torch.zeros((), dtype=torch.double))
    if not total.requires_grad:
        return []
    found = torch.autograd.grad(total, weights, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]
