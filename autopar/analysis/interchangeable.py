"""Interchangeable operands or results of an op, which no candidate distinguishes: inputs of `stack`, or results of `unbind`.

The rule gives them the same factors, and they have the same kind and the same linear groups, so under every candidate they have
equal layouts and prices.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from autopar.analysis.fits import fit_of
from autopar.analysis.signatures import kind_of
from autopar.ir.program import Op, Program, Ref
from autopar.operators import OpSharding


def operand_places(program: Program, op: Op) -> tuple[int, ...]:
    """For each operand the first position interchangeable with it; empty if no two operands are."""
    several = any(isinstance(argument, tuple) and sum(isinstance(a, Ref) for a in argument) > 1 for argument in op.args)
    fit = fit_of(program, op.name) if several else None
    if fit is None or fit.distributed:
        return ()
    return _first([(kind_of(program.values[name]), *_operand(fit, place)) for place, name in enumerate(op.operands)])


def result_places(program: Program, op: Op) -> tuple[int, ...]:
    """For each result the first one interchangeable with it; empty if no two results are."""
    fit = fit_of(program, op.name) if len(op.results) > 1 else None
    if fit is None or fit.distributed:
        return ()
    return _first(
        [(kind_of(result), fit.results[place], _asked(fit, "result", place)) for place, result in enumerate(op.results)]
    )


def _operand(fit: OpSharding, place: int) -> tuple[Hashable, ...]:
    groups = tuple(place in group for group in fit.linear)
    return fit.operands[place], place in fit.added, groups, _asked(fit, "operand", place)


def _asked(fit: OpSharding, side: str, place: int) -> Hashable:
    return tuple(ask[2:] for ask in fit.asks if ask[:2] == (side, place))


def _first(keys: Sequence[Hashable]) -> tuple[int, ...]:
    """For each key the place of the first equal key; empty if no two are equal."""
    found: dict[Hashable, int] = {}
    places = tuple(found.setdefault(key, place) for place, key in enumerate(keys))
    return places if len(found) < len(keys) else ()


__all__ = ["operand_places", "result_places"]
