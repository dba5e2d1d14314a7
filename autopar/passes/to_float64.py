"""Converts a program to double precision, for verification."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.ir.program import Argument, Op, Parameter, Program, Ref, Static, Value, overload, substitute
from autopar.ir.shape_inference import Kind, infer
from autopar.operators.double_precision import DOUBLE

WIDE = {
    torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64,
    torch.complex32: torch.complex128, torch.complex64: torch.complex128,
}  # fmt: skip


def promote(program: Program) -> Program:
    """Replace float32, bfloat16 and float16 by float64, and complex dtypes likewise, in values and arguments; names stay.

        x: float32[3]                               x: float64[3]
        y: bfloat16[3] = to.dtype(x, bfloat16)  ->  y: float64[3] = to.dtype(x, float64)
        z: float32[] = full([], -3.4e38)            z: float64[] = full([], -3.4e38, dtype=float64)
        w: bfloat16[3, 8] = _grouped_mm(y, e, o)    w: float64[3, 8] = autopar.grouped_mm(y, e, o)

    Fill constants stay: they are approximations of minus infinity. An op that converts integers to floats implicitly still
    returns torch's default dtype, which promotes to double in the next op with a double operand.
    """
    values: dict[str, Value] = {value.name: _wide(value) for value in program.inputs}
    parameters, buffers = _held(program.parameters), _held(program.buffers)
    values |= {held.value.name: held.value for held in (*parameters, *buffers)}
    ops = []
    for op in program.ops:
        ops.append(_promoted(op, values))
        values |= {result.name: result for result in ops[-1].results}
    inputs = tuple(values[value.name] for value in program.inputs)
    return replace(program, ops=tuple(ops), inputs=inputs, parameters=parameters, buffers=buffers)


def _promoted(op: Op, values: dict[str, Value]) -> Op:
    target = DOUBLE.get(op.target, op.target)
    args = tuple(substitute(a, _leaf) for a in op.args)
    kwargs = tuple((name, substitute(a, _leaf)) for name, a in op.kwargs)
    takes = {formal.name for formal in overload(target)._schema.arguments}
    if not op.operands and op.results[0].dtype in WIDE and "dtype" in takes:
        kwargs = (*((name, a) for name, a in kwargs if name != "dtype"), ("dtype", WIDE[op.results[0].dtype]))
    try:
        found = infer(target, args, kwargs, values.__getitem__)
    except NotImplementedError:  # without a meta kernel its results are as they were, but wider
        return replace(op, target=target, args=args, kwargs=kwargs, results=tuple(map(_wide, op.results)))
    kinds = (found,) if isinstance(found, Kind) else found
    results = tuple(replace(result, dtype=kind.dtype) for result, kind in zip(op.results, kinds, strict=True))
    return replace(op, target=target, args=args, kwargs=kwargs, results=results)


def _held(held: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    return tuple(replace(one, value=_wide(one.value), reduce=one.reduce and wide(one.reduce)) for one in held)


def _wide(value: Value) -> Value:
    return replace(value, dtype=wide(value.dtype))


def _leaf(leaf: Ref | Static) -> Argument:
    return wide(leaf) if isinstance(leaf, torch.dtype) else leaf


def wide(dtype: torch.dtype) -> torch.dtype:
    """The double-precision dtype for a floating or complex dtype; other dtypes unchanged."""
    return WIDE.get(dtype, dtype)
