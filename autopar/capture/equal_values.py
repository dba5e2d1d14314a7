"""Value numbering: which values of a program under construction are equal, by operators and operands.

a = ne(labels, -100)
b = ne(labels, -100)      a and b have one number
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from autopar.ir.builder import Builder
from autopar.ir.layout import Shape
from autopar.ir.program import Argument, Op, Ref, Static, Value, aten, overload, substitute
from autopar.operators import row_of, writes
from autopar.operators.facts import OpKind


def broadcasts(builder: Builder, mask: Ref, flat: Ref, shape: Shape) -> bool:
    """Whether a mask, broadcast to a shape, has in each leading place the value of a flat mask there."""
    values = builder.values
    if len(values[mask.name].shape) != len(shape):
        return False
    root, no = _root(builder, mask)
    leading = values[root.name].shape
    rows = (_root(builder, flat), _root(builder, whole(_made(builder), flat)))
    return shape[: len(leading)] == leading and any(
        values[row.name].shape == leading and no == not_row and _alike(builder, root, row) for row, not_row in rows
    )


def _root(builder: Builder, mask: Ref) -> tuple[Ref, bool]:
    """The mask behind one that only adds trailing dims of size 1 and expands; and whether it is negated."""
    made, values, opposite = _made(builder), builder.values, False
    while (op := made.get(mask.name)) is not None:
        before = values[op.operands[0]].shape if op.operands else ()
        match aten(op.target):
            case "bitwise_not" | "logical_not" if values[op.operands[0]].dtype is torch.bool:
                opposite = not opposite
            case "unsqueeze" if op.args[1] in (-1, len(before)):
                pass
            case "expand" if len(before) == len(values[mask.name].shape):
                pass
            case _:
                break
        mask = Ref(op.operands[0])
    return mask, opposite


def reshaped(builder: Builder, one: Ref, other: Ref) -> bool:
    """Whether two values of one shape are equal, up to reshapes in between."""
    made, values = _made(builder), builder.values
    return one == other or (values[one.name].shape == values[other.name].shape and whole(made, one) == whole(made, other))


def counts(builder: Builder, lengths: Ref, flat: Ref, batch: int) -> bool:
    """Whether lengths count the true places in each row of a mask, given its flat form."""
    op, values = _made(builder).get(lengths.name), builder.values
    if op is None or op.target != "aten.sum.dim_IntList":
        return False
    mask, (dims, *rest) = op.operands[0], op.args[1:]
    shape = values[mask].shape
    alone = len(shape) == 2 and shape[0] == batch and dims in ((-1,), (1,)) and not any(rest)
    row, opposite = _root(builder, whole(_made(builder), flat))
    return alone and not opposite and values[row.name].shape == shape and _alike(builder, Ref(mask), row)


def _alike(builder: Builder, one: Ref, other: Ref) -> bool:
    numbers = _numbers(builder)
    return numbers[one.name] == numbers[other.name]


def whole(made: Mapping[str, Op], value: Ref) -> Ref:
    """The value before it was reshaped."""
    while (op := made.get(value.name)) is not None and row_of(op).kind in (OpKind.RESHAPE, OpKind.SAME):
        value = Ref(op.operands[0])
    return value


def _made(builder: Builder) -> dict[str, Op]:
    return {result.name: op for op in builder.ops for result in op.results}


def _numbers(builder: Builder) -> dict[str, int]:
    """A number for each value; values that are computed in the same way have the same number."""
    made = _made(builder)
    return numbered([name for name in builder.values if name not in made], builder.ops, builder.values, {})


def numbered(given: Iterable[str], ops: Iterable[Op], values: Mapping[str, Value], known: dict[str, int]) -> dict[str, int]:
    """A number for each given value and each result of ops, equal for equal computations on equal operands.

    An op that draws random numbers, or writes, is numbered apart, by its position among such ops. `known` has the numbers of
    the texts that describe how values are computed, including those of other programs.
    """
    found = {name: known.setdefault(f"given {name}", len(known)) for name in given}
    alone, roots = 0, dict[str, str]()

    def number(leaf: Ref | Static) -> Argument:
        return Ref(str(found[leaf.name])) if isinstance(leaf, Ref) else leaf

    for op in ops:
        formula = f"{op.target} {substitute(op.args, number)} {[(name, substitute(one, number)) for name, one in op.kwargs]}"
        if torch.Tag.nondeterministic_seeded in overload(op.target).tags or writes(op):
            formula, alone = f"{formula} alone {alone}", alone + 1
        if row_of(op).kind is OpKind.RESHAPE:  # reshaping back and forth changes nothing
            (before,), (result,) = op.operands[:1], op.results
            roots[result.name] = root = roots.get(before, before)
            if result.shape == values[root].shape:
                found[result.name] = found[root]
                continue
            formula = f"reshaped {found[root]} {result.shape}"
        for place, result in enumerate(op.results):
            found[result.name] = known.setdefault(f"{formula} {place}", len(known))
    return found


__all__ = ["broadcasts", "counts", "numbered", "reshaped", "whole"]
