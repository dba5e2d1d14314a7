"""Attention whose operands are broadcast over batch or heads gets them expanded, as fused kernels take them."""

from __future__ import annotations

from autopar.ir.builder import Rewriter
from autopar.ir.program import Argument, Op, Program, Ref
from autopar.ir.schema import bound, packed
from autopar.ir.shape_inference import broadcast
from autopar.operators import row_of
from autopar.operators.facts import OpKind

_OPERANDS = ("query", "key", "value")


def expanded(program: Program) -> Program:
    """Expand batch and heads of query, key and value to those of all three; heads under `enable_gqa` differ, and stay.

        a = attention(q, k, v)      ->      x = expand(k, [8, 4, 16, 32])      q is (8, 4, 16, 32), k and v (8, 1, 16, 32)
                                            y = expand(v, [8, 4, 16, 32])
                                            a = attention(q, x, y)

    Without, torch computes all scores one by one and keeps them; a rank that has one of the heads would not.
    """
    rewriter = Rewriter(program)
    for op in program.ops:
        shapes = _shapes(op, program) if row_of(op).kind is OpKind.ATTENTION else {}
        if len(set(shapes.values())) > 1:
            _keep(op, shapes, rewriter)
        else:
            rewriter.keep(op)
    return rewriter.finish()


def _shapes(op: Op, program: Program) -> dict[str, tuple[int, ...]]:
    """Batch and heads of query, key and value; empty where they are not those of a fused kernel."""
    named = bound(op)
    refs = {name: named[name] for name in _OPERANDS}
    fused = not named["enable_gqa"] and len(op.results[0].shape) == 4
    return {name: program.values[ref.name].shape[:-2] for name, ref in refs.items() if fused and isinstance(ref, Ref)}


def _keep(op: Op, shapes: dict[str, tuple[int, ...]], rewriter: Rewriter) -> None:
    named: dict[str, Argument] = {name: rewriter.new(argument) for name, argument in bound(op).items()}
    common = broadcast(*shapes.values())
    for name in (name for name in _OPERANDS if shapes[name] != common):
        ref = named[name]
        assert isinstance(ref, Ref)
        named[name] = rewriter.beside(op, "aten.expand.default", (ref, (*common, *rewriter.values[ref.name].shape[-2:])))
    rewriter.forward(op.name, rewriter.beside(op, op.target, *packed(op.target, named)))
