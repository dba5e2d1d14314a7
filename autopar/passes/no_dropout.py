"""The program without dropout and other random numbers, so that it can be compared with another run."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.program import Argument, Op, Program, Ref, aten
from autopar.ir.schema import bound, packed

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
HALF = 0.5  # in place of numbers from any distribution
DRAWS = frozenset("rand randn rand_like randn_like bernoulli normal normal_functional uniform exponential log_normal".split())


def without_dropout(program: Program) -> Program:
    """Set dropout rates to zero and replace random tensors by constants of one half.

    Ops keep their names and factors, so that a plan for the program is a plan for the result.

    a = dropout(x, 0.1, True)                         a = dropout(x, 0.0, True)
    b = attention(q, k, v, None, 0.1, True)    ->     b = attention(q, k, v, None, 0.0, True)
    c = rrelu(x, 0.1, 0.3, True)                      c = rrelu(x, 0.1, 0.3, False)
    d = rand([4, 8])                                  d = full([4, 8], 0.5)
    e = bernoulli(x, 0.9)                             e = full_like(x, 0.5)
    """
    return replace(program, ops=tuple(map(_certain, program.ops)))


def drawn(op: Op) -> bool:
    """Whether `without_dropout` replaces an op by a constant: it draws numbers and passes no gradient on."""
    return aten(op.target) in DRAWS and len(op.operands) < 2 and not op.requires_grad


def _certain(op: Op) -> Op:
    name = aten(op.target)
    if drawn(op):
        named = bound(op)
        target = "aten.full_like.default" if op.operands else "aten.full.default"
        shape = {"self": Ref(op.operands[0])} if op.operands else {"size": named["size"]}
        dtype = {"dtype": op.results[0].dtype, "device": named.get("device")}
        args, kwargs = packed(target, shape | {"fill_value": HALF} | dtype)
        return replace(op, target=target, args=args, kwargs=kwargs)
    sure: dict[str, Argument] = {_CHANCE[name]: 0.0} if name in _CHANCE else {"training": False} if name == "rrelu" else {}
    if not sure:
        return op
    args, kwargs = packed(op.target, bound(op) | sure)
    return replace(op, args=args, kwargs=kwargs)


def without_training(program: Program) -> Program:
    """The program in evaluation mode, as far as it differs by training flags only, which a parallel module sets itself.

    a = dropout(x, 0.1, True)                       a = dropout(x, 0.1, False)
    b = attention(q, k, v, None, 0.1, True)    ->   b = attention(q, k, v, None, 0.0, True)
    """
    return replace(program, ops=tuple(map(_quiet, program.ops)))


def switched(op: Op) -> bool:
    """Whether an op behaves as in training, by a flag or a rate that evaluation switches off."""
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
