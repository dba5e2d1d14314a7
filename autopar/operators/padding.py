"""The contents of a value's padding, and how an operator changes them: the `padding` of a row.

ZERO      zeros            the padding of a weight, and what products and gelu make of it
SOME      finite numbers   sigmoid(0), say: a sum over it needs zeros beside it
LOWEST    minus infinity   scores that no distribution sees
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from autopar.ir.program import Op, Ref
from autopar.ir.schema import bound
from autopar.operators.rule import OpSharding


class PaddingValue(Enum):
    """What stands in the padding."""

    ZERO = "zeros"
    SOME = "finite numbers"
    LOWEST = "minus infinity"


ZERO, SOME, LOWEST = PaddingValue
Inside = Sequence[PaddingValue | None]  # what stands in the padding of each operand; None: it does not have the factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """An op with one padded factor.

    `gone`: the factor is in no result, so that any answer says that the results are what they are without padding.
    """

    op: Op
    fitted: OpSharding
    factor: int
    inside: Inside
    gone: bool

    @property
    def whole(self) -> bool:
        """Whether the position of an element along the factor matters."""
        return self.fitted.factors[self.factor].whole

    @property
    def held(self) -> frozenset[PaddingValue]:
        """All contents of the operands' padding."""
        return frozenset(found for found in self.inside if found)

    @property
    def only(self) -> PaddingValue | None:
        """The contents of all operands' padding, if they agree."""
        return next(iter(self.held)) if len(self.held) == 1 and all(self.inside) else None


Padding = Callable[[Padded], PaddingValue | None]  # what stands in the padding of the results; None: they would change


def elementwise(rule: Padding) -> Padding:
    """A rule for results that have the factor, wherever along it an element stands."""
    return lambda padded: None if padded.gone or padded.whole else rule(padded)


@elementwise
def arranged(padded: Padded) -> PaddingValue | None:
    """Elements go where they go: what stands in the padding of all operands."""
    return padded.only


@elementwise
def zero_to_zero(padded: Padded) -> PaddingValue | None:
    """Zeros stay zeros, finite numbers finite."""
    return None if LOWEST in padded.held else padded.inside[0]


@elementwise
def finite(padded: Padded) -> PaddingValue | None:
    """Finite numbers, of zeros too."""
    return None if LOWEST in padded.held else SOME


def normalised(padded: Padded) -> PaddingValue | None:
    """Finite numbers: of zeros, which have no spread, only where a number is added to that."""
    return None if bound(padded.op)["eps"] == 0 else finite(padded)


@elementwise
def bounded(padded: Padded) -> PaddingValue | None:
    """Zeros stay zeros between bounds on both sides of zero; else they become the nearer bound."""
    low, high = (bound(padded.op)[name] for name in ("min_val", "max_val"))
    around = isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= 0 <= high
    return zero_to_zero(padded) if around else finite(padded)


@elementwise
def scaled(padded: Padded) -> PaddingValue | None:
    """A tensor times or divided by a positive number keeps what it has; a product of two has zeros where one of them has."""
    first, second = (*padded.op.args, None)[:2]
    if isinstance(first, Ref) and isinstance(second, (int, float)):
        return padded.inside[0] if second > 0 or padded.inside[0] != LOWEST else None
    if LOWEST in padded.held:
        return None
    return ZERO if ZERO in padded.held else SOME


@elementwise
def divided(padded: Padded) -> PaddingValue | None:
    """A tensor divided by a positive number keeps what it has; divided by a tensor it may be anything."""
    return scaled(padded) if isinstance((*padded.op.args, None)[1], (int, float)) else None


@elementwise
def added(padded: Padded) -> PaddingValue | None:
    """A sum is minus infinity where one is, and zero where both are; infinities of both signs have no sum."""
    if LOWEST in padded.held:
        times = bound(padded.op).get("alpha", 1)
        return LOWEST if LOWEST not in padded.inside[1:] or (isinstance(times, (int, float)) and times > 0) else None
    return ZERO if padded.only is ZERO and len(padded.inside) == 2 else SOME


@elementwise
def subtracted(padded: Padded) -> PaddingValue | None:
    """A difference is zero where both are."""
    if LOWEST in padded.held:
        return None
    return ZERO if padded.only is ZERO and len(padded.inside) == 2 else SOME


@elementwise
def power(padded: Padded) -> PaddingValue | None:
    """A whole power of at least one keeps zeros. Other powers are no number where that may be negative, and have some infinite
    derivative at zero: x^1.5 the second.
    """
    exponent = (*padded.op.args, None)[1]
    possible = isinstance(exponent, (int, float)) and exponent >= 1 and exponent % 1 == 0
    return zero_to_zero(padded) if possible else None


def product(padded: Padded) -> PaddingValue | None:
    """What is summed away needs zeros; else a product with zeros is zeros, if zeros are added."""
    if LOWEST in padded.held or padded.whole:
        return None
    if padded.gone:
        return ZERO if ZERO in padded.held else None
    added = {padded.inside[position] for position in padded.fitted.added}
    multiplied = (found for position, found in enumerate(padded.inside) if position not in padded.fitted.added)
    return ZERO if added <= {ZERO} and ZERO in multiplied else SOME


def named(padded: Padded) -> PaddingValue | None:
    """Rows or scores that no index names are not seen."""
    return ZERO if padded.gone and padded.inside[0] and not any(padded.inside[1:]) else None


def embedded(padded: Padded) -> PaddingValue | None:
    """Rows that no index names are not seen; columns go where they go."""
    if padded.gone:
        return named(padded)
    return None if padded.whole or not padded.inside[0] or len(padded.held) > 1 else padded.inside[0]


def classified(padded: Padded) -> PaddingValue | None:
    """Classes that no distribution sees; with label smoothing all are seen."""
    unseen = padded.inside[0] == LOWEST and not any(padded.inside[1:]) and bound(padded.op)["label_smoothing"] == 0
    return ZERO if padded.gone and unseen else None


def summed(padded: Padded) -> PaddingValue | None:
    """A sum over zeros."""
    return ZERO if padded.gone and padded.inside[0] == ZERO else None


def log_sum(padded: Padded) -> PaddingValue | None:
    """A sum over exponentials of minus infinity."""
    return ZERO if padded.gone and padded.inside[0] == LOWEST else None


def distribution(over: PaddingValue) -> Padding:
    """Of minus infinity it makes `over`, if it is normalized over the factor; else of finite numbers finite ones."""

    def rule(padded: Padded) -> PaddingValue | None:
        if padded.gone:
            return None
        if not padded.whole:
            return None if LOWEST in padded.held else SOME
        return over if padded.held == {LOWEST} else None

    return rule


def attention(padded: Padded) -> PaddingValue | None:
    """Heads; a mask of their own that is false throughout their padding would leave them without a number."""
    heads = all(padded.inside[:3]) and not any(padded.inside[3:]) and LOWEST not in padded.held
    return padded.inside[2] if heads and not padded.gone and not padded.whole else None


NUMBERED = (embedded, named, classified)  # of operators that find elements by their number, which padding must not change
