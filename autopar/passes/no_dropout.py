"""The program without dropout and other random numbers, so that it can be compared with another run."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.program import Argument, Op, Program, Ref
from autopar.ir.schema import bound, packed
from autopar.operators import row_of, training_flag
from autopar.operators.facts import OpKind

HALF = 0.5  # in place of numbers from any distribution
DRAWS = OpKind.DRAW, OpKind.DRAW_INTEGERS


def without_dropout(program: Program) -> Program:
    """Set dropout rates to zero and replace random tensors by constants: one half, or the least of a range of whole numbers.

    Ops keep their names and factors, so that a plan for the program is a plan for the result.

    a = dropout(x, 0.1, True)                         a = dropout(x, 0.0, True)
    b = attention(q, k, v, None, 0.1, True)    ->     b = attention(q, k, v, None, 0.0, True)
    c = rrelu(x, 0.1, 0.3, True)                      c = rrelu(x, 0.1, 0.3, False)
    d = rand([4, 8])                                  d = full([4, 8], 0.5)
    e = bernoulli(x, 0.9)                             e = full_like(x, 0.5)
    f = randint(2, 10, [4])                           f = full([4], 2)
    g = randperm(4)                                   g = full([4], 0)
    """
    return replace(program, ops=tuple(map(_certain, program.ops)))


def drawn(op: Op) -> bool:
    """Whether `without_dropout` replaces an op by a constant: it draws numbers and passes no gradient on."""
    return row_of(op).kind in DRAWS and len(op.operands) < 2 and not op.requires_grad


def _certain(op: Op) -> Op:
    row = row_of(op)
    if drawn(op):
        named = bound(op)
        target = "aten.full_like.default" if op.operands else "aten.full.default"
        size = (named["n"],) if "n" in named else named.get("size")
        shape = {"self": Ref(op.operands[0])} if op.operands else {"size": size}
        value = HALF if row.kind is OpKind.DRAW else named.get("low", named.get("from", 0))
        dtype = {"dtype": op.results[0].dtype, "device": named.get("device")}
        args, kwargs = packed(target, shape | {"fill_value": value} | dtype)
        return replace(op, target=target, args=args, kwargs=kwargs)
    if row.rate:
        return _with(op, {row.rate: 0.0})
    return _with(op, {row.training: False}) if row.random and row.training else op


def _with(op: Op, changes: dict[str, Argument]) -> Op:
    """The op with some of its arguments changed, by name."""
    args, kwargs = packed(op.target, bound(op) | changes)
    return replace(op, args=args, kwargs=kwargs)


def without_training(program: Program) -> Program:
    """The program in evaluation mode, as far as it differs by training flags only, which a parallel module sets itself.

    a = dropout(x, 0.1, True)                       a = dropout(x, 0.1, False)
    b = attention(q, k, v, None, 0.1, True)    ->   b = attention(q, k, v, None, 0.0, True)
    """
    return replace(program, ops=tuple(map(_quiet, program.ops)))


def switched(op: Op) -> bool:
    """Whether an op behaves as in training, by a flag or a rate that evaluation switches off."""
    flag, rate = training_flag(op), row_of(op).rate
    return bound(op)[flag] is True if flag else bool(rate) and bound(op)[rate] != 0


def _quiet(op: Op) -> Op:
    flag, rate = training_flag(op), row_of(op).rate
    if flag:
        return _with(op, {flag: False})
    return _with(op, {rate: 0.0}) if rate else op
