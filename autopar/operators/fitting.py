"""Laying a pattern over the shapes of one call: which factors each dim has, and their sizes.

    "... k, n k -> ... n"  over  (2, 4, 6), (10, 6) -> (2, 4, 10)   =   ...1 ...0 k, n k -> ...1 ...0 n

1. Dims that a tensor may lack are there or not, the rightmost first.
2. `...` are written out: numbered from the right, or by place if an argument names some of the dims.
3. A dim with one factor of unknown size tells that size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.layout import Shape
from autopar.operators.notation import ALL_ALONE, ALONE, ANY, Dim, Pattern, PatternTerm, Word
from autopar.operators.rule import Dims, Factor, OpSharding

DimWords = tuple[Word, ...]
ALONE_DIM: DimWords = (Word(ALONE, whole=True),)


class Misfit(Exception):
    """Why a pattern does not fit; always turned into a RuleError."""


@dataclass(frozen=True, slots=True)
class TensorTerm:
    """One operand or result of a call, with its part of the pattern."""

    side: str  # "operand" or "result"
    position: int
    term: PatternTerm
    shape: Shape

    @property
    def free(self) -> int:
        """How many dims `...` stand for, named ones included."""
        return len(self.shape) - sum(not dim.open for dim in self.term.dims)


def fitted(
    pattern: Pattern,
    tensors: Sequence[TensorTerm],
    argument: Callable[[str], tuple[int, ...] | None],
    sizes: Mapping[str, int],
    *,
    asks: str,
    random: bool,
) -> OpSharding:
    """The factors of every dim. `argument` gives static arguments, `sizes` those of factors that no dim tells.

    Raises Misfit where pattern and shapes contradict each other.
    """
    known = {name: _listed(argument, name) for name in pattern.arguments}
    sizes = {**sizes, **{word.name: math.prod(known[word.size]) for word in pattern.words if word.size}}
    tensors = list(_without_lacking(tensors)) if pattern.lacks else tensors
    named = _NamedDims.of(tensors, known) if known else None
    written = [(tensor, list(zip(_written(tensor, named), tensor.shape, strict=True))) for tensor in tensors]
    return _sharding(pattern.text, written, _solved(written, sizes), asks=asks, random=random)


def _listed(argument: Callable[[str], tuple[int, ...] | None], name: str) -> tuple[int, ...]:
    found = argument(name)
    if found is None:
        raise Misfit(f"the op has no argument {name!r}")
    return found


def _without_lacking(tensors: Sequence[TensorTerm]) -> Iterator[TensorTerm]:
    """The tensors without the dims in brackets that they lack; results lack what all operands lack."""
    asked: set[str] = set()
    there: set[str] = set()
    for tensor in tensors:
        gone = asked - there if tensor.side == "result" else set()
        dims = [dim for dim in tensor.term.dims if not dim.optional or _name(dim) not in gone]
        missing = max(0, sum(not dim.open for dim in dims) - len(tensor.shape))
        free = [dim for dim in dims if dim.optional and not dim.open and (tensor.side == "operand" or _name(dim) not in there)]
        kept = tuple(dim for dim in dims if dim not in free[:missing])
        if tensor.side == "operand":
            asked |= {_name(dim) for dim in dims if dim.optional}
            there |= {_name(dim) for dim in kept if dim.optional}
        yield tensor if kept == tensor.term.dims else replace(tensor, term=replace(tensor.term, dims=kept))


def _name(dim: Dim) -> str:
    return dim.words[0].name


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedDims:
    """The dims that arguments name, by their places in the largest tensor that has an `@`."""

    rank: int
    places: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(tensors: Sequence[TensorTerm], known: Mapping[str, tuple[int, ...]]) -> _NamedDims | None:
        """Find the named dims; None if no argument names a dim."""
        holders = [tensor for tensor in tensors if tensor.term.named]
        if not holders:
            return None
        rank = max(tensor.free for tensor in holders)
        names = dict.fromkeys(word.at for tensor in holders for word in tensor.term.named)
        every = tuple(range(rank))
        places = {name: tuple(sorted({d % rank for d in known[name]})) if rank and known[name] else every for name in names}
        return _NamedDims(rank=rank, places=places)

    def words(self, tensor: TensorTerm) -> Iterator[Word]:
        """The words for the open dims of a tensor."""
        rest = next(dim.words[0] for dim in tensor.term.dims if dim.open)
        found: dict[int, Word] = {}
        for word in tensor.term.named:
            for number, place in enumerate(self.places[word.at]):
                if place in found:
                    raise Misfit(f"two arguments name dim {place}: {', '.join(map(str, tensor.term.named))}")
                several = word.name.isalnum() and len(self.places[word.at]) > 1
                found[place] = Word(f"{word.name}{number}" if several else word.name or f"d{place}", word.whole)
        places = list(range(self.rank))
        if not tensor.term.named:
            gone = {place for places in self.places.values() for place in places}
            kept = tensor.free == self.rank and sum(dim.open for dim in tensor.term.dims) > 1
            found = dict.fromkeys(gone, ALONE_DIM[0]) if kept else {}
            places = [place for place in places if kept or place not in gone]
        if tensor.free > len(places):
            raise Misfit(f'"{tensor.term}" leaves {len(places)} dims that no argument names, a tensor has {len(tensor.shape)}')
        return (found.get(place, Word(f"d{place}", rest.whole)) for place in places[len(places) - tensor.free :])


def _written(tensor: TensorTerm, named: _NamedDims | None) -> Iterator[DimWords]:
    """The words of every dim, with `...` written out."""
    dims = tensor.term.dims
    open_ = [i for i, dim in enumerate(dims) if dim.open]
    free = len(tensor.shape) - len(dims) + len(open_)
    if free < 0 or (free and not open_):
        raise Misfit(f'"{tensor.term}" names {len(dims) - len(open_)} dims, a tensor has {len(tensor.shape)}')
    first, last = (open_[0], open_[-1] + 1) if open_ else (len(dims), len(dims))
    yield from (dim.words for dim in dims[:first])
    if open_ and dims[first].words[0].name == ALL_ALONE:
        yield from (ALONE_DIM for _ in range(free))
    elif open_ and named is not None:
        yield from ((word,) for word in named.words(tensor))
    elif open_:
        whole = dims[first].words[0].whole
        yield from ((_numbered(right, whole),) for right in reversed(range(free)))
    yield from (dim.words for dim in dims[last:])


@functools.cache
def _numbered(right: int, whole: bool) -> Word:
    return Word(f"{ANY}{right}", whole)


Written = Sequence[tuple[TensorTerm, Sequence[tuple[DimWords, int]]]]


def _solved(written: Written, sizes: Mapping[str, int]) -> dict[str, int]:
    """The size of every factor: a dim with one unknown factor tells it."""
    found = dict(sizes)
    waiting = [(words, size) for _, dims in written for words, size in dims if size != 1 and words != ALONE_DIM]
    while waiting:
        left = []
        for words, size in waiting:
            unknown = [word.name for word in words if word.name not in found]
            if len(unknown) > 1:
                left.append((words, size))
                continue
            known = math.prod(found[word.name] for word in words if word.name in found)
            if unknown:
                found[unknown[0]] = size // known if known else 0
                known *= found[unknown[0]]
            if known != size:
                raise Misfit(f"({' '.join(w.name for w in words)}) has size {size}, but {known} elsewhere")
        if len(left) == len(waiting):
            raise Misfit(f"the sizes of the factors of ({' '.join(w.name for w in left[0][0])}) are unknown")
        waiting = left
    return found


def _sharding(text: str, written: Written, sizes: Mapping[str, int], *, asks: str, random: bool) -> OpSharding:
    factors: list[Factor] = []
    index: dict[str, int] = {}
    whole = {word.name for _, dims in written for words, _ in dims for word in words if word.whole}

    def factor(word: Word, size: int) -> Iterator[int]:
        if word.name == ALONE:
            factors.append(Factor(name=ALONE, size=size, whole=True))
            yield len(factors) - 1
        elif sizes[word.name] != 1:
            if word.name not in index:
                index[word.name] = len(factors)
                size = sizes[word.name]
                factors.append(Factor(name=word.name, size=size, whole=word.name in whole or size == 0))
            yield index[word.name]

    found: dict[str, dict[int, Dims]] = {"operand": {}, "result": {}}
    for tensor, dims in written:
        found[tensor.side][tensor.position] = tuple(
            tuple(f for word in words for f in factor(word, size)) if size != 1 else () for words, size in dims
        )
    return OpSharding(
        factors=tuple(factors),
        operands=tuple(dims for _, dims in sorted(found["operand"].items())),
        results=tuple(dims for _, dims in sorted(found["result"].items())),
        added=frozenset(tensor.position for tensor, _ in written if tensor.side == "operand" and tensor.term.added),
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
        text=text,
    )
