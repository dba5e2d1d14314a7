"""Facts about comparisons, logic and choices."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from autopar.ir.layout import Shape
from autopar.operators.index_facts import affine
from autopar.operators.index_facts.affine import Affine, Fact, Formula, Select
from autopar.operators.index_facts.call import FactRule, IndexCall, Number, formula, number
from autopar.operators.index_facts.integers import times

_TESTS: dict[str, Callable[[Number, Number], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def _compare(name: str) -> FactRule:
    def rule(call: IndexCall) -> Fact | None:
        left = number(call.wide(call.named["self"]), call.shape)
        right = number(call.wide(call.named["other"]), call.shape)
        if isinstance(left, Affine) and isinstance(right, Affine):
            return _order(name, left, right, call.shape)
        test = _TESTS[name]
        if isinstance(left, Select) and isinstance(right, Affine) and right.constant:
            return affine.truth(left, lambda one: test(one, right.base), call.shape)
        if isinstance(right, Select) and isinstance(left, Affine) and left.constant:
            return affine.truth(right, lambda one: test(left.base, one), call.shape)
        return None

    return rule


def _order(name: str, left: Affine, right: Affine, shape: Shape) -> Formula | None:
    """Comparisons such as left < right, of integers or of constants."""
    if left.constant and right.constant:
        return _TESTS[name](left.base, right.base)
    if isinstance(left.base, float) or isinstance(right.base, float):
        return None
    up, down = right.plus(left, -1), left.plus(right, -1)
    unit = affine.constant(1, len(shape))
    match name:
        case "le":
            return affine.at_least_zero(up, shape)
        case "lt":
            return affine.at_least_zero(up.plus(unit, -1), shape)
        case "ge":
            return affine.at_least_zero(down, shape)
        case "gt":
            return affine.at_least_zero(down.plus(unit, -1), shape)
        case _:
            equal = affine.both([affine.at_least_zero(up, shape), affine.at_least_zero(down, shape)])
            return equal if name == "eq" else affine.negated(equal, shape)


def _connected(connect: Callable[[list[Formula]], Formula]) -> FactRule:
    def rule(call: IndexCall) -> Fact | None:
        if call.op.results[0].dtype is not torch.bool:
            return None
        parts = [formula(call.wide(call.named[name]), call.shape) for name in ("self", "other")]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            return connect(known)
        settled = [part for part in known if isinstance(part, bool) and connect([part, not part]) is part]
        return settled[0] if settled else None  # False and x, True or x

    return rule


def negation(call: IndexCall) -> Fact | None:
    held = formula(call.fact(), call.shape) if call.op.results[0].dtype is torch.bool else None
    return None if held is None else affine.negated(held, call.shape)


def _where(condition: str, yes: str, no: str) -> FactRule:
    def rule(call: IndexCall) -> Fact | None:
        when = formula(call.wide(call.named[condition]), call.shape)
        if when is None or isinstance(when, bool):
            return None if when is None else call.wide(call.named[yes if when else no])
        left, right = call.wide(call.named[yes]), call.wide(call.named[no])
        if call.op.results[0].dtype is torch.bool:
            a, b = formula(left, call.shape), formula(right, call.shape)
            if a is None or b is None:
                return None
            return affine.either([affine.both([when, a]), affine.both([affine.negated(when, call.shape), b])])
        if isinstance(left, Affine) and isinstance(right, Affine) and left.constant and right.constant:
            return affine.chosen(when, left.base, right.base, len(call.shape))
        return None

    return rule


def _triangle(sign: int) -> FactRule:
    """tril keeps i0 + diagonal >= i1 (sign 1), triu i1 - diagonal >= i0 (sign -1), of the last two dims."""

    def rule(call: IndexCall) -> Fact | None:
        rank, diagonal = len(call.shape), call.named["diagonal"]
        assert isinstance(diagonal, int)
        inside = Affine((*([0] * (rank - 2)), sign, -sign), sign * diagonal)
        when, fact = affine.at_least_zero(inside, call.shape), call.fact()
        if isinstance(fact, Affine) and fact.constant:
            return affine.chosen(when, fact.base, 0, rank)
        held = formula(fact, call.shape) if call.op.results[0].dtype is torch.bool else None
        return None if held is None else affine.both([when, held])

    return rule


def product(call: IndexCall) -> Fact | None:
    return _connected(affine.both)(call) if call.op.results[0].dtype is torch.bool else times(call)


both, either = _connected(affine.both), _connected(affine.either)
where, masked_fill = _where("condition", "self", "other"), _where("mask", "value", "self")
lower_triangle, upper_triangle = _triangle(1), _triangle(-1)
equal, not_equal, less, at_most, greater, at_least = (_compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge"))
