"""Buffers that forward writes: running means, queues, counts of calls.

Inside of the program what they become are values; their memory is written when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar.capture import functionalize
from autopar.capture.functionalize import Handle
from autopar.ir.builder import Builder
from autopar.ir.program import Argument, Op, Ref, Static, substitute

OWNER = "the buffer "  # of the storage of a buffer, before its name


def keep(builder: Builder, given: Iterable[Handle]) -> None:
    """Store what the buffers among these have become; what reads one, and the backward that needs it, has a copy from before.

    y = mul(x, kept)                c = clone(kept)
    k = add(kept, 1)         ->     y = mul(x, c)
                                    k = add(c, 1)
                                    copy_(kept, k)
    """
    for handle in given:
        if not handle.storage.version or not handle.storage.owner.startswith(OWNER):
            continue
        buffer, last = Ref(handle.storage.owner.removeprefix(OWNER)), functionalize.read(handle)
        module = buffer.name.rpartition(".")[0]
        (before,) = builder.emit("aten.clone.default", (buffer,), module=module)
        *ops, clone = builder.ops
        builder.ops = [clone, *(_reading(op, {buffer: before}) for op in ops)]
        builder.emit("aten.copy_.default", (buffer, last), module=module)


def _reading(op: Op, instead: Mapping[Ref, Ref]) -> Op:
    """The op with some operands replaced."""

    def change(leaf: Ref | Static) -> Argument:
        return instead.get(leaf, leaf) if isinstance(leaf, Ref) else leaf

    kwargs = tuple((name, substitute(argument, change)) for name, argument in op.kwargs)
    return replace(op, args=tuple(substitute(argument, change) for argument in op.args), kwargs=kwargs)
