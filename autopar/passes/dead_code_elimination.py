"""Dead code elimination."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.builder import Rewriter
from autopar.ir.program import Op, Parameter, Program, overload
from autopar.operators import writes


def dead(program: Program) -> Program:
    """Drop every op whose results are neither returned nor read, except ops that write in place or to buffers.

    Updates `Parameter.used`.

    a = exp(x)
    b = mul(x, x)      ->      b = mul(x, x)
    return b                   return b
    """
    needed = {output.value for output in program.outputs}
    alive: list[Op] = []
    for op in reversed(program.ops):
        if _writes(op) or any(result.name in needed for result in op.results):
            alive.append(op)
            needed.update(op.operands)
    rewriter = Rewriter(program)
    for op in reversed(alive):
        rewriter.keep(op)

    def marked(held: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
        return tuple(replace(one, used=one.value.name in needed) for one in held)

    return replace(rewriter.finish(), parameters=marked(program.parameters), buffers=marked(program.buffers))


def _writes(op: Op) -> bool:
    return bool(writes(op)) or bool(overload(op.target)._schema.is_mutable)
