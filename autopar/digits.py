"""The strides of a plan's splits at other sizes.

    x: float[8, 16, 32]    S(0) over 4: stride 2         x: float[16, 16, 32]    stride 4
    y: float[128, 32]      S(0) over 4: stride 32   ->   y: float[256, 32]       stride 64
    y: float[128, 32]      S(0/8) over 4: stride 4       y: float[256, 32]       stride 4     the sequence, in 16 blocks

A stride alone does not tell which dims it is made of. But each split stands somewhere as the outermost one of a dim (what is
split off of a dim, or merged into it, is a dim of its own elsewhere), and there its stride is the dim divided by the axis. From
there the rules carry it along: all dims of an op that have a factor are cut by the same digits of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from autopar.decisions import Decisions
from autopar.errors import InputError
from autopar.ir import Op, Program
from autopar.layout import Layout
from autopar.rules import Fitted
from autopar.rules.rule import Dims
from autopar.solver.analysis import Analysis

# ("value", name, dim, axis, stride) or ("op", name, factor, axis, stride), with the stride at the sizes of the plan.
Digit = tuple[str, str, int, int, int]
Fits = Mapping[str, Fitted | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A digit's stride is `times` another one's."""

    digit: Digit
    times: Fraction


class Digits:
    """The digits of a plan's splits, and what their strides are at other sizes."""

    def __init__(
        self, old: Program, fits: Fits, decisions: Decisions, new: Analysis, sizes: tuple[int, ...], called: str
    ) -> None:
        self.old, self.fits, self.decisions, self.new, self.sizes, self.called = old, fits, decisions, new, sizes, called
        self.relations: dict[Digit, list[Relation]] = {}
        self.found: dict[Digit, Fraction] = {}
        self.nests: dict[tuple[Digit, ...], None] = {}  # of one dim or factor, outermost first
        self.lengths: dict[Digit, tuple[int, int]] = {}  # of the dim or factor, before and now
        self.touching: dict[str, list[Op]] = {}
        for op in old.ops:
            for name in dict.fromkeys((*op.operands, *(result.name for result in op.results))):
                self.touching.setdefault(name, []).append(op)

    def solve(self) -> dict[Digit, Fraction]:
        """The stride of every digit, not whole where the mesh does not divide; raises InputError if one is not clear."""
        for op in self.old.ops:
            self._op(op)
        for name, layouts in _layouts(self.old, self.decisions).items():
            for layout in layouts:
                self._layout(name, layout)
        for nest in self.nests:
            before, now = self.lengths[nest[0]]
            if before == nest[0][4] * self.sizes[nest[0][3]]:  # it is the outermost one of all
                self._settle(nest[0], Fraction(now, self.sizes[nest[0][3]]))
        self._nested()
        for digit, (before, now) in self.lengths.items():
            if digit in self.found:
                continue
            stride = self._searched(digit)
            if stride is None and before != now:
                raise self._unclear(digit)
            self._settle(digit, Fraction(digit[4]) if stride is None else stride)
            self._nested()
        return self.found

    def _nested(self) -> None:
        """Settle what is nowhere outermost but nested in what is settled."""
        for nest in self.nests:
            for outer, inner in itertools.pairwise(nest):
                if inner not in self.found and outer in self.found and outer[4] == inner[4] * self.sizes[inner[3]]:
                    self._settle(inner, self.found[outer] / self.sizes[inner[3]])

    def _searched(self, digit: Digit) -> Fraction | None:
        """The stride of a digit of a value, found where the rules would carry it, though the plan does not."""
        todo, seen = [(digit, Fraction(1))], {digit}
        for place, times in todo:
            kind, name, dim, axis, stride = place
            if place in self.found:
                return self.found[place] * times
            if kind == "op":
                todo += [(relation.digit, times / relation.times) for relation in self.relations.get(place, ())]
                continue
            before, now = (program.values[name].shape[dim] for program in (self.old, self.new.program))
            if before == stride * self.sizes[axis]:
                return Fraction(now, self.sizes[axis]) * times
            for other, ratio in self._beside(place):
                if other not in seen:
                    seen.add(other)
                    todo.append((other, times * ratio))
        return None

    def _beside(self, digit: Digit) -> Iterator[tuple[Digit, Fraction]]:
        """The same digit in other dims, by the rules of the ops that touch the value: its stride is so many times theirs."""
        _, name, dim, axis, stride = digit
        for op in self.touching.get(name, ()):
            before, now = self.fits[op.name], self.new.fits[op.name]
            if before is None or now is None:
                continue
            names = (*op.operands, *(result.name for result in op.results))
            spots = [
                (other, d, parts)
                for other, dims in zip(names, (*before.operands, *before.results), strict=True)
                for d, parts in enumerate(dims)
            ]
            for parts in (parts for other, d, parts in spots if (other, d) == (name, dim)):
                for factor in parts:
                    was, is_ = _inside(parts, factor, before), _inside(parts, factor, now)
                    if stride % was == 0 and stride * self.sizes[axis] <= was * before.factors[factor].size:
                        for other, d, places in ((o, d, p) for o, d, p in spots if factor in p):
                            step = stride // was * _inside(places, factor, before)
                            yield ("value", other, d, axis, step), Fraction(is_, _inside(places, factor, now))

    def _settle(self, digit: Digit, stride: Fraction) -> None:
        """Give a digit its stride, and all that follow from it."""
        todo = [(digit, stride)]
        while todo:
            digit, stride = todo.pop()
            if digit in self.found:
                if self.found[digit] != stride:
                    raise self._unclear(digit)
                continue
            self.found[digit] = stride
            todo += [(relation.digit, stride * relation.times) for relation in self.relations.get(digit, ())]

    def _unclear(self, digit: Digit) -> InputError:
        kind, name, _, axis, _ = digit
        return InputError(
            f"it is not clear how the plan splits {self.called}: two dims are equally long in the sample",
            **{kind: name},
            axis=axis,
            fix="plan with a sample whose sizes differ from each other and from those of the model",
        )

    def _op(self, op: Op) -> None:
        """The digits of an op's factors, and what they are in the dims that have these."""
        before, now = self.fits[op.name], self.new.fits[op.name]
        if before is None or now is None:
            return
        nests: dict[int, list[tuple[int, Digit]]] = {}
        for axis, (kind, which, stride) in enumerate(self.decisions.ops[op.name].forms):
            if kind not in "SD":
                continue
            for factor in (which,) if kind == "S" else before.spread(before.distributed[which]):
                step = stride if kind == "S" else before.factors[factor].size // self.sizes[axis]
                digit = ("op", op.name, factor, axis, step)
                nests.setdefault(factor, []).append((step, digit))
                self.lengths[digit] = before.factors[factor].size, now.factors[factor].size
                self._dims(digit, zip(op.operands, before.operands, strict=True), before, now)
                self._dims(digit, zip((r.name for r in op.results), before.results, strict=True), before, now)
        self.nests |= {tuple(digit for _, digit in sorted(nest, reverse=True)): None for nest in nests.values()}

    def _dims(self, digit: Digit, tensors: Iterator[tuple[str, Dims]], before: Fitted, now: Fitted) -> None:
        _, _, factor, axis, stride = digit
        for name, dims in tensors:
            for dim, parts in enumerate(dims):
                if factor in parts:
                    place = ("value", name, dim, axis, stride * _inside(parts, factor, before))
                    self._relate(digit, place, Fraction(_inside(parts, factor, now)))

    def _relate(self, one: Digit, other: Digit, times: Fraction) -> None:
        self.relations.setdefault(one, []).append(Relation(digit=other, times=times))
        self.relations.setdefault(other, []).append(Relation(digit=one, times=1 / times))

    def _layout(self, name: str, layout: Layout) -> None:
        """The digits of a value in one of its layouts."""
        nests: dict[int, list[tuple[int, Digit]]] = {}
        for axis, state in enumerate(layout):
            if state.kind == "S":
                digit = ("value", name, state.dim, axis, state.stride)
                nests.setdefault(state.dim, []).append((state.stride, digit))
                lengths = (program.values[name].shape[state.dim] for program in (self.old, self.new.program))
                self.lengths[digit] = next(lengths), next(lengths)
        self.nests |= {tuple(digit for _, digit in sorted(nest, reverse=True)): None for nest in nests.values()}


def _inside(parts: tuple[int, ...], factor: int, fitted: Fitted) -> int:
    """The elements of a dim within one index of a factor."""
    return math.prod(fitted.factors[f].size for f in parts[parts.index(factor) + 1 :])


def _layouts(program: Program, decisions: Decisions) -> dict[str, dict[Layout, None]]:
    """Every layout in which a value is."""
    found: dict[str, dict[Layout, None]] = {name: {} for name in program.values}
    for name, layout in decisions.given.items():
        found[name][layout] = None
    for op in program.ops:
        made = decisions.ops[op.name]
        names = (*op.operands, *(result.name for result in op.results))
        for name, layout in zip(names, (*made.operands, *made.results), strict=True):
            found[name][layout] = None
    for name, steps in decisions.routes.items():
        found[name] |= {layout: None for step in steps for layout in (step.source, step.target)}
    for output in program.outputs:
        found[output.value][decisions.outputs[output.path]] = None
    return found


__all__ = ["Digit", "Digits", "Fits"]
