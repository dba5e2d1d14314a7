"""Infers the strides of a plan's splits at other sizes.

    x: float[8, 16, 32]    S(0) over 4: stride 2         x: float[16, 16, 32]    stride 4
    y: float[128, 32]      S(0) over 4: stride 32   ->   y: float[256, 32]       stride 64
    y: float[128, 32]      S(0/8) over 4: stride 4       y: float[256, 32]       stride 4     the sequence, in 16 blocks

A stride alone does not tell which dims it is made of. But each split is somewhere the outermost one of a dim (a part split off
of a dim, or merged into it, is a dim of its own elsewhere), and there its stride is the dim divided by the axis. From there the
rules propagate it: all dims of an op that have a factor are cut by the same digits of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from autopar.analysis.analysis import Analysis
from autopar.errors import InputError
from autopar.ir.layout import Layout
from autopar.ir.program import Op, Program
from autopar.operators import OpSharding
from autopar.search_space.assignment import Assignment

Fits = Mapping[str, OpSharding | None]


class Split(NamedTuple):
    """A split: which digit of a dim of a value, or of a factor of an op, an axis owns; by its stride at the plan's sizes."""

    kind: str  # "value" or "op"
    name: str
    place: int  # the dim, or the factor
    axis: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A digit's stride is `times` that of another one."""

    digit: Split
    times: Fraction


class StrideInference:
    """The digits of a plan's splits, and their strides at other sizes."""

    def __init__(
        self, old: Program, fits: Fits, assignment: Assignment, new: Analysis, sizes: tuple[int, ...], called: str
    ) -> None:
        self.old, self.fits, self.assignment, self.new, self.sizes, self.called = old, fits, assignment, new, sizes, called
        self.relations: dict[Split, list[Relation]] = {}
        self.found: dict[Split, Fraction] = {}
        self.nests: dict[tuple[Split, ...], None] = {}  # of one dim or factor, outermost first
        self.lengths: dict[Split, tuple[int, int]] = {}  # of the dim or factor, before and now
        self.touching: dict[str, list[Op]] = {}
        for op in old.ops:
            for name in dict.fromkeys((*op.operands, *(result.name for result in op.results))):
                self.touching.setdefault(name, []).append(op)

    def solve(self, known: Mapping[Split, Fraction]) -> dict[Split, Fraction]:
        """The stride of every digit, fractional if the mesh does not divide it; raises InputError if one is ambiguous.

        `known` are digits of values that are given, with their strides.
        """
        for op in self.old.ops:
            self._op(op)
        for name, layouts in _layouts(self.old, self.assignment).items():
            for layout in layouts:
                self._layout(name, layout)
        for digit in known:
            self._settle(digit, known[digit])
        for outer, *_ in self.nests:
            before, now = self.lengths[outer]
            if before == self._extent(outer):  # nothing is left of it
                self._settle(outer, Fraction(now, self.sizes[outer.axis]))
        self._nested()
        for digit, (before, now) in self.lengths.items():
            if digit in self.found:
                continue
            stride = self._searched(digit)
            if stride is None and before != now:
                raise self._unclear(digit)
            self._settle(digit, Fraction(digit.stride) if stride is None else stride)
            self._nested()
        return self.found

    def _nested(self) -> None:
        """Settle digits that are nowhere outermost but nested in settled ones."""
        for nest in self.nests:
            for outer, inner in itertools.pairwise(nest):
                if inner not in self.found and outer in self.found and outer.stride == self._extent(inner):
                    self._settle(inner, self.found[outer] / self.sizes[inner.axis])

    def _extent(self, digit: Split) -> int:
        """The number of elements over which a digit takes each of its values once."""
        return digit.stride * self.sizes[digit.axis]

    def _searched(self, digit: Split) -> Fraction | None:
        """The stride of a digit, found by propagating it to dims where the plan does not have it."""
        todo, seen = [(digit, Fraction(1))], {digit}
        for one, times in todo:
            if one in self.found:
                return self.found[one] * times
            if one.kind == "op":
                todo += [(relation.digit, times / relation.times) for relation in self.relations[one]]
                continue
            before, now = self._lengths(one.name, one.place)
            if before == self._extent(one):
                return Fraction(now, self.sizes[one.axis]) * times
            for other, ratio in self._beside(one):
                if other not in seen:
                    seen.add(other)
                    todo.append((other, times * ratio))
        return None

    def _lengths(self, name: str, dim: int) -> tuple[int, int]:
        """The old and new length of a dim."""
        return self.old.values[name].shape[dim], self.new.program.values[name].shape[dim]

    def _beside(self, digit: Split) -> Iterator[tuple[Split, Fraction]]:
        """This dim's split in other dims, by the rules of ops that touch the value: its stride is a multiple of theirs."""
        for op in self.touching.get(digit.name, ()):
            before, now = self.fits[op.name], self.new.fits[op.name]
            if before is None or now is None or (before.operands, before.results) != (now.operands, now.results):
                continue
            spots = [*_spots(op, before)]
            for parts in (parts for name, dim, parts in spots if (name, dim) == (digit.name, digit.place)):
                for factor in parts:
                    was, is_ = _inside(parts, factor, before), _inside(parts, factor, now)
                    if digit.stride % was or self._extent(digit) > was * before.factors[factor].size:
                        continue  # it is a digit of another factor
                    for name, dim, others in spots:
                        if factor in others:
                            step = digit.stride // was * _inside(others, factor, before)
                            yield digit._replace(name=name, place=dim, stride=step), Fraction(is_, _inside(others, factor, now))

    def _settle(self, digit: Split, stride: Fraction) -> None:
        """Set the stride of a digit, and of all that follow from it."""
        todo = [(digit, stride)]
        while todo:
            digit, stride = todo.pop()
            if digit in self.found:
                if self.found[digit] != stride:
                    raise self._unclear(digit)
                continue
            self.found[digit] = stride
            todo += [(relation.digit, stride * relation.times) for relation in self.relations.get(digit, ())]

    def _unclear(self, digit: Split) -> InputError:
        return InputError(
            f"it is not clear how the plan splits {self.called}: two dims are equally long in the sample",
            **{digit.kind: digit.name},
            axis=digit.axis,
            fix="plan with a sample whose sizes differ from each other and from those of the model",
        )

    def _op(self, op: Op) -> None:
        """Add the digits of an op's factors and of the dims that have these."""
        before, now = self.fits[op.name], self.new.fits[op.name]
        if before is None or now is None:
            return
        nests: dict[int, list[tuple[int, Split]]] = {}
        for axis, (kind, which, stride) in enumerate(self.assignment.ops[op.name].forms):
            if kind not in "SD":
                continue
            for factor in (which,) if kind == "S" else before.factors_of(before.distributed[which]):
                step = stride if kind == "S" else before.factors[factor].size // self.sizes[axis]
                digit = Split("op", op.name, factor, axis, step)
                nests.setdefault(factor, []).append((step, digit))
                self.lengths[digit] = before.factors[factor].size, now.factors[factor].size
                for name, dim, parts in _spots(op, before):
                    if factor in parts:
                        place = Split("value", name, dim, axis, step * _inside(parts, factor, before))
                        self._relate(digit, place, Fraction(_inside(parts, factor, now)))
        self.nests |= {tuple(digit for _, digit in sorted(nest, reverse=True)): None for nest in nests.values()}

    def _relate(self, one: Split, other: Split, times: Fraction) -> None:
        self.relations.setdefault(one, []).append(Relation(digit=other, times=times))
        self.relations.setdefault(other, []).append(Relation(digit=one, times=1 / times))

    def _layout(self, name: str, layout: Layout) -> None:
        """Add the digits of a value in one of its layouts."""
        nests: dict[int, list[tuple[int, Split]]] = {}
        for axis, state in enumerate(layout):
            if state.kind == "S":
                digit = Split("value", name, state.dim, axis, state.stride)
                nests.setdefault(state.dim, []).append((state.stride, digit))
                self.lengths[digit] = self._lengths(name, state.dim)
        self.nests |= {tuple(digit for _, digit in sorted(nest, reverse=True)): None for nest in nests.values()}


