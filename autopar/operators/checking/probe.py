"""Runs an operator on operands of other sizes and other values.

matmul (4, 4) x (4, 4)   ->   classes {x0.0}, {x0.1, x1.0}, {x1.1}; sizes 6, 10, 4
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from autopar.errors import RuleError
from autopar.ir.builder import Keywords
from autopar.ir.program import Argument, qualified
from autopar.operators.checking.sample_call import Example

OperandDim = tuple[int, int]  # an operand and one of its dims
Class = frozenset[OperandDim]  # dims that must have equal sizes
Sizes = Mapping[OperandDim, int]

SMALL = (6, 10, 4, 14, 9, 15, 8, 22, 21, 26)  # none is prime: each can be split twice
LARGE = 16  # sizes from here on are reduced before anything else is tried
TOGETHER = 3  # the most dims to resize with another one, before resizing all of its size


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Probe:
    """An operator as seen in one call, which can be run on operands of other sizes.

    Numbers are drawn with both signs if the operator accepts these, otherwise between the given numbers.
    """

    example: Example
    generator: torch.Generator
    double: bool = True
    signed: bool = True
    sizes: Sizes = field(default_factory=dict)  # sizes that differ from the call's own

    @staticmethod
    def of(example: Example) -> Probe:
        """Make the probe of a call; raises RuleError if the operator draws random numbers, or its results are not finite."""
        generator = torch.Generator().manual_seed(0)
        kinds = (
            Probe(example=example, generator=generator, double=double, signed=signed)
            for signed in (True, False) for double in (True, False)
        )  # fmt: skip
        probe, found = next(((one, run) for one in kinds if (run := one.run()) and _finite(run)), (None, None))
        if probe is None or found is None:
            raise RuleError(
                f"{qualified(example.op.target)} returns no finite numbers for random arguments like these",
                fix="arguments with random numbers of many values",
            )
        recompute = found.on(list(found.tensors.values()))
        if any(not torch.equal(one, two) for one, two in zip(found.results, recompute.results, strict=True)):
            raise RuleError(
                f"{qualified(example.op.target)} returns other results each time: a random operator cannot be probed",
                fix="write the rule by hand: autopar.register_rule",
            )
        return probe.small()

    def small(self) -> Probe:
        """A probe with large sizes reduced, equal ones to equal sizes, as far as the operator allows."""
        probe, known = self, {self.size(place) for place in self.places()}
        for size in sorted(known):
            if size >= LARGE:
                places = frozenset(place for place in self.places() if self.size(place) == size)
                least = probe.other(places, known)
                if least is not None and least < size:
                    probe = probe.resized(dict.fromkeys(places, least))
                    known = known | {least}
        return probe

    def shapes(self, sizes: Sizes | None = None) -> list[tuple[int, ...]]:
        """The shapes of the operands, some dims resized."""
        new = {**self.sizes, **(sizes or {})}
        tensors = self.example.tensors.values()
        return [tuple(new.get((i, d), size) for d, size in enumerate(x.shape)) for i, x in enumerate(tensors)]

    def places(self) -> list[OperandDim]:
        """Every dim of every operand; those of size 1 have no factor."""
        return [(i, d) for i, shape in enumerate(self.shapes()) for d, size in enumerate(shape) if size > 1]

    def size(self, place: OperandDim) -> int:
        """The size of a dim."""
        return self.shapes()[place[0]][place[1]]

    def resized(self, sizes: Sizes) -> Probe:
        """A probe whose operands have these sizes from the start."""
        return replace(self, sizes={**self.sizes, **sizes})

    def run(
        self,
        sizes: Sizes | None = None,
        *,
        scale: float = 1.0,
        arguments: tuple[tuple[Argument, ...], Keywords] | None = None,
    ) -> Example | None:
        """The call on newly drawn numbers, some dims resized, perhaps with other arguments; None if the operator refuses."""
        given = self.example.tensors.values()
        drawn = [self._draw(x, shape, scale) for x, shape in zip(given, self.shapes(sizes), strict=True)]
        try:
            return self.example.on(drawn, arguments)
        except RuleError:
            return None

    def _draw(self, like: torch.Tensor, shape: tuple[int, ...], scale: float) -> torch.Tensor:
        if like.is_complex() or (like.dtype.is_floating_point and self.signed):
            dtype = torch.promote_types(like.dtype, torch.float64) if self.double else like.dtype
            wide = torch.promote_types(dtype, torch.float32)
            return (torch.randn(shape, dtype=wide, generator=self.generator) * scale).to(dtype).to(like.device)
        flat = like.flatten().cpu()
        if not flat.numel():
            return like
        one, two = (flat[torch.randint(0, flat.numel(), shape, generator=self.generator)] for _ in range(2))
        if not like.dtype.is_floating_point:
            return one.to(like.device)
        between = torch.rand(shape, dtype=torch.float64, generator=self.generator)
        drawn = one.double() * between + two.double() * (1 - between)
        return (drawn if self.double else drawn.to(like.dtype)).to(like.device)

    def classes(self) -> list[Class]:
        """The smallest sets of dims that can only be resized together; a dim that cannot be resized is in none."""
        found: list[Class] = []
        places = self.places()
        for place in places:
            if any(place in one for one in found):
                continue
            others = [p for p in places if p != place and self.size(p) == self.size(place) and not any(p in c for c in found)]
            groups = (
                frozenset({place, *more})
                for count in (*range(min(TOGETHER, len(others)) + 1), len(others))
                for more in itertools.combinations(others, count)
            )
            if (group := next(filter(self.resizable, groups), None)) is not None:
                found.append(group)
        return found

    def resizable(self, group: Class) -> bool:
        """Whether these dims, of equal size, can be resized together."""
        size = self.size(min(group))
        others = [n for n in (size + 1, 2 * size, size + 2, 3 * size, size - 1) if n > 1]
        return any(self.run(dict.fromkeys(group, n)) is not None for n in others)

    def spread(self, classes: Sequence[Class]) -> Probe:
        """A probe in which every class has a size of its own, as far as the operator allows."""
        probe, taken = self, {self.size(place) for place in self.places() if not any(place in one for one in classes)}
        for one in classes:
            size = probe.other(one, taken)
            if size is not None:
                probe = probe.resized(dict.fromkeys(one, size))
            taken.add(probe.size(min(one)))
        return probe

    def other(self, one: Class, taken: set[int]) -> int | None:
        """A size for a class that is not taken yet; None if the operator accepts none."""
        size = self.size(min(one))
        for n in (*SMALL, *(size * k for k in range(1, 5))):
            if n not in taken and self.run(dict.fromkeys(one, n)) is not None:
                return n
        return None


def _finite(found: Example) -> bool:
    return all(bool(result.isfinite().all()) for result in found.results)


__all__ = ["Class", "OperandDim", "Probe"]
