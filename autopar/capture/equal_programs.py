"""Tests whether two programs compute the same, up to names and dead code, by value numbering from inputs to outputs."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.capture.equal_values import numbered
from autopar.ir.program import Op, Program
from autopar.operators import writes

Numbers = dict[str, int]


def same(one: Program, other: Program) -> bool:
    """Whether two programs of one model have equal outputs and writes, and draw as many random numbers for them."""
    known: Numbers = {}
    return _results(one, known) == _results(other, known)


def _results(program: Program, known: Numbers) -> tuple[list[tuple[str, int]], list[int]]:
    """The numbers of a program's results: its outputs by path, and what it writes."""
    ops = live(program)
    found = numbers(program, ops, known)
    written = [found[op.results[0].name] for op in ops if writes(op)]
    return [(output.path, found[output.value]) for output in program.outputs], written


def numbers(program: Program, ops: Iterable[Op], known: Numbers) -> Numbers:
    """The numbers of a program's values, for those that these ops compute: see `equal_values.numbered`."""
    given = [name for name in program.values if name not in program.producer]
    return numbered(given, ops, program.values, known)


def live(program: Program) -> list[Op]:
    """The ops that outputs and writes depend on, in order."""
    needed, found = {output.value for output in program.outputs}, list[Op]()
    for op in reversed(program.ops):
        if writes(op) or any(result.name in needed for result in op.results):
            needed.update(op.operands)
            found.append(op)
    return found[::-1]


__all__ = ["live", "numbers", "same"]
