"""What may be computed a second time in the backward, and what comes back with something else because it lies in its memory.

y = gelu(x)              may run again
y = dropout(x, 0.1)      may not: it would draw anew
y = transpose(x, 0, 1)   need not: y lies in x, and comes back with it
y = reshape(x, [6])      may, for it copies what does not lie in one piece; it comes back with x, copied or not
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

# Operators that give a view where they can and a copy where they must.
COPIES = frozenset({"contiguous", "flatten", "ravel", "reshape", "reshape_as", "resolve_conj", "resolve_neg"})
CASTS = frozenset({"to", "type_as"})  # a copy in another dtype
EINSUM = "aten.einsum.default"
DROPOUT = ("aten.dropout.default", "aten.feature_dropout.default")


def may_run_again(op: Op, fitted: OpSharding | None) -> bool:
    """Whether an op, with its rule, gives the same and changes nothing when it runs once more, and that can be of use."""
    always_lies = (views(op) or view_of(op)) and not may_copy(op)
    return op.requires_grad and not draws(op, fitted) and not writes(op) and not always_lies


def may_run(program: Program, fits: Mapping[str, OpSharding | None]) -> frozenset[str]:
    """The ops that may run again: of those that can, all that read no buffer which an op writes, for it may have changed."""
    changing: set[str] = set()
    for op in program.ops:
        changing.update(writes(op))
        if overload(op.target)._schema.is_mutable or (lies(op, program.values) and op.operands[0] in changing):
            changing.update(result.name for result in op.results)
    return frozenset(op.name for op in program.ops if changing.isdisjoint(op.operands) and may_run_again(op, fits[op.name]))


def draws(op: Op, fitted: OpSharding | None) -> bool:
    """Whether an op draws random numbers; of one without a rule torch's own tag says it."""
    if fitted:
        return fitted.random
    rateless = op.target == ATTENTION and len(op.args) < 5 and "dropout_p" not in dict(op.kwargs)
    return not rateless and torch.Tag.nondeterministic_seeded in overload(op.target).tags


def lies(op: Op, values: Mapping[str, Value]) -> bool:
    """Whether the results lie in the memory of the first operand, or may: then they come back with it."""
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
    """Whether an op copies what it cannot give as a view."""
    return aten(op.target) in COPIES | CASTS


def aliases(step: Conversion) -> bool:
    """Whether the target of a conversion lies in the memory of its source."""
    return step.primitives[0] == "identity"
