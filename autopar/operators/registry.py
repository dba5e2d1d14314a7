"""The table of all rules with those that the user registered, and what the rest of the compiler asks of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir.layout import Shape
from autopar.ir.program import Argument, Op, Value
from autopar.operators.call import Call, Local
from autopar.operators.families import (
    attention,
    backward_ops,
    concat_repeat,
    constructors,
    contraction,
    indexing,
    linalg_fft,
    losses,
    normalization,
    pointwise_binary,
    pointwise_unary,
    pooling_padding,
    random_ops,
    recurrent,
    reductions,
    views,
)
from autopar.operators.rule import OpSharding, ParallelForm, Rule

FAMILIES = (
    pointwise_unary,
    pointwise_binary,
    random_ops,
    contraction,
    views,
    concat_repeat,
    indexing,
    pooling_padding,
    reductions,
    attention,
    normalization,
    losses,
    recurrent,
    linalg_fft,
    constructors,
    backward_ops,
)
RULES: Mapping[str, Rule] = {target: row for family in FAMILIES for target, row in family.TABLE.items()}
OTHERS: Mapping[str, Rule] = {  # of libraries that need not be there
    "transformers.grouped_mm_fallback.default": contraction.GROUPED_PRODUCT,
}
REGISTERED: dict[str, Rule] = {}  # the user's, by `autopar.register_rule`


def rule_of(target: str) -> Rule | None:
    """The rule of an operator: the user's, else that of the tables."""
    return REGISTERED.get(target) or RULES.get(target) or OTHERS.get(target)


def fit(op: Op, values: Mapping[str, Value], *, rule: Rule | None = None) -> OpSharding | None:
    """The factors of an op's dims by its rule, or by the one given; None if there is no rule for it.

    Raises RuleError where a rule does not fit the shapes.
    """
    rule = rule or rule_of(op.target)
    if rule is None:
        return None
    call = Call.of(op, values)
    fitted = rule.fit(call)
    if fitted and rule.linear:
        fitted = replace(fitted, linear=call.linear(rule.linear))
    return replace(fitted, distributed=_distributed(rule, fitted, call)) if fitted and rule.distributed else fitted


def _distributed(rule: Rule, fitted: OpSharding, call: Call) -> tuple[ParallelForm, ...]:
    """The distributed forms that serve an op; what draws random numbers has none."""
    present = {factor.name for factor in fitted.factors if factor.size}
    able = (form for form in rule.distributed if present.issuperset(form.factors) and form.able(call))
    return () if fitted.random else tuple(able)


def localise(
    op: Op,
    fitted: OpSharding,
    operands: Sequence[Shape],
    results: Sequence[Shape],
    parts: Sequence[int],
    *,
    rule: Rule | None = None,
) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
    """The op's args and kwargs on one rank: `operands` and `results` are local shapes, factor f is split into `parts[f]`."""
    rule = rule or rule_of(op.target)
    local = rule.local if rule else None
    if local is None or all(n == 1 for n in parts):
        return op.args, op.kwargs
    call = Call.of(op)
    return call.change(local(call, Local(fitted=fitted, operands=operands, results=results, parts=parts)))


def scale(op: Op, fitted: OpSharding, parts: Sequence[int], *, rule: Rule | None = None) -> int:
    """What the local result must be divided by: the parts of the factors over which the op takes a mean, else 1."""
    rule = rule or rule_of(op.target)
    averages = rule.averages if rule else None
    if averages is None or not averages(Call.of(op)):
        return 1
    return math.prod(parts[f] for f in fitted.summed)


def view_of(op: Op) -> bool:
    """Whether the results share the memory of the first operand: no kernel, no price."""
    rule = rule_of(op.target)
    return rule is not None and rule.view
