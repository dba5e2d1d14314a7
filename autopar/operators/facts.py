"""The vocabulary for facts about an operator in its row of the table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Alias(Enum):
    """Whether the results share the memory of the first operand."""

    NEVER = "a copy"
    ALWAYS = "a view, or the operand itself"
    MAYBE = "a view where strides allow, else a copy"  # what is priced and planned as a view


class Autocast(Enum):
    """What torch.autocast does with the floating-point operands ("Autocast Op Reference", documentation of torch.amp)."""

    LOWER = "cast to the lower precision"
    FP32 = "cast to float32"
    WIDEST = "cast to float32 if one of them is float32"


class Mixed(Enum):
    """What a mixed precision does with an operator that autocast leaves alone."""

    FP32 = "cast to float32"
    LOWER = "cast to half precision, as products are"
    FILL = "cast to float32 if it fills in a number that half precision cannot hold"


class OpKind(Enum):
    """Operators that rewrites and analyses treat alike."""

    SAME = "the operand itself, or a copy of it"
    CAST = "the operand in another dtype"
    RESHAPE = "the operand's elements in their order, in another shape"
    MEMORY = "the operand's memory read as another dtype"
    EXPAND = "the operand broadcast"
    FILL = "one number everywhere"
    DRAW = "floating-point numbers drawn from a distribution, and nothing else"
    DRAW_INTEGERS = "whole numbers drawn from a range, and nothing else"
    DRAW_COUNTS = "counts drawn from a distribution, and nothing else"
    DRAW_CLASSES = "classes drawn by their weights, and nothing else"
    DROPOUT = "the operand with some elements zeroed by a mask of its size"
    AND = "true where both operands are"
    OR = "true where one of the operands is"
    SOFTMAX = "exponentials over their sum along a dim"
    NORM = "elements normalised by the statistics of some of them"
    ATTENTION = "fused attention: query, key, value, mask"
    PLACES = "the places along a dim of what is largest or smallest there, or of all in their order, in the last result"
    RECURRENT = "a recurrent layer: sequence, states, parameters"


class Mean(Enum):
    """What a loss with reduction="mean" divides the sum by."""

    ELEMENTS = "the elements of input and target, broadcast"
    TARGETS = "the targets that are not ignored, or their weights"


@dataclass(frozen=True, slots=True)
class Says:
    """The common names of an operator and the factors of its rule: `n` of a linear is its out-features."""

    name: str
    factors: tuple[tuple[str, str], ...] = ()

    def factor(self, name: str) -> str:
        """The common name of this factor; empty if there is none."""
        return dict(self.factors).get(name, "")


def says(name: str, **factors: str) -> Says:
    """The words for an operator: `says("linear", k="in-features", n="out-features")`."""
    return Says(name, tuple(factors.items()))


__all__ = ["Alias", "Autocast", "Mean", "Mixed", "OpKind", "Says", "says"]
