"""What the padding of a value contains, propagated through operators.

    ZERO      zeros            padded weights, products with them, functions with f(0) = 0 such as gelu
    SOME      finite numbers   sigmoid(0), say: harmless in a sum only if multiplied by zeros
    LOWEST    minus infinity   masked logits, which a softmax ignores

Operators that are not in these tables do not support padding. Where the padded factor is in no result, the op must sum it away
or never read it, like an embedding whose indices stay below the padded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from autopar.ir.program import Op, Ref, aten
from autopar.ir.schema import bound
from autopar.operators import OpSharding


class PaddingValue(Enum):
    """What the padding of a value contains."""

    ZERO = "zeros"
    SOME = "finite numbers"
    LOWEST = "minus infinity"


ZERO, SOME, LOWEST = PaddingValue
ARRANGE = frozenset(
    "alias clone contiguous to reshape transpose permute t unsqueeze squeeze expand slice select split split_with_sizes chunk "
    "unbind cat stack flip embedding".split()
)
PRODUCTS = frozenset("linear addmm mm bmm matmul baddbmm".split())
NORMS = frozenset("layer_norm rms_norm".split())
ZERO_TO_ZERO = frozenset("relu gelu silu mish tanh leaky_relu elu selu celu hardtanh hardswish softsign neg dropout".split())
NAMED = frozenset("embedding nll_loss nll_loss_nd".split())  # ops that see the rows or scores that indices name
FINITE = frozenset("sigmoid softplus log_sigmoid hardsigmoid sin cos".split())


def content(
    op: Op, fitted: OpSharding, factor: int, inside: Sequence[PaddingValue | None], *, masked: bool
) -> PaddingValue | None:
    """What the padding of an op's results contains if this factor of it is padded; None if unpadded elements would change.

    `inside` has what the padding of each operand contains, None for operands without the factor. Where no result has the
    factor, any value means that results are right. `masked`: padded logits of linear layers are set to minus infinity.
    """
    name, held = aten(op.target), {found for found in inside if found}
    kept = [any(factor in dim for dim in dims) for dims in fitted.results]
    if not held or (any(kept) and not all(kept)):
        return None
    if not kept[0]:
        return ZERO if _unseen(op, name, fitted, inside) else None
    if name in ("softmax", "log_softmax"):
        return _distribution(name, fitted.factors[factor].whole, held)
    if fitted.factors[factor].whole:  # it matters where an element stands
        return None
    if name in ARRANGE:
        return held.pop() if len(held) == 1 and all(inside[: 1 if name == "embedding" else None]) else None
    if name in PRODUCTS:
        return LOWEST if masked and scores(op, inside) else _product(fitted, inside)
    if name in NORMS:
        return None if LOWEST in held else SOME
    if name == "scaled_dot_product_attention":
        return _attention(inside)
    return _pointwise(op, name, inside)


def numbered(op: Op) -> bool:
    """Whether an op looks elements up by index, which padding must not shift."""
    return aten(op.target) in NAMED or aten(op.target) == "cross_entropy_loss"


def scores(op: Op, inside: Sequence[PaddingValue | None]) -> bool:
    """Whether an op is a linear layer whose output features are padded, so that its results may be masked logits."""
    return aten(op.target) == "linear" and not inside[0] and bool(inside[1])


def _unseen(op: Op, name: str, fitted: OpSharding, inside: Sequence[PaddingValue | None]) -> bool:
    """Whether results without the padded factor equal those without padding."""
    if name in PRODUCTS:
        return LOWEST not in inside and ZERO in inside
    if name in NAMED:
        return bool(inside[0]) and not any(inside[1:])
    if name == "cross_entropy_loss":
        return inside[0] == LOWEST and not any(inside[1:]) and bound(op)["label_smoothing"] == 0
    return (name == "logsumexp" and inside[0] == LOWEST) or (name == "sum" and inside[0] == ZERO)


def _product(fitted: OpSharding, inside: Sequence[PaddingValue | None]) -> PaddingValue | None:
    if LOWEST in inside:
        return None
    added = {inside[position] for position in fitted.added}
    multiplied = (found for position, found in enumerate(inside) if position not in fitted.added)
    return ZERO if added <= {ZERO} and ZERO in multiplied else SOME


def _distribution(name: str, over: bool, held: set[PaddingValue]) -> PaddingValue | None:
    """The padding after a softmax over the padded factor (`over`), or over another one."""
    if not over:
        return None if LOWEST in held else SOME
    return None if held != {LOWEST} else ZERO if name == "softmax" else LOWEST


def _attention(inside: Sequence[PaddingValue | None]) -> PaddingValue | None:
    """The padding after attention with padded heads; with a mask of their own it could be NaN, where a row is all masked."""
    return inside[2] if all(inside[:3]) and not any(inside[3:]) and LOWEST not in inside else None


def _pointwise(op: Op, name: str, inside: Sequence[PaddingValue | None]) -> PaddingValue | None:
    first, second = (*op.args, None)[:2]
    if name in ("mul", "div") and isinstance(first, Ref) and isinstance(second, (int, float)):
        return inside[0] if second > 0 or inside[0] != LOWEST else None
    if name == "add" and LOWEST in inside:
        return LOWEST
    if LOWEST in inside:
        return None
    if name == "mul":
        return ZERO if ZERO in inside else SOME
    if name in ("add", "sub"):
        return ZERO if len(inside) == 2 and set(inside) == {ZERO} else SOME
    if name in ZERO_TO_ZERO or (op.target == "aten.pow.Tensor_Scalar" and isinstance(second, (int, float)) and second >= 1):
        return inside[0]
    return SOME if name in FINITE else None


__all__ = ["LOWEST", "SOME", "ZERO", "PaddingValue", "content", "numbered", "scores"]
