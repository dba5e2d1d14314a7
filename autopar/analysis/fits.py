"""The sharding of every op of a program by its rule, found once: padding, micro-batches and analysis all ask for it."""

from __future__ import annotations

from autopar.ir.program import Program, remembered
from autopar.operators import OpSharding, Rule, fit, rule_of


def fit_of(program: Program, op: str) -> OpSharding | None:
    """The factors of the op of this name by its present rule; None without a rule. Raises RuleError where it does not fit."""
    return _fit(program, op, rule_of(program.op[op].target))


@remembered
def _fit(program: Program, op: str, rule: Rule | None) -> OpSharding | None:
    return fit(program.op[op], program.values, rule=rule)
