"""Rewrites attention with fewer key-value heads than query heads for fused kernels: expanded, or grouped."""

from __future__ import annotations

import torch

from autopar.ir.builder import Rewriter
from autopar.ir.program import Argument, Op, Program, Ref
from autopar.ir.schema import bound, packed
from autopar.ir.shape_inference import broadcast
from autopar.operators import row_of
from autopar.operators.facts import OpKind
from autopar.passes.dead_code_elimination import dead

_OPERANDS = ("query", "key", "value")
_HALF = (torch.bfloat16, torch.float16)  # in which the fused kernels of GPUs take grouped heads


def expanded(program: Program) -> Program:
    """Expand batch and heads of query, key and value to their common shape; heads that differ under `enable_gqa` stay.

        a = attention(q, k, v)      ->      x = expand(k, [8, 4, 16, 32])      q is (8, 4, 16, 32), k and v (8, 1, 16, 32)
                                            y = expand(v, [8, 4, 16, 32])
                                            a = attention(q, x, y)

    Otherwise torch would use the unfused kernel and keep all scores; a rank with one of the heads would not.
    """
    rewriter = Rewriter(program)
    for op in program.ops:
        shapes = _shapes(op, program) if row_of(op).kind is OpKind.ATTENTION else {}
        if len(set(shapes.values())) > 1:
            _keep(op, shapes, rewriter)
        else:
            rewriter.keep(op)
    return rewriter.finish()


def grouped(program: Program) -> Program:
    """Pass key-value heads unrepeated to attention in half precision, if each is repeated for several query heads.

        x = unsqueeze(k, 2)                     ->      a = attention(q, k, v, enable_gqa=True)      k and v are (8, 2, 16, 32),
        y = expand(x, [8, 2, 4, 16, 32])                                                             and q (8, 8, 16, 32)
        z = reshape(y, [8, 8, 16, 32])
        a = attention(q, z, w)                          (w is v repeated likewise)

    transformers repeats them when its models are traced, but not when they run: repeated ones are copied, and kept for the
    backward.
    """
    rewriter = Rewriter(program)
    for op in program.ops:
        named = bound(op) if row_of(op).kind is OpKind.ATTENTION else {}
        repeated = [_repeated(named[name], program) for name in _OPERANDS[1:]] if named else []
        if repeated and all(repeated) and named["attn_mask"] is None and op.results[0].dtype in _HALF:
            args, kwargs = packed(op.target, named | dict(zip(_OPERANDS[1:], repeated, strict=True)) | {"enable_gqa": True})
            rewriter.keep(op, args=args, kwargs=kwargs)
        else:
            rewriter.keep(op)
    return dead(rewriter.finish())


def _repeated(argument: Argument, program: Program) -> Ref | None:
    """The heads that an operand of attention repeats, each several times in a row; None if it does not."""
    flat = _made(argument, "aten.reshape.default", program)
    wide = _made(flat.args[0], "aten.expand.default", program) if flat else None
    single = _made(wide.args[0], "aten.unsqueeze.default", program) if wide else None
    heads = single.args[0] if single else None
    if not (flat and wide and single and isinstance(heads, Ref) and len(wide.results[0].shape) == 5):
        return None
    batch, count, times, *rest = wide.results[0].shape
    alike = program.values[heads.name].shape == (batch, count, *rest) and single.results[0].shape == (batch, count, 1, *rest)
    return heads if alike and flat.results[0].shape == (batch, count * times, *rest) else None


def _made(argument: Argument, target: str, program: Program) -> Op | None:
    """The op that makes an argument, if it is of this operator."""
    op = program.producer.get(argument.name) if isinstance(argument, Ref) else None
    return op if op and op.target == target else None


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
