"""Attention masks that are provably causal become `is_causal=True`; masks that are provably all true are dropped."""

from __future__ import annotations

import torch

from autopar.ir.builder import Rewriter
from autopar.ir.layout import Shape
from autopar.ir.program import Op, Program, Ref, aten, elements
from autopar.ir.schema import bound, packed
from autopar.operators import row_of
from autopar.operators.facts import OpKind
from autopar.operators.index_facts import affine
from autopar.operators.index_facts.affine import Affine, Fact, Formula, Select
from autopar.passes.index_analysis import facts

_CLOSED = torch.finfo(torch.float16).min  # entries of an additive mask at or below this are masked out


def causal(program: Program) -> Program:
    """Simplify masks by symbolic analysis of their index expressions; no mask is evaluated.

    m = k <= q                                                    (m is dead)
    a = attention(x, y, z, m)       ->      a = attention(x, y, z, is_causal=True)
    b = attention(x, y, z, true)            b = attention(x, y, z)
    c = m and true                          c = m
    d = where(true, x, y)                   d = x
    e = index(x, [arange, arange])          e = reshape(x)
    """
    known = facts(program)
    rewriter = Rewriter(program)
    for op in program.ops:
        if row_of(op).kind is OpKind.ATTENTION:
            _attention(op, program, known, rewriter)
        elif (kept := _passed(op, known)) is not None and _fits(op, kept, program):
            _forward(op, kept, program, rewriter)
        elif op.target == "aten.index.Tensor" and _in_order(op, program, known):
            rewriter.keep(op, target="aten.reshape.default", args=(op.args[0], op.results[0].shape))
        else:
            rewriter.keep(op)
    return rewriter.finish()


def _attention(op: Op, program: Program, known: dict[str, Fact], rewriter: Rewriter) -> None:
    named = bound(op)
    mask = named["attn_mask"]
    shape = program.values[mask.name].shape if isinstance(mask, Ref) else ()
    constant = isinstance(mask, Ref) and not program.values[mask.name].requires_grad
    opened = _opened(known.get(mask.name), shape) if isinstance(mask, Ref) and constant else None
    if opened is True:
        named |= {"attn_mask": None}
    elif opened is not None and opened == _lower_triangle(shape):
        named |= {"attn_mask": None, "is_causal": True}
    args, kwargs = packed(op.target, named)
    rewriter.keep(op, args=args, kwargs=kwargs)


def _opened(fact: Fact | None, shape: Shape) -> Formula | None:
    """The condition under which a mask admits an entry; None if that is unknown, or if the mask also adds a bias."""
    match fact:
        case None:
            return None
        case Affine(base=base):
            return True if fact.constant and base == 0 else None
        case Select(when, yes, no) if yes == 0 and no <= _CLOSED:
            return when
        case Select(when, yes, no) if no == 0 and yes <= _CLOSED:
            return affine.negated(when, shape)
        case Select():
            return None
        case _:
            return fact


def _lower_triangle(shape: Shape) -> Formula:
    """The formula of is_causal: query coordinate - key coordinate >= 0."""
    if len(shape) < 2:
        return False
    return affine.at_least_zero(Affine((*([0] * (len(shape) - 2)), 1, -1), 0), shape)


def _passed(op: Op, known: dict[str, Fact]) -> Ref | None:
    """The operand that `and`, `or` or `where` returns, if the others are constants."""
    kind = row_of(op).kind
    if kind in (OpKind.AND, OpKind.OR) and len(op.args) == 2:
        neutral = kind is OpKind.AND
        for one, other in (op.args, op.args[::-1]):
            if isinstance(one, Ref) and known.get(one.name) is neutral and isinstance(other, Ref):
                return other
    if aten(op.target) == "where" and len(op.args) == 3:
        when, yes, no = op.args
        truth = known.get(when.name) if isinstance(when, Ref) else None
        if isinstance(truth, bool):
            chosen = yes if truth else no
            return chosen if isinstance(chosen, Ref) else None
    return None


def _fits(op: Op, kept: Ref, program: Program) -> bool:
    """Whether the operand equals the result except for broadcasting."""
    value, result = program.values[kept.name], op.results[0]
    return (value.dtype, value.requires_grad) == (result.dtype, result.requires_grad)


def _forward(op: Op, kept: Ref, program: Program, rewriter: Rewriter) -> None:
    ref = rewriter.new(kept)
    assert isinstance(ref, Ref)
    if program.values[kept.name].shape != op.results[0].shape:
        ref = rewriter.beside(op, "aten.expand.default", (ref, op.results[0].shape))
    rewriter.forward(op.name, ref)


def _in_order(op: Op, program: Program, known: dict[str, Fact]) -> bool:
    """Whether x[i, j, ...] reads every element of x once and in order: its indices are coordinates, in increasing order."""
    source, indices = op.args
    if not isinstance(source, Ref) or not isinstance(indices, tuple):
        return False
    sizes, result = program.values[source.name].shape, op.results[0].shape
    if len(indices) != len(sizes) or elements(sizes) != elements(result):
        return False
    order = []
    for index, size in zip(indices, sizes, strict=True):
        fact = known.get(index.name) if isinstance(index, Ref) else None
        if not isinstance(index, Ref) or not isinstance(fact, Affine) or fact.base != 0:
            return False
        ahead = len(result) - len(fact.scale)
        dims = [ahead + d for d, scale in enumerate(fact.scale) if scale]
        if size > 1 and (len(dims) != 1 or sum(fact.scale) != 1 or result[dims[0]] != size):
            return False
        order += dims
    return order == sorted(set(order))
