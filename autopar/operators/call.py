"""A call: one op with its arguments bound to the names of its schema, and a pattern fitted to its shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.errors import RuleError
from autopar.ir.layout import Shape
from autopar.ir.program import Argument, Op, Value, refs
from autopar.ir.schema import bound, given, parameters
from autopar.operators.fitting import Misfit, TensorTerm, fitted
from autopar.operators.notation import Pattern, parse
from autopar.operators.rule import OpSharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """A call as seen by one rank: local shapes, and into how many parts each factor is split."""

    fitted: OpSharding
    operands: Sequence[Shape]
    results: Sequence[Shape]
    parts: Sequence[int]

    def split(self, name: str) -> int:
        """Into how many parts the factor of this name is split."""
        return math.prod(n for factor, n in zip(self.fitted.factors, self.parts, strict=True) if factor.name == name)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each factor on this rank, from a dim that consists of it alone; the whole size if there is none."""
        found: dict[int, int] = {}
        tensors = zip((*self.operands, *self.results), (*self.fitted.operands, *self.fitted.results), strict=True)
        for shape, dims in tensors:
            found |= {dim[0]: size for size, dim in zip(shape, dims, strict=True) if len(dim) == 1}
        return tuple(found.get(f, factor.size) for f, factor in enumerate(self.fitted.factors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An op, its arguments by name, and which tensor operands stand in which argument."""

    op: Op
    arguments: Mapping[str, Argument]
    slots: tuple[tuple[str, int | None], ...]  # (argument, operand position), schema order; None where it is absent
    operands: tuple[Value, ...]  # in the order of Op.operands; empty where global shapes are not at hand

    @staticmethod
    def of(op: Op, values: Mapping[str, Value] | None = None) -> Call:
        """Bind an op's arguments; `values` gives the operands."""
        count, positions = 0, {}
        for name, argument in given(op).items():
            number = sum(1 for _ in refs(argument))
            positions[name] = range(count, count + number)
            count += number
        slots: list[tuple[str, int | None]] = []
        for parameter in parameters(op.target):
            if parameter.tensor:
                found = positions.get(parameter.name, range(0))
                slots += [(parameter.name, position) for position in found] or [(parameter.name, None)]
        return Call(
            op=op,
            arguments=bound(op),
            slots=tuple(slots),
            operands=tuple(values[name] for name in op.operands) if values is not None else (),
        )

    def positions(self, name: str) -> tuple[int, ...]:
        """The operand positions that stand in an argument."""
        return tuple(position for slot, position in self.slots if slot == name and position is not None)

    def shape(self, name: str) -> Shape:
        """The global shape of the tensor in an argument; () for a number."""
        found = self.positions(name)
        return self.operands[found[0]].shape if found else ()

    def rank(self, name: str) -> int:
        """The number of dims of the tensor in an argument."""
        return len(self.shape(name))

    @property
    def result(self) -> Shape:
        """The global shape of the first result."""
        return self.op.results[0].shape

    def number(self, name: str, default: int = 0) -> int:
        """A static integer argument."""
        value = self.arguments.get(name)
        return value if isinstance(value, int) else default

    def numbers(self, name: str) -> tuple[int, ...]:
        """A static list of integers (one integer stands for a list of one, None for an empty one)."""
        value = self.arguments.get(name)
        if isinstance(value, tuple):
            return tuple(n for n in value if isinstance(n, int))
        return (value,) if isinstance(value, int) else ()

    @property
    def continuous(self) -> bool:
        """Whether every operand and result has a floating-point or complex dtype."""
        return all(map(_continuous, (*self.operands, *self.op.results)))

    def linear(self, groups: Sequence[Sequence[str]]) -> tuple[frozenset[int], ...]:
        """The groups as operand positions: absent arguments and zeros leave a group, any other number voids it.

        Members may be whole numbers, but for booleans, if results are neither rounded to such nor of a dtype of two bytes.
        """
        found = []
        for group in groups:
            members = [position for name in group for position in self.positions(name)]
            numbers = [self.arguments.get(name) for name in group if not self.positions(name)]
            dtypes = {self.operands[m].dtype for m in members}
            exact = torch.bool not in dtypes and all(result.dtype.itemsize > 2 for result in self.op.results)
            added = all(map(_continuous, self.op.results)) and (exact or all(map(_floating, dtypes)))
            if members and added and all(n is None or n == 0 for n in numbers):
                found.append(frozenset(members))
        return tuple(found)

    def change(self, changes: Mapping[str, Argument]) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
        """The op's args and kwargs with some of them changed, by name."""
        names = [p.name for p in parameters(self.op.target)]
        args = tuple(changes.get(name, old) for name, old in zip(names, self.op.args, strict=False))
        kwargs = {name: changes.get(name, old) for name, old in self.op.kwargs}
        kwargs |= {name: value for name, value in changes.items() if name not in names[: len(args)]}
        return args, tuple(kwargs.items())

    def fit(self, text: str, *, sizes: Mapping[str, int] | None = None, asks: str = "", random: bool = False) -> OpSharding:
        """A pattern fitted to the shapes. `sizes` of factors that no dim tells; `asks` is the side whose inner factors ask.

        Raises RuleError if pattern and shapes contradict each other.
        """
        pattern = parse(text)
        try:
            return fitted(pattern, self._tensors(pattern), self.listed, sizes or {}, asks=asks, random=random)
        except Misfit as misfit:
            raise RuleError(
                f"the rule of {self.op.target} does not fit its op {self.op.name}",
                rule=pattern,
                shapes=f"{_shapes(self.operands)} -> {_shapes(self.op.results)}",
                why=misfit,
                at=self.op.source,
                fix="give the operator a rule that names every dim of every tensor",
            ) from None

    def listed(self, name: str) -> tuple[int, ...] | None:
        """A static argument by which a pattern places or sizes factors; None if the op has no such argument."""
        return self.numbers(name) if name in self.arguments else None

    def _tensors(self, pattern: Pattern) -> list[TensorTerm]:
        """Every tensor with its term, in the order of the text; absent optional operands are dropped."""
        slots = [position for _, position in self.slots]
        if len(pattern.operands) != len(slots):
            slots = [position for position in slots if position is not None]
        if len(pattern.operands) != len(slots):
            raise Misfit(f"it names {len(pattern.operands)} operands, the op has {len(slots)}")
        if len(pattern.results) != len(self.op.results):
            raise Misfit(f"it names {len(pattern.results)} results, the op has {len(self.op.results)}")
        operands = zip(pattern.operands, slots, strict=True)
        results = enumerate(zip(pattern.results, self.op.results, strict=True))
        return [
            *(TensorTerm("operand", at, term, self.operands[at].shape) for term, at in operands if at is not None),
            *(TensorTerm("result", at, term, value.shape) for at, (term, value) in results),
        ]


def _shapes(values: Sequence[Value]) -> str:
    return ", ".join(str(value.shape) for value in values)


def _continuous(value: Value) -> bool:
    return _floating(value.dtype)


def _floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
