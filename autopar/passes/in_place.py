"""Writes in place: buffers that are updated without a copy, such as the key-value cache of a decoder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir.program import Op, Program, Ref, aten
from autopar.operators import view_of, writes

COPIES = ("index_copy",)  # what replaces some elements of its first operand, and has a form that does so in place


def in_place(program: Program) -> Program:
    """Write elements directly into a buffer if nobody reads its old contents.

    c = clone(kept)
    n = index_copy(c, 2, i, x)
    y = use(n)                        ->      n = index_copy_(kept, 2, i, x)
    copy_(kept, n)                            y = use(n)

    The buffer changes in the next call, so nothing may keep its contents: neither a backward, nor an output.
    """
    if any(value.requires_grad for value in program.values.values()):
        return program
    readers: dict[str, list[Op]] = defaultdict(list)
    for op in program.ops:
        for name in dict.fromkeys(op.operands):
            readers[name].append(op)
    returned = _returned(program)
    changed: dict[str, Op | None] = {}
    for end in program.ops:
        found = _write(program, end, readers)
        if found is not None and found[1].name not in returned:
            clone, write = found
            here = Ref(end.operands[0])
            library, name, variant = write.target.split(".")
            changed |= {clone.name: None, end.name: None}
            changed[write.name] = replace(write, target=f"{library}.{name}_.{variant}", args=(here, *write.args[1:]))
    ops = (changed.get(op.name, op) for op in program.ops)
    return replace(program, ops=tuple(op for op in ops if op is not None)) if changed else program


def _write(program: Program, end: Op, readers: Mapping[str, Sequence[Op]]) -> tuple[Op, Op] | None:
    """The clone and the write of a buffer stored by `end`, if they have no other use."""
    if aten(end.target) != "copy_" or not writes(end):
        return None
    kept, last = end.operands
    write = program.producer.get(last)
    if write is None or aten(write.target) not in COPIES:
        return None
    clone = program.producer.get(write.operands[0])
    if clone is None or aten(clone.target) != "clone" or clone.operands != (kept,):
        return None
    alone = [op.name for op in readers[kept]] == [clone.name, end.name] and [op.name for op in readers[clone.name]] == [
        write.name
    ]
    return (clone, write) if alone and write.operands.count(clone.name) == 1 else None


def _returned(program: Program) -> set[str]:
    """The values whose memory an output may share."""
    found = {output.value for output in program.outputs}
    for op in reversed(program.ops):
        if view_of(op, program.values) and any(result.name in found for result in op.results):
            found.add(op.operands[0])
    return found
