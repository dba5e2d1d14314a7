"""Whether two programs compute the same, up to names and to what no result needs: value numbering from inputs to outputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.ir.program import Argument, Op, Program, Ref, Static, overload, substitute
from autopar.operators import row_of, writes
from autopar.operators.facts import OpKind

Numbers = dict[str, int]  # of texts that say how values are computed


def same(one: Program, other: Program) -> bool:
    """Whether two programs of one model have the same outputs, write the same, and draw as many random numbers for them."""
    known: Numbers = {}
    return _results(one, known) == _results(other, known)


def _results(program: Program, known: Numbers) -> tuple[list[tuple[str, int]], list[int]]:
    """The numbers of what leaves a program: its outputs by path, and what is written."""
    ops = live(program)
    found = numbered(program, ops, known)
    written = [found[op.results[0].name] for op in ops if writes(op)]
    return [(output.path, found[output.value]) for output in program.outputs], written


def numbered(program: Program, ops: Iterable[Op], known: Numbers) -> dict[str, int]:
    """A number for each value, equal where ops compute the same of the same; each draw of random numbers has its own."""
    found = {name: known.setdefault(f"given {name}", len(known)) for name in program.values if name not in program.producer}
    drawn, roots = 0, dict[str, str]()

    def number(leaf: Ref | Static) -> Argument:
        return Ref(str(found[leaf.name])) if isinstance(leaf, Ref) else leaf

    for op in ops:
        keywords = [(name, substitute(argument, number)) for name, argument in op.kwargs]
        formula = f"{op.target} {substitute(op.args, number)} {keywords}"
        if torch.Tag.nondeterministic_seeded in overload(op.target).tags:
            formula, drawn = f"{formula} draw {drawn}", drawn + 1
        if row_of(op).kind is OpKind.RESHAPE:  # there and back is nothing
            (before,), (result,) = op.operands[:1], op.results
            roots[result.name] = root = roots.get(before, before)
            if result.shape == program.values[root].shape:
                found[result.name] = found[root]
                continue
            formula = f"reshaped {found[root]} {result.shape}"
        for place, result in enumerate(op.results):
            found[result.name] = known.setdefault(f"{formula} {place}", len(known))
    return found


def live(program: Program) -> list[Op]:
    """The ops that outputs and writes depend on, in order."""
    needed, live = {output.value for output in program.outputs}, list[Op]()
    for op in reversed(program.ops):
        if writes(op) or any(result.name in needed for result in op.results):
            needed.update(op.operands)
            live.append(op)
    return live[::-1]


__all__ = ["live", "numbered", "same"]
