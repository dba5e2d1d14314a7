"""An op together with the facts about its operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.ir.layout import Shape
from autopar.ir.program import Argument, Op, Ref, Value
from autopar.operators.index_facts import affine
from autopar.operators.index_facts.affine import Affine, Fact, Formula, Select

Number = int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCall:
    """An op together with the facts about its operands; `named` has its arguments by name."""

    op: Op
    values: Mapping[str, Value]
    known: Mapping[str, Fact]
    named: Mapping[str, Argument]

    @property
    def shape(self) -> Shape:
        return self.op.results[0].shape

    @property
    def whole(self) -> bool:
        return not self.op.results[0].dtype.is_floating_point

    def size(self, name: str = "self") -> Shape:
        """The shape of an operand."""
        operand = self.named[name]
        return self.values[operand.name].shape if isinstance(operand, Ref) else ()

    def fact(self, name: str = "self") -> Fact | None:
        """The fact about an operand over its own shape."""
        return self._of(self.named[name])

    def wide(self, argument: Argument) -> Fact | None:
        """The fact about an operand broadcast to the result's shape."""
        fact = self._of(argument)
        if fact is None or not isinstance(argument, Ref):
            return affine.constant(fact.base, len(self.shape)) if isinstance(fact, Affine) else fact
        return affine.moved(fact, _broadcast(self.values[argument.name].shape, self.shape), self.shape)

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        found = self.named[name]
        assert isinstance(found, int)
        return found % (len(self.shape) if rank is None else rank)

    def wholenumber(self, name: str) -> int | None:
        found = self.named.get(name)
        return found if isinstance(found, int) else None

    def _of(self, argument: Argument) -> Fact | None:
        if isinstance(argument, Ref):
            return self.known.get(argument.name)
        if isinstance(argument, bool):
            return argument
        return affine.constant(argument, 0) if isinstance(argument, (int, float)) else None


FactRule = Callable[[IndexCall], Fact | None]


def formula(fact: Fact | None, shape: Shape) -> Formula | None:
    """Where a value is true; a number counts as true where it is not 0."""
    return affine.truth(fact, bool, shape) if isinstance(fact, (Affine, Select)) else fact


def number(fact: Fact | None, shape: Shape) -> Affine | Select | None:
    """A value as a number; a truth value is 1 or 0."""
    return fact if fact is None or isinstance(fact, (Affine, Select)) else affine.chosen(fact, 1, 0, len(shape))


def _broadcast(inner: Shape, outer: Shape) -> list[Affine]:
    ahead, rank = len(outer) - len(inner), len(outer)
    return [affine.coordinate(ahead + d, rank, step=1 if size > 1 else 0) for d, size in enumerate(inner)]
