"""Which ops may be recomputed in the backward, and which results alias an operand and so are restored with it.

y = gelu(x)              may be recomputed
y = dropout(x, 0.1)      may be: it draws the same numbers, from the seed of its forward
y = batch_norm(x, ...)   may not: it would update its running statistics twice
y = transpose(x, 0, 1)   need not be: y is a view of x, and exists again when x does
y = reshape(x, [6])      may be: a view of x, or a copy if x is not contiguous; either exists again when x does
"""

from __future__ import annotations

import torch

from autopar.ir.conversion import Conversion
from autopar.ir.program import Op, Program, overload
from autopar.operators import OpSharding, alias_of, row_of, rule_of, view_of, writes
from autopar.operators.call import Call
from autopar.operators.facts import Alias


def is_recomputable(op: Op) -> bool:
    """Whether an op has no side effects, and can save memory by being recomputed: it is not always a view.

    Random ops qualify: the rerun draws from the seed of the forward (`runtime.random`), just as `torch.utils.checkpoint`
    restores the generator with `preserve_rng_state`.
    """
    always_view = row_of(op).alias is Alias.ALWAYS or (rule_of(op.target) is None and alias_of(op, {}) is Alias.ALWAYS)
    return op.requires_grad and not writes(op) and not always_view


def recomputable(program: Program) -> frozenset[str]:
    """The ops of a program that may be recomputed; ops that read a buffer written by an op may not, as it may have changed."""
    changing: set[str] = set()
    for op in program.ops:
        changing.update(writes(op))
        if overload(op.target)._schema.is_mutable or (view_of(op, program.values) and op.operands[0] in changing):
            changing.update(result.name for result in op.results)
    return frozenset(op.name for op in program.ops if changing.isdisjoint(op.operands) and is_recomputable(op))


def is_random(op: Op, fitted: OpSharding | None) -> bool:
    """Whether an op draws random numbers; for an op without a rule torch's own tag decides."""
    if fitted:
        return fitted.random
    row = row_of(op)
    idle = row.rate and not row.is_random(Call.of(op))
    return not idle and torch.Tag.nondeterministic_seeded in overload(op.target).tags


def may_copy(op: Op) -> bool:
    """Whether an op returns a view if strides allow it, and a copy otherwise."""
    return row_of(op).alias is Alias.MAYBE


def is_alias(step: Conversion) -> bool:
    """Whether the target of a conversion aliases its source."""
    return step.primitives[0] == "identity"
