"""Sharding rules: a table from operators to the factors of their dims.

fit(op, values)                                -> OpSharding | None   which factors the op has
localise(op, fitted, operands, results, parts) -> args, kwargs        static arguments for local shapes
scale(op, fitted, parts)                       -> int                 what a local mean must be divided by
view_of(op)                                    -> bool                whether the result shares its operand's memory
rule_of(target)                                -> Rule | None         the user's rule, else that of the tables

A row may have distributed forms beside its factors: ways to split what is otherwise whole, with messages inside.

`autopar.operators.dim_labels` says what factors mean to a person.
"""

from autopar.operators.registry import RULES, fit, localise, rule_of, scale, view_of
from autopar.operators.rule import Factor, InternalCollective, OpSharding, ParallelForm, Rule, op

__all__ = [
    "RULES",
    "Factor",
    "InternalCollective",
    "OpSharding",
    "ParallelForm",
    "Rule",
    "fit",
    "localise",
    "op",
    "rule_of",
    "scale",
    "view_of",
]
