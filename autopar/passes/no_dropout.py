"""The program without dropout and other random numbers, so that it can be compared with another run."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.program import Argument, Op, Program, Ref
from autopar.ir.schema import bound, packed
from autopar.operators import row_of, training_flag
from autopar.operators.certain_draws import CLASSES, NUMBERS
from autopar.operators.facts import OpKind

HALF = 0.5  # in place of numbers from any distribution
CONSTANTS = {OpKind.DRAW: HALF, OpKind.DRAW_COUNTS: 1}  # a count of 0 would hide what it is multiplied by
DRAWS = frozenset({*CONSTANTS, OpKind.DRAW_INTEGERS, OpKind.DRAW_CLASSES})


def without_dropout(program: Program) -> Program:
    """Set dropout rates to zero and replace random tensors by constants.

    These are one half, the least of a range of whole numbers, 1 of counts, and the first classes that have a weight. Ops keep
    their names and factors, so that a plan for the program is a plan for the result.

    a = dropout(x, 0.1, True)                         a = dropout(x, 0.0, True)
    b = attention(q, k, v, None, 0.1, True)    ->     b = attention(q, k, v, None, 0.0, True)
    c = rrelu(x, 0.1, 0.3, True)                      c = rrelu(x, 0.1, 0.3, False)
    d = rand([4, 8])                                  d = full([4, 8], 0.5)
    e = bernoulli(x, 0.9)                             e = full_like(x, 0.5)
    f = randint(2, 10, [4])                           f = full([4], 2)
    g = randperm(4)                                   g = full([4], 0)
    h = poisson(x)                                    h = full_like(x, 1)
    i = normal(x, 1.0)                                i = fill(x, 0.5) where x has a gradient, which is zero
    j = normal(x, y)                                  j = autopar.certain_numbers(x, y, 0.5)
    k = multinomial(x, 2)                             k = autopar.certain_classes(x, 2)
    """
    return replace(program, ops=tuple(map(_certain, program.ops)))


def drawn(op: Op) -> bool:
    """Whether `without_dropout` replaces an op by a constant: it only draws numbers."""
    return row_of(op).kind in DRAWS


def _constant(op: Op) -> tuple[str, dict[str, Argument]]:
    """The operator that replaces a random one, and its arguments by name."""
    kind, named, operands = row_of(op).kind, bound(op), tuple(map(Ref, op.operands))
    if kind is OpKind.DRAW_CLASSES:
        return CLASSES, {"weights": operands[0], "number": named["num_samples"]}
    assert kind, "it draws"
    value = CONSTANTS.get(kind, named.get("low", named.get("from", 0)))
    dtype: dict[str, Argument] = {"dtype": op.results[0].dtype, "device": named.get("device")}
    match operands:
        case ():
            size = (named["n"],) if "n" in named else named.get("size")
            return "aten.full.default", {"size": size, "fill_value": value} | dtype
        case (like,) if op.requires_grad:
            return "aten.fill.Scalar", {"self": like, "value": value}
        case (like,):
            return "aten.full_like.default", {"self": like, "fill_value": value} | dtype
        case _:
            return NUMBERS, {"first": operands[0], "second": operands[1], "number": value}


def _certain(op: Op) -> Op:
    row = row_of(op)
    if drawn(op):
        target, named = _constant(op)
        args, kwargs = packed(target, named)
        return replace(op, target=target, args=args, kwargs=kwargs)
    if row.rate:
        return _with(op, {row.rate: 0.0})
    return _with(op, {row.training: False}) if row.random and row.training else op


def _with(op: Op, changes: dict[str, Argument]) -> Op:
    """The op with some of its arguments changed, by name."""
    args, kwargs = packed(op.target, bound(op) | changes)
    return replace(op, args=args, kwargs=kwargs)


def without_training(program: Program) -> Program:
    """The program in evaluation mode, as far as that differs only by training flags, which a parallel module sets itself.

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