def _spots(op: Op, fitted: OpSharding) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Every dim of an op's operands and results, with its factors: (value, dim, factors)."""
    names = (*op.operands, *(result.name for result in op.results))
    for name, dims in zip(names, (*fitted.operands, *fitted.results), strict=True):
        for dim, parts in enumerate(dims):
            yield name, dim, parts


def _inside(parts: tuple[int, ...], factor: int, fitted: OpSharding) -> int:
    """The number of elements of a dim within one index of a factor."""
    return math.prod(fitted.factors[f].size for f in parts[parts.index(factor) + 1 :])


def _layouts(program: Program, assignment: Assignment) -> dict[str, dict[Layout, None]]:
    """Every layout that a value has."""
    found: dict[str, dict[Layout, None]] = {name: {} for name in program.values}
    for name, layout in assignment.given.items():
        found[name][layout] = None
    for op in program.ops:
        made = assignment.ops[op.name]
        names = (*op.operands, *(result.name for result in op.results))
        for name, layout in zip(names, (*made.operands, *made.results), strict=True):
            found[name][layout] = None
    for name, steps in assignment.routes.items():
        found[name] |= {layout: None for step in steps for layout in (step.source, step.target)}
    for output in program.outputs:
        found[output.value][assignment.outputs[output.path]] = None
    return found


__all__ = ["Fits", "Split", "StrideInference"]
