"""Finds which ops must copy for lack of a view of such strides, by running the program on meta tensors without conversions.

    k = transpose(x, 1, 2)             (2, 128, 4, 8) -> (2, 4, 128, 8): a view of x, not contiguous
    e = expand(k, [2, 4, 128, 2, 8])   a view of x
    y = reshape(e, [2, 8, 128, 8])     a copy

Splits change sizes but seldom the order of strides, so global shapes are used in place of local ones.
"""

from __future__ import annotations

import torch

from autopar.analysis.analysis import Analysis
from autopar.analysis.recomputability import may_copy
from autopar.analysis.saved_tensors import saved_here
from autopar.ir.program import Value
from autopar.operators import view_of


def copied(analysis: Analysis) -> frozenset[str]:
    """The names of the ops that copy."""
    program = analysis.program
    given = program.given
    there = {value.name: _empty(value) for value in given}
    found = set()
    for op in program.ops:
        operands = [there[name] for name in op.operands]
        _, results = saved_here(op, program.values, operands, [r.shape for r in op.results], cpu=analysis.cpu)
        if may_copy(op) and view_of(op, program.values) and not is_view(operands[0], op.results[0].shape):
            found.add(op.name)
        there.update(zip((result.name for result in op.results), results, strict=True))
    return frozenset(found)


def is_view(tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether `tensor.view(shape)` is possible."""
    if tuple(tensor.shape) == shape:
        return tensor.is_contiguous()
    try:
        tensor.detach().view(shape)
    except RuntimeError:
        return False
    return True


def _empty(value: Value) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
