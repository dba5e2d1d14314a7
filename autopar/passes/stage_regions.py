"""The regions of a program between which it may be cut into pipeline stages.

    h.0: ln attn add | ln mlp add      two regions: between them one value passes, as between blocks
    h.1: ln attn add | ln mlp add

They are those of `analysis.regions`, which end with blocks, cut further

    before a parameter that the region has read      a module that runs again, as the only layer of ALBERT does
    between two matrix products                      where no more bytes pass than where the region begins or ends

so that stages are more balanced than whole blocks allow: with 32 blocks, and a head nearly as expensive as two, four ranks have
about 8 1/2 blocks each. `fine_starts` cuts between any two matrix products. No cut separates the reader and the writer of a
buffer, which must be in one stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from autopar.analysis.fits import fit_of
from autopar.analysis.recomputability import is_random
from autopar.analysis.regions import regions
from autopar.analysis.weights import weights
from autopar.ir.device import Bytes
from autopar.ir.program import Op, Program, remembered
from autopar.operators import row_of, writes
from autopar.passes.microbatches import AHEAD


@remembered
def stage_starts(program: Program) -> tuple[int, ...]:
    """The index of each region's first op. It may differ for other sizes."""
    ends, passing = frozenset(regions(program)), passing_bytes(program)
    wide = sorted({0, *(end + 1 for end in ends), *_read_again(program, ends, passing)})
    narrow = (place for first, stop in itertools.pairwise(wide) for place in _narrow(program, first, stop, passing))
    return tuple(sorted({*wide[:-1], *narrow} - of_one_stage(program)))


@remembered
def fine_starts(program: Program) -> tuple[int, ...]:
    """The places where a stage can begin if it may receive more bytes: also where the fewest bytes pass between any two matrix
    products of a region.
    """
    starts = stage_starts(program)
    between = (_between(program, first, stop) for first, stop in itertools.pairwise((*starts, len(program.ops))))
    return tuple(sorted({*starts, *itertools.chain.from_iterable(between)} - of_one_stage(program)))


@remembered
def of_one_stage(program: Program) -> frozenset[int]:
    """The places behind ops that read a buffer, or what it held before a step, up to the op that writes it."""
    found: set[int] = set()
    readers: dict[str, int] = {}
    for place, op in enumerate(program.ops):
        for name in op.operands:
            readers.setdefault(name, place)
        for name in writes(op):
            held = {name, *(above for above in _above(program, op) if above.startswith(AHEAD))}
            found.update(range(min(readers[one] for one in held) + 1, place + 1))
    return frozenset(found)


def _above(program: Program, op: Op) -> set[str]:
    """The values that an op depends on."""
    found, left = set(op.operands), [*op.operands]
    while left:
        producer = program.producer.get(left.pop())
        more = set(producer.operands) - found if producer else set[str]()
        found |= more
        left += more
    return found


def _read_again(program: Program, ends: Collection[int], passing: Sequence[Bytes]) -> Iterator[int]:
    """The places before ops that read a parameter again in a region, behind two matrix products of it, the last of which they
    follow where the fewest bytes pass; `ends` has the last op of each region."""
    stored, derived = {held.value.name: held.value.name for held in program.parameters}, weights(program)
    read, products, behind = set[str](), 0, 0
    for place, op in enumerate(program.ops):
        own = {stored[name] for name in op.operands if name in stored}
        if derived.issuperset(result.name for result in op.results):
            stored |= {result.name: stored[op.operands[0]] for result in op.results}  # a view or a cast, which reads nothing
            continue
        if own & read and products >= 2:
            yield min(range(place, behind - 1, -1), key=passing.__getitem__)
            read, products = set(), 0
        read |= own
        if row_of(op).contracts:
            products, behind = products + 1, place + 1
        if place in ends:
            read, products = set(), 0


def _narrow(program: Program, first: int, stop: int, passing: Sequence[Bytes]) -> Iterator[int]:
    """The places between two matrix products of these ops where no more bytes pass than where they begin or end, if they do so
    within the program; all of them where they are the whole program."""
    most = max(passing[place] for place in (first, stop) if place < len(program.ops))
    if (first, stop) == (0, len(program.ops)):
        most = max(passing)
    yield from (place for place in _between(program, first, stop) if passing[place] <= most)


def _between(program: Program, first: int, stop: int) -> Iterator[int]:
    """The places between two matrix products of these ops where the fewest bytes pass."""
    passing = passing_bytes(program)
    products = [place for place in range(first, stop) if row_of(program.ops[place]).contracts]
    for before, after in itertools.pairwise(products):
        yield min(range(after, before, -1), key=passing.__getitem__)


@remembered
def passing_bytes(program: Program, *, back: bool = False) -> list[Bytes]:
    """For each op, how many bytes a stage that begins there receives from the previous one; or sends `back`, as gradients."""
    again, last = made_again(program), dict[str, int]()
    for place, op in enumerate(program.ops):
        if op.name not in again:
            last |= dict.fromkeys(op.operands, place)
    last |= {output.value: len(program.ops) for output in program.outputs}
    change = [0] * (len(program.ops) + 1)
    for place, op in enumerate(program.ops):
        for result in op.results if op.name not in again else ():
            if (until := last.get(result.name, 0)) > place and (result.requires_grad or not back):
                change[place + 1] += result.bytes
                if until < len(program.ops):
                    change[until + 1] -= result.bytes
    return list(itertools.accumulate(change))


@remembered
def made_again(program: Program) -> frozenset[str]:
    """The ops that a stage runs for itself if it needs them: their results are not sent.

    They make views and casts of parameters, or depend only on inputs and buffers, draw and write nothing and have no gradient.
    All of the latter count, whatever their cost: ops that read no parameter make masks, positions and counts from inputs in
    less time than a message takes.
    """
    derived, found = weights(program), set()
    written = {name for op in program.ops for name in writes(op)}
    certain = {value.name for value in program.inputs if not value.requires_grad}
    certain |= {held.value.name for held in program.buffers if held.value.name not in written}
    for op in program.ops:
        if op.operands and derived.issuperset(result.name for result in op.results):
            found.add(op.name)
        elif certain.issuperset(op.operands) and not (
            op.requires_grad or writes(op) or is_random(op, fit_of(program, op.name))
        ):
            found.add(op.name)
            certain.update(result.name for result in op.results)
    return frozenset(found)


__all__ = ["fine_starts", "made_again", "of_one_stage", "passing_bytes", "stage_starts"]
