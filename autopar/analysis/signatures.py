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
    """The arguments of an op, positional and by name, in which "*" stands for every number that decides neither layouts nor
    prices: of an argument in `Rule.indifferent`, but for a 0 that is added, as only x + 0 is linear in x; or a rate of dropout
    other than 0."""
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
    """Dtype, shape, and whether there is a gradient."""
    return f"{value.dtype}{list(value.shape)}{'+' if value.requires_grad else ''}"


__all__ = ["deciding_arguments", "kind_of", "signature"]
