"""A call: one op with its arguments bound to the names of its schema, and a pattern fitted to its shapes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.ir.program import Argument, Op, Value, overload, refs
from autopar.operators.notation import ALONE, ANY, Dim, Pattern, Term, Word, parse
from autopar.operators.rule import Dims, Factor, OpSharding

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaParameter:
    """One argument of a schema."""

    name: str
    default: Argument
    tensor: bool


@functools.cache
def parameters(target: str) -> tuple[SchemaParameter, ...]:
    """The arguments that a target takes, in schema order."""
    return tuple(
        SchemaParameter(
            name=a.name,
            default=tuple(a.default_value) if isinstance(a.default_value, list) else a.default_value,
            tensor="Tensor" in str(a.type),
        )
        for a in overload(target)._schema.arguments
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What one rank sees of a call: local shapes, and into how many parts each factor is split."""

    fitted: OpSharding
    operands: Sequence[Shape]
    results: Sequence[Shape]
    parts: Sequence[int]

    def split(self, name: str) -> int:
        """Into how many parts the factor of this name is split."""
        return math.prod(n for factor, n in zip(self.fitted.factors, self.parts, strict=True) if factor.name == name)


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
        given = dict(zip((p.name for p in parameters(op.target)), op.args, strict=False)) | dict(op.kwargs)
        order = list(given)  # Op.operands counts in this order
        count, positions = 0, {}
        for name in order:
            number = sum(1 for _ in refs(given[name]))
            positions[name] = range(count, count + number)
            count += number
        slots: list[tuple[str, int | None]] = []
        for parameter in parameters(op.target):
            if parameter.tensor:
                found = positions.get(parameter.name, range(0))
                slots += [(parameter.name, position) for position in found] or [(parameter.name, None)]
        return Call(
            op=op,
            arguments={p.name: given.get(p.name, p.default) for p in parameters(op.target)},
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
        """The groups as operand positions: absent arguments and zeros leave a group, any other number voids it."""
        found = []
        for group in groups:
            members = [position for name in group for position in self.positions(name)]
            numbers = [self.arguments.get(name) for name in group if not self.positions(name)]
            values = (*(self.operands[m] for m in members), *self.op.results)
            if members and all(n is None or n == 0 for n in numbers) and all(map(_continuous, values)):
                found.append(frozenset(members))
        return tuple(found)

    def change(self, changes: Mapping[str, Argument]) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
        """The op's args and kwargs with some of them changed, by name."""
        names = [p.name for p in parameters(self.op.target)]
        args = tuple(changes.get(name, given) for name, given in zip(names, self.op.args, strict=False))
        kwargs = {name: changes.get(name, given) for name, given in self.op.kwargs}
        kwargs |= {name: value for name, value in changes.items() if name not in names[: len(args)]}
        return args, tuple(kwargs.items())

    def fit(self, text: str, *, sizes: Mapping[str, int] | None = None, asks: str = "", random: bool = False) -> OpSharding:
        """A pattern fitted to the shapes. `sizes` of factors that no dim tells; `asks` is the side whose inner factors ask.

        Raises RuleError where pattern and shapes contradict each other.
        """
        pattern = parse(text)
        try:
            pairs = self._pairs(pattern)
            return _Fit(pairs=pairs, sizes=dict(sizes or {})).fitted(len(self.operands), asks, random)
        except _Misfit as misfit:
            raise RuleError(
                f"the rule of {self.op.target} does not fit its op {self.op.name}",
                rule=pattern,
                shapes=f"{_shapes(self.operands)} -> {_shapes(self.op.results)}",
                why=misfit,
                at=self.op.source,
                fix="give the operator a rule that names every dim of every tensor",
            ) from None

    def _pairs(self, pattern: Pattern) -> list[tuple[str, int, Term, Shape]]:
        """(side, position, term, shape) of every tensor, in the order of the text; absent optional operands are dropped."""
        slots = [position for _, position in self.slots]
        if len(pattern.operands) != len(slots):
            slots = [position for position in slots if position is not None]
        if len(pattern.operands) != len(slots):
            raise _Misfit(f"it names {len(pattern.operands)} operands, the op has {len(slots)}")
        if len(pattern.results) != len(self.op.results):
            raise _Misfit(f"it names {len(pattern.results)} results, the op has {len(self.op.results)}")
        given = zip(pattern.operands, slots, strict=True)
        results = enumerate(zip(pattern.results, self.op.results, strict=True))
        return [
            *(("operand", position, term, self.operands[position].shape) for term, position in given if position is not None),
            *(("result", i, term, value.shape) for i, (term, value) in results),
        ]


class _Misfit(Exception):
    """Why a pattern does not fit; always turned into a RuleError."""


def _shapes(values: Sequence[Value]) -> str:
    return ", ".join(str(value.shape) for value in values)


def _continuous(value: Value) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


class _Fit:
    """One pattern laid over one set of shapes."""

    def __init__(self, *, pairs: list[tuple[str, int, Term, Shape]], sizes: dict[str, int]) -> None:
        self.tensors = [(side, p, term, list(_dims(term, shape))) for side, p, term, shape in pairs]
        self.sizes = sizes
        self.whole = {w.name for *_, dims in self.tensors for dim, _ in dims for w in dim if w.whole}
        self._solve()

    def _solve(self) -> None:
        """Find the size of every factor: a dim with one unknown factor tells it."""
        waiting = [(dim, size) for *_, dims in self.tensors for dim, size in dims if size != 1 and dim != ALONE_DIM]
        while waiting:
            left = []
            for dim, size in waiting:
                unknown = [word.name for word in dim if word.name not in self.sizes]
                if len(unknown) > 1:
                    left.append((dim, size))
                    continue
                known = math.prod(self.sizes[word.name] for word in dim if word.name in self.sizes)
                if unknown:
                    self.sizes[unknown[0]] = size // known if known else 0
                    known *= self.sizes[unknown[0]]
                if known != size:
                    raise _Misfit(f"({' '.join(w.name for w in dim)}) has size {size}, but {known} elsewhere")
            if len(left) == len(waiting):
                raise _Misfit(f"the sizes of the factors of ({' '.join(w.name for w in left[0][0])}) are unknown")
            waiting = left

    def fitted(self, operands: int, asks: str, random: bool) -> OpSharding:
        factors: list[Factor] = []
        index: dict[str, int] = {}

        def factor(word: Word, size: int) -> Iterator[int]:
            if word.name == ALONE:
                factors.append(Factor(name=ALONE, size=size, whole=True))
                yield len(factors) - 1
            elif self.sizes[word.name] != 1:
                if word.name not in index:
                    index[word.name] = len(factors)
                    size = self.sizes[word.name]
                    factors.append(Factor(name=word.name, size=size, whole=word.name in self.whole or size == 0))
                yield index[word.name]

        found: dict[str, dict[int, Dims]] = {"operand": {}, "result": {}}
        for side, position, _, dims in self.tensors:
            found[side][position] = tuple(
                tuple(f for word in dim for f in factor(word, size)) if size != 1 else () for dim, size in dims
            )
        return OpSharding(
            factors=tuple(factors),
            operands=tuple(found["operand"][i] for i in range(operands)),
            results=tuple(found["result"][i] for i in sorted(found["result"])),
            added=frozenset(p for side, p, term, _ in self.tensors if side == "operand" and term.added),
            asks=tuple(
                (asks, position, d, f)
                for position, dims in sorted(found[asks].items())
                for d, dim in enumerate(dims)
                for f in dim[1:]
                if not factors[f].whole
            )
            if asks
            else (),
            random=random,
        )


ALONE_DIM: Dim = (Word(ALONE, whole=True),)


def _dims(term: Term, shape: Shape) -> Iterator[tuple[Dim, int]]:
    """(words, size) per dim of a shape, with `...` written out as factors counted from the right."""
    fixed = sum(1 for dim in term.dims if dim[0].name != ANY)
    free = len(shape) - fixed
    if free < 0 or (free > 0 and fixed == len(term.dims)):
        raise _Misfit(f'"{term}" names {fixed} dims, a tensor has {len(shape)}')
    place = 0
    for dim in term.dims:
        if dim[0].name != ANY:
            yield dim, shape[place]
            place += 1
            continue
        for right in reversed(range(free)):
            yield (Word(f"{ANY}{right}", dim[0].whole),), shape[place]
            place += 1
