"""Facts about integer arithmetic and constants."""

from __future__ import annotations

import operator
from collections.abc import Callable

from autopar.ir.layout import Shape
from autopar.ir.program import Ref
from autopar.operators.index_facts import affine
from autopar.operators.index_facts.affine import Affine, Fact, Select
from autopar.operators.index_facts.call import FactRule, IndexCall, Number, number


def _fill(fixed: Number | None) -> FactRule:
    def rule(call: IndexCall) -> Fact | None:
        found = call.named.get("fill_value") if fixed is None else fixed
        return affine.constant(found, len(call.shape)) if isinstance(found, (bool, int, float)) else None

    return rule


def arange(call: IndexCall) -> Fact | None:
    start, step = call.named.get("start", 0), call.named.get("step", 1)
    if not call.whole or not isinstance(start, int) or not isinstance(step, int):
        return None
    return affine.flattened(affine.coordinate(0, 1, step=step, start=start), call.shape)


def _arithmetic(combine: Callable[[Number, Number], Number], sign: int) -> FactRule:
    """a + b and a - b; `sign` is b's."""

    def rule(call: IndexCall) -> Fact | None:
        left, right = call.wide(call.named["self"]), call.wide(call.named["other"])
        if call.named.get("alpha", 1) != 1:
            return None
        if isinstance(left, Affine) and isinstance(right, Affine) and call.whole:
            return left.plus(right, sign)
        return _pointwise(left, right, combine, call.shape)

    return rule


def reversed_minus(call: IndexCall) -> Fact | None:
    left, right = call.wide(call.named["other"]), call.wide(call.named["self"])
    if isinstance(left, Affine) and isinstance(right, Affine) and call.whole:
        return left.plus(right, -1)
    return _pointwise(left, right, operator.sub, call.shape)


def times(call: IndexCall) -> Fact | None:
    """a * b of numbers."""
    left, right = call.wide(call.named["self"]), call.wide(call.named["other"])
    if isinstance(left, Affine) and isinstance(right, Affine) and call.whole:
        varying, factor = (left, right) if right.constant else (right, left)
        return affine.constant(0, len(call.shape)).plus(varying, factor.base) if factor.constant else None
    return _pointwise(left, right, operator.mul, call.shape)


def _pointwise(left: Fact | None, right: Fact | None, combine: Callable[[Number, Number], Number], shape: Shape) -> Fact | None:
    """An operation on two numbers, of which one is constant and the other takes at most two values."""
    match number(left, shape), number(right, shape):
        case Affine() as a, Affine() as b if a.constant and b.constant:
            return affine.constant(combine(a.base, b.base), len(shape))
        case Select(when, yes, no), Affine() as b if b.constant:
            return affine.chosen(when, combine(yes, b.base), combine(no, b.base), len(shape))
        case Affine() as a, Select(when, yes, no) if a.constant:
            return affine.chosen(when, combine(a.base, yes), combine(a.base, no), len(shape))
    return None


def negative(call: IndexCall) -> Fact | None:
    return _pointwise(affine.constant(-1, len(call.shape)), call.fact(), operator.mul, call.shape)


def same(call: IndexCall) -> Fact | None:
    return call.fact()


def cumsum(call: IndexCall) -> Fact | None:
    fact, rank = number(call.fact(), call.shape), len(call.shape)
    if not isinstance(fact, Affine) or not fact.constant or not call.whole:
        return None
    return affine.flattened(affine.coordinate(call.dim(), rank, step=int(fact.base), start=int(fact.base)), call.shape)


def diff(call: IndexCall) -> Fact | None:
    """Differences of neighbours along a dim, after a prepended element, if all of them are equal."""
    prepended, fact, size = call.named["prepend"], call.fact(), call.size()
    rank, dim = len(size), call.dim(rank=len(size))
    if call.named["n"] != 1 or call.named["append"] is not None or not isinstance(fact, Affine) or not call.whole:
        return None
    step = affine.constant(fact.scale[dim] if size[dim] > 1 else 0, rank)
    if prepended is None:
        return step
    before = call.known.get(prepended.name) if isinstance(prepended, Ref) else None
    if not isinstance(before, Affine) or not isinstance(prepended, Ref) or call.values[prepended.name].shape[dim] != 1:
        return None
    at_zero = Affine(tuple(0 if d == dim else s for d, s in enumerate(fact.scale)), fact.base)
    first = at_zero.plus(before, -1)
    return first if first == step or size[dim] == 1 else None


fill, zeros, ones = _fill(None), _fill(0), _fill(1)
plus, minus = _arithmetic(operator.add, 1), _arithmetic(operator.sub, -1)
