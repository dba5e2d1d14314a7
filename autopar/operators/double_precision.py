"""Operators in dtypes that torch lacks: double precision, in which verification runs, and single.

autopar::grouped_mm    aten._grouped_mm: products of groups of rows, of columns or of what is summed, one matrix each
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from autopar.ir.program import Value

GROUPED = "aten._grouped_mm.default"
DOUBLE = {GROUPED: "autopar.grouped_mm.default"}  # by torch's operator, whose arguments they take
ALIGNED = 8  # elements of bfloat16 in 16 bytes, of which torch's grouped products ask that every row begins at a multiple


def torchs(target: str, operands: Sequence[Value]) -> str:
    """Torch's own operator in the place of one of these, where it takes such operands: of bfloat16, with aligned rows."""
    if target != DOUBLE[GROUPED] or any(one.dtype is not torch.bfloat16 or one.shape[-1] % ALIGNED for one in operands[:2]):
        return target
    return GROUPED


@torch.library.custom_op("autopar::grouped_mm", mutates_args=())
def grouped_mm(
    self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`torch._grouped_mm` in any dtype; zeros for rows and columns after the last group. There is never a bias.

    (t, k), (e, k, n) -> (t, n)    rows up to offs[0] times the first matrix, and so on
    (e, m, k), (k, n) -> (m, n)    columns likewise
    (m, k), (k, n) -> (e, m, n)    the sum over k in groups, one matrix each
    (e, m, k), (e, k, n) -> (e, m, n)
    """
    if offs is None:
        return self @ mat2
    ends = offs.tolist()
    found = self.new_empty(_shape(self, mat2, offs))
    for number, group in enumerate(slice(*pair) for pair in itertools.pairwise([0, *ends])):
        if mat2.dim() == 3:
            torch.mm(self[group], mat2[number], out=found[group])
        elif self.dim() == 3:
            found[:, group] = self[number] @ mat2[:, group]
        else:
            torch.mm(self[:, group], mat2[group], out=found[number])
    if self.dim() == 2 and mat2.dim() == 3:
        found[ends[-1] :] = 0
    elif self.dim() == 3:
        found[:, ends[-1] :] = 0
    return found


@grouped_mm.register_fake
def _(
    self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    return self.new_empty(_shape(self, mat2, offs))


def _shape(a: Tensor, b: Tensor, offs: Tensor | None) -> tuple[int, ...]:
    """The shape of the product: with the groups in front where both have them, or neither."""
    product = a.shape[-2], b.shape[-1]
    if offs is None:
        return *a.shape[:1], *product
    return (*offs.shape, *product) if a.dim() == b.dim() else product


class _Context(Protocol):
    saved_tensors: tuple[Tensor, Tensor, Tensor | None]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


def _setup(ctx: _Context, inputs: tuple[Tensor, Tensor, Tensor | None, None, None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (a, b, offs), (of_a, of_b, *_) = ctx.saved_tensors, ctx.needs_input_grad
    first = grouped_mm(gradient, b.mT, offs) if of_a else None
    return first, grouped_mm(a.mT, gradient, offs) if of_b else None, None, None, None


grouped_mm.register_autograd(_backward, setup_context=_setup)
