"""The sequence split between blocks, as Megatron's sequence parallelism and torchtitan's tensor parallelism have it.

    h.0 -> x [batch, sequence, features] -> h.1     x is S(1) on the last axis, wherever a block ends
    in a block                                      activations are all-gathered and reduce-scattered there, never all-reduced

V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.analysis.repeated_blocks import blocks
from autopar.errors import ConstraintError
from autopar.ir.layout import State, split
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, Value


def split_sequence(program: Program, mesh: Mesh, strategy: str) -> tuple[dict[str, tuple[State | None, ...]], frozenset[str]]:
    """The layouts of what blocks return, free on all axes but the last, and the values that are not all-reduced on that.

    Raises ConstraintError for a model whose blocks return no sequence, or one that the last axis does not divide.
    """
    parts, free = mesh.sizes[-1], (None,) * (len(mesh.sizes) - 1)
    ends = list(_returned(program))
    if not ends:
        raise ConstraintError(
            f"strategy {strategy!r} splits the sequence between blocks, and no block returns (batch, sequence, features)",
            block='modules in a container ("layers.0", "layers.1"), with two matrix products or more each',
            fix="strategy='megatron'",
        )
    for value in ends:
        if value.shape[1] % parts:
            raise ConstraintError(
                f"strategy {strategy!r} cannot split a sequence of {value.shape[1]} over {parts} devices",
                value=value.name,
                shape=value.shape,
                mesh=mesh,
                fix=f"a sequence that is a multiple of {parts}, or strategy='megatron'",
            )
    if parts == 1:
        return {}, frozenset()
    layouts = {value.name: (*free, split(1, value.shape[1] // parts)) for value in ends}
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
    """The values (batch, sequence, features) that a block computes and others read."""
    block = {op.name: name for name, ops in blocks(program).items() for op in ops}
    made = {result.name: block[op.name] for op in program.ops if op.name in block for result in op.results}
    outside = {name for op in program.ops for name in op.operands if name in made and made[name] != block.get(op.name)}
    outside |= {output.value for output in program.outputs} & made.keys()
    batch = program.inputs[0].shape[:1]
    for name in made:
        value = program.values[name]
        if name in outside and value.requires_grad and len(value.shape) == 3 and value.shape[:1] == batch:
            yield value


__all__ = ["split_sequence"]
