"""The weights of a program: parameters, views of them, and copies in other dtypes."""

from __future__ import annotations

import torch

from autopar.ir.program import Op, Parameter, Program, Value, filled, overload, remembered

CAST = "aten.to.dtype"


@remembered
def weights(program: Program) -> frozenset[str]:
    """The parameters, frozen ones too, and every view or copy in another dtype of one, or of a view or copy of one.

        v = transpose(w, 0, 1)      v is a view of w
        s, t = split(v, 4)          so are s and t
        b = to(w, bfloat16)         b is a copy of w in another dtype
        c = reshape(t, [32])        c is neither: t is not contiguous, so c is a copy in the same dtype

    Once gathered and used they are freed, and gathered or cast again if the backward needs them. Strides are those of
    unconverted weights; if a conversion changes them, a copy may be classified as a view.
    """
    return frozenset(_derived(program))


@remembered
def copies(program: Program) -> dict[str, str]:
    """The parameter of each copy of a parameter in another dtype, by the name of the copy."""
    parameters = {p.value.name for p in program.parameters}
    return {op.results[0].name: op.operands[0] for op in program.ops if casts(op) and op.operands[0] in parameters}


@remembered
def reduce_dtypes(program: Program) -> dict[str, torch.dtype]:
    """The dtype in which the gradient of a weight is reduced over devices, for weights where that is not their own dtype.

    A bfloat16 copy of a float32 parameter has a bfloat16 gradient, but partial gradients are summed in float32, or in the
    parameter's `reduce` dtype. The sum is rounded once, like the gradient of such a copy on a single device.
    """
    found = {}
    for name, (parameter, tensor) in _derived(program).items():
        dtype = torch.promote_types(parameter.reduce or parameter.value.dtype, tensor.dtype)
        if dtype != tensor.dtype:
            found[name] = dtype
    return found


def _derived(program: Program) -> dict[str, tuple[Parameter, torch.Tensor]]:
    """Every weight with the parameter that it comes from, and a meta tensor with its strides."""
    values = program.values
    found = {p.value.name: (p, _tensor(p.value)) for p in program.parameters}
    for op in program.ops:
        if op.operands and op.operands[0] in found and views(op):
            parameter, whole = found[op.operands[0]]
            results = _run(op, {name: found[name][1] if name in found else _tensor(values[name]) for name in op.operands})
            memory = whole.untyped_storage()._cdata
            for result, tensor in zip(op.results, results, strict=True):
                if tensor.untyped_storage()._cdata == memory or casts(op):
                    found[result.name] = parameter, tensor
    return found


def views(op: Op) -> bool:
    """Whether an op may return a view of its first operand, by its schema."""
    schema = overload(op.target)._schema
    return not schema.is_mutable and any(returned.alias_info is not None for returned in schema.returns)


def casts(op: Op) -> bool:
    """Whether an op is a cast to a floating dtype, which by its schema may return a view."""
    return op.target == CAST and op.results[0].dtype.is_floating_point


def _run(op: Op, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The results of an op on meta tensors, with their strides."""
    args, kwargs = filled(op.args, op.kwargs, lambda ref: tensors[ref.name])
    found = overload(op.target)(*args, **kwargs)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _tensor(value: Value) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")
