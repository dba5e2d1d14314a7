"""The program without its random zeros."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir import Argument, Op, Program, aten
from autopar.passes.arguments import bound, packed

ATTENTION = "aten.scaled_dot_product_attention.default"
TRAINING = {"aten.dropout.default": "train", "aten.feature_dropout.default": "train", "aten.batch_norm.default": "training"}
_CHANCE = {
    "dropout": "p",
    "native_dropout": "p",
    "alpha_dropout": "p",
    "feature_dropout": "p",
    "feature_alpha_dropout": "p",
    "scaled_dot_product_attention": "dropout_p",
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), "dropout"),
}


def without_dropout(program: Program) -> Program:
    """Every dropout drops nothing. The ops stay, so that a plan of the program is a plan of the result.

    a = dropout(x, 0.1, True)                         a = dropout(x, 0.0, True)
    b = attention(q, k, v, None, 0.1, True)    ->     b = attention(q, k, v, None, 0.0, True)
    c = rrelu(x, 0.1, 0.3, True)                      c = rrelu(x, 0.1, 0.3, False)
    """
    return replace(program, ops=tuple(map(_certain, program.ops)))


def _certain(op: Op) -> Op:
    name = aten(op.target)
    sure: dict[str, Argument] = {_CHANCE[name]: 0.0} if name in _CHANCE else {"training": False} if name == "rrelu" else {}
    if not sure:
        return op
    args, kwargs = packed(op.target, bound(op) | sure)
    return replace(op, args=args, kwargs=kwargs)


def without_training(program: Program) -> Program:
    """The program as evaluation runs it, if only the flags that a parallel module switches itself differ.

        a = dropout(x, 0.1, True)                       a = dropout(x, 0.1, False)
        b = attention(q, k, v, None, 0.1, True)    ->   b = attention(q, k, v, None, 0.0, True)
    """
    return replace(program, ops=tuple(map(_quiet, program.ops)))


def switched(op: Op) -> bool:
    """Whether an op draws, or counts, as it does in training only."""
    named = bound(op)
    if op.target == ATTENTION:
        return named["dropout_p"] != 0
    return op.target in TRAINING and named[TRAINING[op.target]] is True


def _quiet(op: Op) -> Op:
    if op.target != ATTENTION and op.target not in TRAINING:
        return op
    off: dict[str, Argument] = {"dropout_p": 0.0} if op.target == ATTENTION else {TRAINING[op.target]: False}
    args, kwargs = packed(op.target, bound(op) | off)
    return replace(op, args=args, kwargs=kwargs)
