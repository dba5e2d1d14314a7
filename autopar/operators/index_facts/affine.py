"""Facts about a value as a function of its coordinates: affine integers and boolean formulas over them.

    Affine    scale[0] i0 + scale[1] i1 + ... + base              arange, positions, constants
    Formula   True | False | affine >= 0 | all of | some of       comparisons of affine integers
    Select    yes where a formula holds, no elsewhere             additive masks

A fact belongs to a shape; coordinate d runs from 0 to shape[d] - 1. Formulas that are constant on the shape are folded, so that
equal facts compare equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autopar.ir.layout import Shape


@dataclass(frozen=True, slots=True)
class Affine:
    """A number that is affine in the coordinates; `base` may be a float if every scale is zero."""

    scale: tuple[int, ...]
    base: int | float

    @property
    def constant(self) -> bool:
        return not any(self.scale)

    def plus(self, other: Affine, times: int | float = 1) -> Affine:
        return Affine(
            tuple(a + int(times) * b for a, b in zip(self.scale, other.scale, strict=True)), self.base + times * other.base
        )


@dataclass(frozen=True, slots=True)
class AtLeast:
    """number >= 0, with coprime scale."""

    number: Affine


@dataclass(frozen=True, slots=True)
class All:
    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Some:
    parts: tuple[Formula, ...]


Formula = bool | AtLeast | All | Some


@dataclass(frozen=True, slots=True)
class Select:
    """`yes` where the formula holds, `no` elsewhere."""

    when: Formula
    yes: int | float
    no: int | float


Fact = Affine | Formula | Select


def constant(number: int | float, rank: int) -> Affine:
    return Affine((0,) * rank, number)


def coordinate(dim: int, rank: int, step: int = 1, start: int = 0) -> Affine:
    """start + step * i_dim."""
    return Affine(tuple(step if d == dim else 0 for d in range(rank)), start)


def bounds(number: Affine, shape: Shape) -> tuple[int | float, int | float]:
    """The least and the greatest value over the shape (which has elements)."""
    reach = [scale * (size - 1) for scale, size in zip(number.scale, shape, strict=True)]
    return number.base + sum(min(r, 0) for r in reach), number.base + sum(max(r, 0) for r in reach)


def at_least_zero(number: Affine, shape: Shape) -> Formula:
    """The formula number >= 0 for integers, folded if it always or never holds on the shape."""
    number = flattened(number, shape)
    low, high = bounds(number, shape)
    if low >= 0:
        return True
    if high < 0:
        return False
    divisor = math.gcd(*number.scale)
    return AtLeast(Affine(tuple(s // divisor for s in number.scale), math.floor(number.base / divisor)))


def both(parts: Iterable[Formula]) -> Formula:
    """The conjunction of formulas, folded."""
    kept = _flat(parts, All, neutral=True)
    return False if False in kept else _joined(kept, All, empty=True)


def either(parts: Iterable[Formula]) -> Formula:
    """The disjunction of formulas, folded."""
    kept = _flat(parts, Some, neutral=False)
    return True if True in kept else _joined(kept, Some, empty=False)


def _flat(parts: Iterable[Formula], kind: type[All] | type[Some], *, neutral: bool) -> list[Formula]:
    found: list[Formula] = []
    for part in parts:
        for one in part.parts if isinstance(part, (All, Some)) and isinstance(part, kind) else (part,):
            if one is not neutral and one not in found:
                found.append(one)
    return found


def _joined(parts: list[Formula], kind: type[All] | type[Some], *, empty: bool) -> Formula:
    if len(parts) < 2:
        return parts[0] if parts else empty
    return kind(tuple(sorted(parts, key=str)))


def negated(formula: Formula, shape: Shape) -> Formula:
    """The negation of a formula over integers."""
    match formula:
        case bool():
            return not formula
        case AtLeast(number):
            return at_least_zero(Affine(tuple(-s for s in number.scale), -number.base - 1), shape)
        case All(parts):
            return either(negated(part, shape) for part in parts)
        case Some(parts):
            return both(negated(part, shape) for part in parts)


def moved(fact: Fact, places: Sequence[Affine], shape: Shape) -> Fact:
    """The fact with its coordinate d replaced by places[d], a number in the coordinates of `shape`."""
    match fact:
        case Affine(scale, base):
            number = constant(base, len(shape))
            for times, place in zip(scale, places, strict=True):
                number = number.plus(place, times) if times else number
            return flattened(number, shape)
        case Select(when, yes, no):
            return chosen(_formula(moved(when, places, shape)), yes, no, len(shape))
        case bool():
            return fact
        case AtLeast(number):
            there = moved(number, places, shape)
            assert isinstance(there, Affine)
            return at_least_zero(there, shape)
        case All(parts):
            return both(_formula(moved(part, places, shape)) for part in parts)
        case Some(parts):
            return either(_formula(moved(part, places, shape)) for part in parts)


def flattened(number: Affine, shape: Shape) -> Affine:
    """The number without the coordinates of dims of size 1, which are always 0."""
    return Affine(tuple(s if size > 1 else 0 for s, size in zip(number.scale, shape, strict=True)), number.base)


def chosen(when: Formula, yes: int | float, no: int | float, rank: int) -> Affine | Select:
    if isinstance(when, bool):
        return constant(yes if when else no, rank)
    return constant(yes, rank) if yes == no else Select(when, yes, no)


def _formula(fact: Fact) -> Formula:
    assert not isinstance(fact, (Affine, Select))
    return fact


def truth(fact: Fact, test: Callable[[int | float], bool], shape: Shape) -> Formula | None:
    """The formula for `test(number)`, for a number that takes at most two values; None for other numbers."""
    match fact:
        case Affine(base=base):
            return test(base) if fact.constant else None
        case Select(when, yes, no):
            kept = ([when] if test(yes) else []) + ([negated(when, shape)] if test(no) else [])
            return either(kept)
        case _:
            return None
