"""Which ops may be recomputed in the backward, and which results alias an operand, so that they return with it.

y = gelu(x)              may be recomputed
y = dropout(x, 0.1)      may not: it would draw other numbers
y = transpose(x, 0, 1)   need not be: y is a view of x, and exists again when x does
y = reshape(x, [6])      may be: a view of x, or a copy if x is not contiguous; either exists again when x does
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.analysis.saved_tensors import ATTENTION
from autopar.analysis.weights import views
from autopar.ir.conversion import Conversion
from autopar.ir.program import Op, Program, Value, aten, overload, writes
from autopar.ir.schema import bound
from autopar.operators import OpSharding, view_of

# Operators that return a view if strides allow it, and a copy otherwise.
COPIES = frozenset({"contiguous", "flatten", "ravel", "reshape", "reshape_as", "resolve_conj", "resolve_neg"})
CASTS = frozenset({"to", "type_as"})  # a copy in another dtype
EINSUM = "aten.einsum.default"
DROPOUT = ("aten.dropout.default", "aten.feature_dropout.default")


def may_run_again(op: Op, fitted: OpSharding | None) -> bool:
    """Whether an op is deterministic, has no side effects, and can save memory by being recomputed: it is not always a view."""
    always_lies = (views(op) or view_of(op)) and not may_copy(op)
    return op.requires_grad and not draws(op, fitted) and not writes(op) and not always_lies


def may_run(program: Program, fits: Mapping[str, OpSharding | None]) -> frozenset[str]:
    """The ops of a program that may be recomputed: not those that read a buffer which an op writes, as it may have changed."""
    changing: set[str] = set()
    for op in program.ops:
        changing.update(writes(op))
        if overload(op.target)._schema.is_mutable or (lies(op, program.values) and op.operands[0] in changing):
            changing.update(result.name for result in op.results)
    return frozenset(op.name for op in program.ops if changing.isdisjoint(op.operands) and may_run_again(op, fits[op.name]))


def draws(op: Op, fitted: OpSharding | None) -> bool:
    """Whether an op draws random numbers; for an op without a rule torch's own tag decides."""
    if fitted:
        return fitted.random
    rateless = op.target == ATTENTION and len(op.args) < 5 and "dropout_p" not in dict(op.kwargs)
    return not rateless and torch.Tag.nondeterministic_seeded in overload(op.target).tags


def lies(op: Op, values: Mapping[str, Value]) -> bool:
    """Whether the results alias the first operand, or may; they then exist again when it is recomputed."""
    if op.target in DROPOUT:  # what drops nothing returns its operand
        named = bound(op)
        return named["p"] == 0 or named["train"] is False
    if not op.operands or not (views(op) or view_of(op) or _rearranges(op)):
        return False
    return aten(op.target) not in CASTS or values[op.operands[0]].dtype == op.results[0].dtype


def _rearranges(op: Op) -> bool:
    """Whether an op is an einsum that neither multiplies nor sums, but permutes dims or takes a diagonal."""
    if op.target != EINSUM or len(op.operands) > 1:
        return False
    before, arrow, after = str(op.args[0]).partition("->")
    kept = after if arrow else [letter for letter in before if letter == "." or before.count(letter) == 1]
    return set(before) <= {*kept, " "}


def may_copy(op: Op) -> bool:
    """Whether an op returns a view if strides allow it, and a copy otherwise."""
    return aten(op.target) in COPIES | CASTS


def aliases(step: Conversion) -> bool:
    """Whether the target of a conversion aliases its source."""
    return step.primitives[0] == "identity"
