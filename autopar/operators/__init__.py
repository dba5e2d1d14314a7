"""Sharding rules: a table from operators to the factors of their dims.

fit(op, values)                                -> OpSharding | None   which factors the op has
localise(op, fitted, operands, results, parts) -> args, kwargs        static arguments for local shapes
scale(op, fitted, parts)                       -> int                 the divisor of a local mean
row_of(op)                                     -> Rule                all facts about its operator
alias_of(op, values)                           -> Alias               whether the result shares its operand's memory
view_of(op, values)                            -> bool                whether it is planned so: no kernel, no price
writes(op)                                     -> names               the values that it changes in place
training_flag(op)                              -> name                the argument that follows the module's training mode
rule_of(target)                                -> Rule | None         the user's rule, else that of the tables

A row may have distributed forms besides its factors: ways to split otherwise whole dims, with messages inside.

`autopar.operators.dim_labels` has readable names of factors.
"""

from autopar.operators.registry import (
    RULES,
    alias_of,
    fit,
    fusible,
    localise,
    row_named,
    row_of,
    rule_of,
    scale,
    training_flag,
    view_of,
    writes,
)
from autopar.operators.rule import Factor, InternalCollective, OpSharding, OwnRows, ParallelForm, Rule, op

__all__ = [
    "RULES",
    "Factor",
    "InternalCollective",
    "OpSharding",
    "OwnRows",
    "ParallelForm",
    "Rule",
    "alias_of",
    "fit",
    "fusible",
    "localise",
    "op",
    "row_named",
    "row_of",
    "rule_of",
    "scale",
    "training_flag",
    "view_of",
    "writes",
]
