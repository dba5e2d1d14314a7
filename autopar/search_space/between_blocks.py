"""Activations split between blocks: along the sequence as Megatron and torchtitan do, along features, or batch and features.

    h.0 -> x [batch, sequence, features] -> h.1     x is S(1), or S(2), on the last axis, wherever a block ends
    in a block                                      activations are all-gathered and reduce-scattered there, never all-reduced

V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2; for the others see
`autopar.search_space.schemes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from autopar.analysis.block_names import BLOCK
from autopar.analysis.repeated_blocks import blocks
from autopar.errors import ConstraintError
from autopar.ir.layout import State, split
from autopar.ir.mesh import Mesh
from autopar.ir.program import Op, Program, Value
from autopar.search_space.schemes import Scheme

DIMS = ("batch", "sequence", "width")


def split_between_blocks(
    program: Program, mesh: Mesh, strategy: str, scheme: Scheme
) -> tuple[dict[str, tuple[State | None, ...]], frozenset[str]]:
    """The layouts of block results, free on all axes except the tensor axes, and the values that are not all-reduced there.

    Raises ConstraintError if blocks return no (batch, sequence, features), or the axes do not divide it.
    """
    outer, sizes = mesh.sizes[: -scheme.tensor], mesh.sizes[-scheme.tensor :]
    ends = list(_returned(program))
    if not ends:
        what = " and ".join("features" if dim == 2 else DIMS[dim] for dim in scheme.between)
        raise ConstraintError(
            f"strategy {strategy!r} splits the {what} between blocks, and no block returns (batch, sequence, features)",
            block=BLOCK,
            fix="strategy='megatron'",
        )
    layouts: dict[str, tuple[State | None, ...]] = {}
    for value in ends:
        states: list[State | None] = [None] * len(outer)
        for dim, own in zip(scheme.between, sizes, strict=True):
            parts = own * (math.prod(outer) if dim == 0 else 1)
            if value.shape[dim] % parts:
                raise ConstraintError(
                    f"strategy {strategy!r} cannot split a {DIMS[dim]} of {value.shape[dim]} over {parts} devices",
                    value=value.name,
                    shape=value.shape,
                    mesh=mesh,
                    fix=f"a {DIMS[dim]} that is a multiple of {parts}, or strategy='megatron'",
                )
            states.append(split(dim, value.shape[dim] // parts) if own > 1 else None)
        layouts[value.name] = tuple(states)
    if max(sizes) == 1:
        return {}, frozenset()
    return layouts, frozenset(value.name for value in _inside(program))


def _inside(program: Program) -> Iterator[Value]:
    """The values that blocks read or compute and that have the batch as dim 0."""
    batch = program.inputs[0].shape[:1]
    for ops in blocks(program).values():
        for op in ops:
            for name in (*op.operands, *(result.name for result in op.results)):
                value = program.values[name]
                if value.requires_grad and len(value.shape) > 2 and value.shape[:1] == batch:
                    yield value


def _returned(program: Program) -> Iterator[Value]:
    """The values (batch, sequence, features) that a block computes for others, or the sums that they are added to at once."""
    block = {op.name: name for name, ops in blocks(program).items() for op in ops}
    readers: dict[str, list[Op | None]] = {output.value: [None] for output in program.outputs}
    for op in program.ops:
        for name in op.operands:
            readers.setdefault(name, []).append(op)
    batch = program.inputs[0].shape[:1]
    for op in program.ops:
        for value in op.results if op.name in block else ():
            if value.requires_grad and len(value.shape) == 3 and value.shape[:1] == batch:
                yield from _for_others(value, block[op.name], block, readers)


def _for_others(
    value: Value, own: str, block: Mapping[str, str], readers: Mapping[str, Sequence[Op | None]]
) -> Iterator[Value]:
    """A value read outside of its block; if it is only added outside of all blocks, `x + drop(layer(x))`, the sum.

    None for values that come back from operators outside of all blocks, as when a model itself calls the parts of blocks.
    """
    last, reading = value, readers.get(value.name, ())
    while len(reading) == 1 and (op := reading[0]) and op.name not in block and op.results[0].shape == value.shape:
        last = op.results[0]
        if op.target == "aten.add.Tensor":
            yield from _for_others(last, "", block, readers)
            return
        reading = readers.get(last.name, ())
    if not all(op and block.get(op.name) == own for op in reading):
        yield value


__all__ = ["split_between_blocks"]
