"""The program without its random zeros."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir import Op, Program
from autopar.passes.arguments import bound, packed

_CHANCE = {
    "dropout": "p",
    "native_dropout": "p",
    "alpha_dropout": "p",
    "feature_dropout": "p",
    "feature_alpha_dropout": "p",
    "scaled_dot_product_attention": "dropout_p",
}


def without_dropout(program: Program) -> Program:
    """Every dropout drops nothing. The ops stay, so that a plan of the program is a plan of the result.

    a = dropout(x, 0.1, True)                         a = dropout(x, 0.0, True)
    b = attention(q, k, v, None, 0.1, True)    ->     b = attention(q, k, v, None, 0.0, True)
    """
    return replace(program, ops=tuple(map(_certain, program.ops)))


def _certain(op: Op) -> Op:
    chance = _CHANCE.get(op.target.split(".")[1])
    if chance is None:
        return op
    args, kwargs = packed(op.target, bound(op) | {chance: 0.0})
    return replace(op, args=args, kwargs=kwargs)


def without_training(program: Program) -> Program:
    """Every `training` flag is False: what is left is what both modes of a model have in common.

    a = dropout(x, 0.0, True)    ->    a = dropout(x, 0.0, False)
    """
    return replace(program, ops=tuple(map(_quiet, program.ops)))


def _quiet(op: Op) -> Op:
    named = bound(op)
    flags = {name: False for name in ("train", "training") if name in named}
    if not flags:
        return op
    args, kwargs = packed(op.target, named | flags)
    return replace(op, args=args, kwargs=kwargs)
