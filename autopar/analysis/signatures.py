"""Signatures: everything about an op that decides its candidates and their prices, as text."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.program import Argument, Op, Ref, Static, Value, substitute, text
from autopar.ir.schema import bound
from autopar.operators import row_of


def signature(op: Op, values: Mapping[str, Value]) -> str:
    """Target, static arguments, operand and result kinds of an op.

    A number in an argument that decides neither layouts nor prices (`Rule.indifferent`) counts as any other.
    """

    def describe(leaf: Ref | Static) -> str:
        return kind_of(values[leaf.name]) if isinstance(leaf, Ref) else text(leaf)

    def written(argument: Argument) -> str:
        return text(substitute(argument, describe))

    if indifferent := row_of(op).indifferent:
        named = {
            name: "*" if name in indifferent and isinstance(value, int | float) else value for name, value in bound(op).items()
        }
        arguments = [f"{name}={written(value)}" for name, value in named.items()]
    else:
        arguments = [*map(written, op.args), *(f"{name}={written(a)}" for name, a in op.kwargs)]
    part = f" {op.fused}" if op.fused else ""
    return f"{op.target}({', '.join(arguments)}) -> {', '.join(map(kind_of, op.results))}{part}"


def kind_of(value: Value) -> str:
    """Dtype, shape, and whether there is a gradient."""
    return f"{value.dtype}{list(value.shape)}{'+' if value.requires_grad else ''}"


__all__ = ["kind_of", "signature"]
