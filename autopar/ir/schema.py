"""The arguments of an op by their names in the operator's schema."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.builder import Keywords
from autopar.ir.program import Argument, Op, overload


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaParameter:
    """One argument of a schema; `default` is None if it has none."""

    name: str
    default: Argument
    required: bool
    kwarg_only: bool
    tensor: bool


@functools.cache
def parameters(target: str) -> tuple[SchemaParameter, ...]:
    """The arguments that a target takes, in schema order."""
    return tuple(
        SchemaParameter(
            name=a.name,
            default=tuple(a.default_value) if isinstance(a.default_value, list) else a.default_value,
            required=not a.has_default_value(),
            kwarg_only=a.kwarg_only,
            tensor="Tensor" in str(a.type),
        )
        for a in overload(target)._schema.arguments
    )


def given(op: Op) -> dict[str, Argument]:
    """The arguments that are passed to an op, by name, in the order in which `Op.operands` counts their tensors."""
    return dict(zip((p.name for p in parameters(op.target)), op.args, strict=False)) | dict(op.kwargs)


def bound(op: Op) -> dict[str, Argument]:
    """Every argument of the op by name, defaults filled in, in the schema's order."""
    named = given(op)
    return {p.name: named.get(p.name, p.default) for p in parameters(op.target)}


def packed(target: str, named: Mapping[str, Argument]) -> tuple[tuple[Argument, ...], Keywords]:
    """The shortest positional and keyword arguments with the same meaning; the inverse of `bound`."""
    formals = parameters(target)
    told = [p for p in formals if p.name in named and (p.required or not _equal(named[p.name], p.default))]
    last = max((i for i, p in enumerate(formals) if p in told and not p.kwarg_only), default=-1)
    positional = tuple(named[p.name] for p in formals[: last + 1])
    return positional, tuple((p.name, named[p.name]) for p in told if p.kwarg_only)


def _equal(one: Argument, other: Argument) -> bool:
    return type(one) is type(other) and one == other
