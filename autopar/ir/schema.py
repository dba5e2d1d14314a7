"""The arguments of an op by their names in the operator's schema."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.builder import Keywords
from autopar.ir.program import Argument, Op, overload


def bound(op: Op) -> dict[str, Argument]:
    """Every argument of the op by name, defaults filled in, in the schema's order."""
    given = dict(op.kwargs)
    found: dict[str, Argument] = {}
    for index, formal in enumerate(overload(op.target)._schema.arguments):
        if index < len(op.args) and not formal.kwarg_only:
            found[formal.name] = op.args[index]
        elif formal.name in given:
            found[formal.name] = given[formal.name]
        elif formal.has_default_value():
            default = formal.default_value
            found[formal.name] = tuple(default) if isinstance(default, list) else default
    return found


def packed(target: str, named: Mapping[str, Argument]) -> tuple[tuple[Argument, ...], Keywords]:
    """The shortest positional and keyword arguments that say the same; the inverse of `bound`."""
    formals = overload(target)._schema.arguments
    told = [f for f in formals if f.name in named and not (f.has_default_value() and _equal(named[f.name], f.default_value))]
    last = max((i for i, f in enumerate(formals) if f in told and not f.kwarg_only), default=-1)
    positional = tuple(named[f.name] for f in formals[: last + 1])
    return positional, tuple((f.name, named[f.name]) for f in told if f.kwarg_only)


def _equal(given: Argument, default: object) -> bool:
    plain = tuple(default) if isinstance(default, list) else default
    return type(given) is type(plain) and given == plain
