"""Index analysis: integer and boolean values as formulas in their coordinates, without evaluating them.

The `index_fact` of an operator's row derives the fact about a result from those about operands; results of other operators are
unknown.
"""

from __future__ import annotations

import math

import torch

from autopar.ir.program import Program, Value
from autopar.ir.schema import bound
from autopar.operators import row_of
from autopar.operators.index_facts import affine
from autopar.operators.index_facts.affine import Affine, Fact, Select
from autopar.operators.index_facts.call import IndexCall, formula, number


def facts(program: Program) -> dict[str, Fact]:
    """The facts about the values of a program, by name; values without a fact are missing."""
    known: dict[str, Fact] = {}
    for op in program.ops:
        result = op.results[0]
        rule = row_of(op).index_fact
        if rule is None or len(op.results) != 1 or 0 in result.shape:
            continue
        fact = rule(IndexCall(op=op, values=program.values, known=known, named=bound(op)))
        fact = None if fact is None else _typed(fact, result)
        if fact is not None:
            known[result.name] = fact
    return known


def _typed(fact: Fact, result: Value) -> Fact | None:
    """The fact in the result's dtype: formulas for booleans, integers within range, floats with at most two values."""
    if result.dtype is torch.bool:
        return formula(fact, result.shape)
    held = number(fact, result.shape)
    if result.dtype.is_floating_point or held is None:
        return None if isinstance(held, Affine) and not held.constant else held
    if result.dtype.is_complex:
        return None
    limits = torch.iinfo(result.dtype)
    few = [held.yes, held.no] if isinstance(held, Select) else [*affine.bounds(held, result.shape)]
    if not all(math.isfinite(one) and limits.min <= one <= limits.max for one in few):
        return None
    if isinstance(held, Select):
        return affine.chosen(held.when, int(held.yes), int(held.no), len(result.shape))
    return Affine(held.scale, int(held.base))
