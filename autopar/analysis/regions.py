"""Regions: segments of a program for activation checkpointing, which recompute their values independently.

    h.0: ln attn add ln mlp add        a region
    h.1: ln attn add ln mlp add        a region, whose backward may recompute ops of h.1, but none of h.0

Values passed between regions are kept if the backward needs them, so a chain of recomputed values, all alive at once, never
reaches beyond its region. A region has the ops of one block, or of as many blocks in a row as it takes for two matrix products.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from autopar.analysis.block_names import PRODUCTS, block_names
from autopar.ir.program import Program
from autopar.operators import row_of, view_of


def regions(program: Program) -> list[int]:
    """For each op the index of the last op of its region."""
    starts, products, before, names = [0], 0, "", block_names(program)
    for i, op in enumerate(program.ops):
        block = names.of(op.name)
        if block != before and products >= PRODUCTS:
            starts.append(i)
            products = 0
        products += row_of(op).contracts
        before = block
    ends = [*starts[1:], len(program.ops)]
    return [end - 1 for start, end in zip(starts, ends, strict=True) for _ in range(start, end)]


def inner(program: Program, ends: Sequence[Hashable]) -> frozenset[str]:
    """The ops whose results, and views of them, are used only within their region; `ends` has each op's region."""
    place = {op.name: i for i, op in enumerate(program.ops)}
    leaves = {output.value for output in program.outputs}
    for i in reversed(range(len(program.ops))):
        op = program.ops[i]
        across = any(r.name in leaves for r in op.results) and view_of(op, program.values)
        for position, name in enumerate(op.operands):
            maker = program.producer.get(name)
            if maker is not None and (ends[place[maker.name]] != ends[i] or (across and position == 0)):
                leaves.add(name)
    return frozenset(op.name for op in program.ops if not any(result.name in leaves for result in op.results))


__all__ = ["inner", "regions"]
