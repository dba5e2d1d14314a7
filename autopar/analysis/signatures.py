"""Signatures: everything about an op that decides its candidates and their prices, as text."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.builder import Keywords
from autopar.ir.program import Argument, Op, Ref, Static, Value, substitute, text
from autopar.ir.schema import bound
from autopar.operators import row_of


def signature(op: Op, values: Mapping[str, Value]) -> str:
    """Target, static arguments (see `deciding_arguments`), operand and result kinds of an op."""

    def describe(leaf: Ref | Static) -> str:
        return kind_of(values[leaf.name]) if isinstance(leaf, Ref) else text(leaf)

    args, kwargs = deciding_arguments(op)
    arguments = [text(substitute(argument, describe)) for argument in args]
    arguments += [f"{name}={text(substitute(argument, describe))}" for name, argument in kwargs]
    part = f" {op.fused}" if op.fused else ""
    return f"{op.target}({', '.join(arguments)}) -> {', '.join(map(kind_of, op.results))}{part}"


def deciding_arguments(op: Op) -> tuple[tuple[Argument, ...], Keywords]:
    """The positional and keyword arguments of an op, with "*" for every number that affects neither layouts nor prices: that of
    an argument in `Rule.indifferent`, except an added 0 (only x + 0 is linear in x), or a dropout rate other than 0."""
    row = row_of(op)
    if not row.indifferent and not row.rate:
        return op.args, op.kwargs

    def starred(name: str, value: Argument) -> Argument:
        if not isinstance(value, int | float):
            return value
        added = any(name in group for group in row.linear)
        return "*" if (name in row.indifferent and (value or not added)) or (name == row.rate and value) else value

    return (), tuple((name, starred(name, value)) for name, value in bound(op).items())


def kind_of(value: Value) -> str:
    """Dtype, shape, and whether the value requires a gradient."""
    return f"{value.dtype}{list(value.shape)}{'+' if value.requires_grad else ''}"


__all__ = ["deciding_arguments", "kind_of", "signature"]
