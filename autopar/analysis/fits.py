"""Fits the rule of every op of a program to its shapes, once for padding, micro-batches and analysis.

Ops of equal signature share one result; a model of many layers has many such ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.analysis.own_orders import own_rows
from autopar.analysis.signatures import signature
from autopar.ir.program import Program, remembered
from autopar.operators import OpSharding, OwnRows, Rule, fit, rule_of


def fit_of(program: Program, op: str) -> OpSharding | None:
    """The factors of an op under its current rule; None without a rule. Raises RuleError if the rule does not fit."""
    fitted, own = _fit(program, op, rule_of(program.op[op].target)), own_rows_of(program).get(op)
    return replace(fitted, own=own) if fitted and own else fitted


@remembered
def own_rows_of(program: Program) -> Mapping[str, OwnRows]:
    """How ops of a program run on each rank's own rows, by op name."""
    return own_rows(program, lambda op: _fit(program, op.name, rule_of(op.target)))


@remembered
def _fit(program: Program, op: str, rule: Rule | None) -> OpSharding | None:
    known, one = _of_kind(program, rule), program.op[op]
    kind = signature(one, program.values)
    if kind not in known or (rule and rule.when):  # `when` may depend on a number that the signature leaves out
        known[kind] = fit(one, program.values, rule=rule)
    return known[kind]


@remembered
def _of_kind(program: Program, rule: Rule | None) -> dict[str, OpSharding | None]:
    """The shardings that a rule gave to ops of a program, by op signature."""
    return {}
