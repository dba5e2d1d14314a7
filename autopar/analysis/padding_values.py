"""What the padding of a value contains, propagated by the `padding` of operators' rows (`autopar.operators.padding`).

An operator whose row says nothing does not support padding. If the padded factor is in no result, the op must sum it away or
never read it, as an embedding does not: indices of its padded rows are out of range (`autopar.passes.padding`).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.program import Op
from autopar.operators import OpSharding, row_of
from autopar.operators.padding import LOWEST, NUMBERED, SOME, ZERO, Padded, PaddingValue, embedded

LINEAR = "aten.linear.default"  # the operator whose scores can be masked by its bias


def content(
    op: Op, fitted: OpSharding, factor: int, inside: Sequence[PaddingValue | None], *, masked: bool
) -> PaddingValue | None:
    """What the padding of an op's results contains if this factor of it is padded; None if unpadded elements would change.

    `inside` has the padding's content for each operand, None for operands without the factor. If no result has the factor, any
    value means that the results are correct. `masked`: padded logits of linear layers are set to minus infinity.
    """
    rule = row_of(op).padding
    kept = [any(factor in dim for dim in dims) for dims in fitted.results]
    if rule is None or not any(inside) or (any(kept) and not all(kept)):
        return None
    if kept[0] and masked and scores(op, inside) and not fitted.factors[factor].whole:
        return LOWEST
    return rule(Padded(op=op, fitted=fitted, factor=factor, inside=inside, gone=not kept[0]))


def numbered(op: Op) -> bool:
    """Whether an op looks elements up by index, which padding must not shift."""
    return row_of(op).padding in NUMBERED


def embeds(op: Op) -> bool:
    """Whether an op looks up rows of a table, its first operand, by indices, its second one."""
    return row_of(op).padding is embedded


def scores(op: Op, inside: Sequence[PaddingValue | None]) -> bool:
    """Whether an op is a linear layer whose output features are padded, so that its results may be masked logits."""
    return op.target == LINEAR and not inside[0] and bool(inside[1])


__all__ = ["LOWEST", "SOME", "ZERO", "PaddingValue", "content", "embeds", "numbered", "scores"]
