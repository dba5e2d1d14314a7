"""Padding groups: dims of a program's values that operator rules tie together, so that they must be padded together.

    wte [n, 8], logits [4, 6, n]                     a vocabulary of n words
    wq [(n 8), 16], q [4, 6, (n 8)], h [4, 6, n, 8]  n heads of width 8

A group begins at parameters, which are padded with zeros, and ends where the padding cannot change a result: in sums over it,
at a loss, or at an output, where it is cut off (`padding_values`). A group is rejected if an operator has it along two factors,
or along part of a factor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.analysis.fits import fit_of
from autopar.analysis.padding_values import ZERO, PaddingValue, content, numbered, scores
from autopar.ir.program import Op, Program
from autopar.operators import OpSharding
from autopar.operators.rule import Dims


@dataclass(frozen=True, slots=True)
class PaddedDim:
    """The padded factor n within a dim of a value, which is `(left n right)`."""

    dim: int
    left: int = 1
    right: int = 1

    @property
    def all(self) -> bool:
        """Whether n is the whole dim."""
        return self.left == self.right == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingGroup:
    """Values that are padded together, from `size` elements; padded logits of the linear layers `masked` become -inf."""

    size: int
    places: Mapping[str, PaddedDim]
    masked: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Spot:
    """The padded factor n within a factor of an op, which is `(left n right)`."""

    factor: int
    left: int
    right: int


class GroupFinder:
    """Finds padding groups by following the rules of a program's ops."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.place = {op.name: i for i, op in enumerate(program.ops)}
        self.meets: dict[str, list[Op]] = {name: [] for name in program.values}  # the ops that read or make each value
        for op in program.ops:
            for name in dict.fromkeys((*op.operands, *(result.name for result in op.results))):
                self.meets[name].append(op)
        self.fit = functools.partial(fit_of, program)

    def places(self, name: str, dim: int) -> dict[str, PaddedDim]:
        """The dims tied to this one, by value; `strand` decides whether they form a padding group."""
        size = self.program.values[name].shape[dim]
        found, waiting = {name: PaddedDim(dim)}, [name]
        while waiting:
            for op in self.meets[waiting.pop()]:
                spot = self._spot(op, found, size)
                for other, place in self._tied(op, spot) if spot else ():
                    if other not in found:
                        found[other] = place
                        waiting.append(other)
        return found

    def strand(self, places: Mapping[str, PaddedDim], size: int) -> PaddingGroup | None:
        """The padding group of these dims; None if padding them would change results."""
        parameters = {parameter.value.name for parameter in self.program.parameters}
        if not all(name in parameters or name in self.program.producer for name in places):
            return None
        if any(output.value in places and places[output.value].left > 1 for output in self.program.outputs):
            return None
        names = {op.name for name in places for op in self.meets[name]}
        ops = [self.program.op[name] for name in sorted(names, key=self.place.__getitem__)]
        spots = {}
        for op in ops:
            spot = self._spot(op, places, size)
            if spot is None or dict(self._tied(op, spot)).items() - places.items() or self._twice(op, spot):
                return None
            spots[op.name] = spot
        for masked in (False, True):
            held = self._contents(ops, spots, places, masked)
            if held is not None:
                made = (op.name for op in ops if masked and scores(op, [held.get(name) for name in op.operands]))
                return PaddingGroup(size=size, places=places, masked=frozenset(made))
        return None

    def _contents(
        self, ops: Sequence[Op], spots: Mapping[str, _Spot], places: Mapping[str, PaddedDim], masked: bool
    ) -> dict[str, PaddingValue] | None:
        """What the padding of every value contains; None if it would change elements outside of the padding."""
        held = {name: ZERO for name in places if name not in self.program.producer}
        for op in ops:
            fitted, spot = self.fit(op.name), spots[op.name]
            inside = [held.get(name) for name in op.operands]
            made_up = masked and scores(op, inside) and (spot.left, spot.right) != (1, 1)  # the mask is appended to the bias
            if fitted is None or made_up or (numbered(op) and spot.left > 1):
                return None
            found = content(op, fitted, spot.factor, inside, masked=masked)
            if found is None:
                return None
            held.update((result.name, found) for result in op.results if result.name in places)
        return held

    def _spot(self, op: Op, places: Mapping[str, PaddedDim], size: int) -> _Spot | None:
        """The factor of an op that has the padded elements; None if several factors have them, or if they span several."""
        fitted = self.fit(op.name)
        found = {
            _inside(dims[places[name].dim], places[name], size, fitted)
            for name, dims in _tensors(op, fitted) if fitted and name in places
        } if fitted else set()  # fmt: skip
        return found.pop() if len(found) == 1 else None

    def _tied(self, op: Op, spot: _Spot) -> Iterator[tuple[str, PaddedDim]]:
        """The padded dim of every operand and result that has the factor."""
        fitted = self.fit(op.name)
        assert fitted is not None, "it has a factor"
        for name, dims in _tensors(op, fitted):
            for dim, parts in enumerate(dims):
                if spot.factor in parts:
                    place = parts.index(spot.factor)
                    left, right = (_product(some, fitted) for some in (parts[:place], parts[place + 1 :]))
                    yield name, PaddedDim(dim, left * spot.left, right * spot.right)

    def _twice(self, op: Op, spot: _Spot) -> bool:
        """Whether a tensor has the factor in several dims."""
        return any(sum(spot.factor in parts for parts in dims) > 1 for _, dims in _tensors(op, self.fit(op.name)))


def _inside(parts: tuple[int, ...], place: PaddedDim, size: int, fitted: OpSharding) -> _Spot | None:
    """The factor of a dim that contains the padded elements; None if no single factor does."""
    for i, factor in enumerate(parts):
        left, over = divmod(place.left, _product(parts[:i], fitted))
        right, beyond = divmod(place.right, _product(parts[i + 1 :], fitted))
        if not over and not beyond and left * size * right == fitted.factors[factor].size:
            return _Spot(factor, left, right)
    return None


def _product(factors: Sequence[int], fitted: OpSharding) -> int:
    return math.prod(fitted.factors[f].size for f in factors)


def _tensors(op: Op, fitted: OpSharding | None) -> Iterator[tuple[str, Dims]]:
    """Every operand and result with the factors of its dims."""
    if fitted:
        yield from zip(op.operands, fitted.operands, strict=True)
        yield from zip((result.name for result in op.results), fitted.results, strict=True)


__all__ = ["GroupFinder", "PaddedDim", "PaddingGroup"]
