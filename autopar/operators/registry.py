"""The table of all rules with those that the user registered, and what the rest of the compiler asks of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir.program import Argument, Op, Value
from autopar.operators.call import Call, Local
from autopar.operators.families import (
    attention,
    contraction,
    losses,
    pointwise,
    recurrent,
    reductions,
    views,
)
from autopar.operators.families import (
    backward_ops as gradients,
)
from autopar.operators.families import (
    concat_repeat as arrange,
)
from autopar.operators.families import (
    constructors as factories,
)
from autopar.operators.families import (
    indexing as places,
)
from autopar.operators.families import (
    linalg_fft as algebra,
)
from autopar.operators.families import (
    normalization as normalise,
)
from autopar.operators.families import (
    pooling_padding as windows,
)
from autopar.operators.fitting import Shape
from autopar.operators.rule import OpSharding, ParallelForm, Rule

ALIASES = {  # torch's second names
    "aten.multiply": "aten.mul",
    "aten.subtract": "aten.sub",
    "aten.divide": "aten.div",
    "aten.absolute": "aten.abs",
    "aten.clip": "aten.clamp",
    "aten.concat": "aten.cat",
    "aten.concatenate": "aten.cat",
    "aten.greater": "aten.gt",
    "aten.greater_equal": "aten.ge",
    "aten.less": "aten.lt",
    "aten.less_equal": "aten.le",
    "aten.not_equal": "aten.ne",
    "aten.lift_fresh_copy": "aten.clone",
    "aten.special_expit": "aten.sigmoid",
    **{f"aten.arc{name}": f"aten.a{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tanh", "tan2")},
}
FORMS = ("default", "Tensor", "Scalar")

TABLE: dict[str, Rule] = {
    **pointwise.TABLE,
    **contraction.TABLE,
    **views.TABLE,
    **arrange.TABLE,
    **places.TABLE,
    **windows.TABLE,
    **reductions.TABLE,
    **attention.TABLE,
    **normalise.TABLE,
    **losses.TABLE,
    **recurrent.TABLE,
    **algebra.TABLE,
    **factories.TABLE,
    **gradients.TABLE,
}

RULES: Mapping[str, Rule] = TABLE | {
    f"{second}.{form}": TABLE[f"{first}.{form}"]
    for second, first in ALIASES.items()
    for form in FORMS
    if f"{first}.{form}" in TABLE
}


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
