"""Weights under all their names in a program: the parameters, and the views that lie in their memory."""

from __future__ import annotations

import torch

from autopar.ir import Argument, Op, Program, Ref, Value, overload


def weights(program: Program) -> frozenset[str]:
    """The parameters, frozen ones too, and every view of one, or of a view of one.

        v = transpose(w, 0, 1)      v lies in w
        s, t = split(v, 4)          so do s and t
        c = reshape(t, [32])        c does not: it cannot be had without a copy

    Once gathered and used they are dropped, and gathered again where the backward needs them. What is converted on the way may
    be laid out otherwise: then a view may be taken for a copy.
    """
    values = program.values
    lying = {p.value.name: _tensor(p.value) for p in program.parameters}
    for op in program.ops:
        if op.operands and op.operands[0] in lying and views(op):
            results = _run(op, {name: lying.get(name, _tensor(values[name])) for name in op.operands})
            memory = lying[op.operands[0]].untyped_storage()._cdata
            for result, tensor in zip(op.results, results, strict=True):
                if tensor.untyped_storage()._cdata == memory:
                    lying[result.name] = tensor
    return frozenset(lying)


def views(op: Op) -> bool:
    """Whether an op may return a view of its first operand, by its schema."""
    schema = overload(op.target)._schema
    return not schema.is_mutable and any(returned.alias_info is not None for returned in schema.returns)


def _run(op: Op, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The results of an op on meta tensors, strides and all."""

    def fill(argument: Argument) -> object:
        if isinstance(argument, tuple):
            return [fill(part) for part in argument]
        return tensors[argument.name] if isinstance(argument, Ref) else argument

    found = overload(op.target)(*map(fill, op.args), **{name: fill(argument) for name, argument in op.kwargs})
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _tensor(value: Value) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")
