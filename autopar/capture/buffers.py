"""Buffers that forward writes: running means, queues, counts of calls.

Inside the program, their new contents are ordinary values; each buffer is written in memory once its final value is known.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.capture import functionalize
from autopar.capture.functionalize import Handle
from autopar.ir.builder import Builder
from autopar.ir.program import Ref, with_operands

OWNER = "the buffer "  # prefix of the `owner` of a buffer's storage, before its name


def keep(builder: Builder, given: Iterable[Handle]) -> None:
    """Store the final values of the buffers among `given`; earlier readers of a buffer, and their backward, get a copy of it.

    y = mul(x, kept)                c = clone(kept)
    k = add(kept, 1)         ->     y = mul(x, c)
    z = exp(y)                      k = add(c, 1)
                                    copy_(kept, k)
                                    z = exp(y)
    """
    owned = (handle for handle in given if handle.storage.version and handle.storage.owner.startswith(OWNER))
    last = {Ref(handle.storage.owner.removeprefix(OWNER)): functionalize.read(handle) for handle in owned}
    read = {name for op in builder.ops for name in op.operands} | {ref.name for ref in last.values()}
    before: dict[Ref, Ref] = {}
    ops = [*builder.ops]
    for buffer in last:
        if buffer.name in read:
            (before[buffer],) = builder.emit("aten.clone.default", (buffer,), module=_module(buffer))
    clones, ops = builder.ops[len(ops) :], [with_operands(op, before) for op in ops]
    for clone in clones:
        ops.insert(next((n for n, op in enumerate(ops) if clone.name in op.operands), len(ops)), clone)
    for buffer, new in last.items():
        now = before.get(new, new)
        builder.emit("aten.copy_.default", (buffer, now), module=_module(buffer))
        needs = {buffer.name, now.name}
        after = (n for n, op in enumerate(ops) if buffer.name in op.operands or any(r.name in needs for r in op.results))
        ops.insert(max(after, default=-1) + 1, builder.ops[-1])
    builder.ops = ops


def _module(buffer: Ref) -> str:
    return buffer.name.rpartition(".")[0]
