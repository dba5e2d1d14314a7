"""The table of all rules, including the user's, and the queries that the rest of the compiler makes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

from autopar.ir.layout import Shape
from autopar.ir.program import Argument, Op, Value, aten, overload, refs
from autopar.ir.schema import bound
from autopar.operators.call import Call, Local
from autopar.operators.certain_draws import CLASSES, NUMBERS
from autopar.operators.double_precision import DOUBLE
from autopar.operators.facts import Alias, Autocast, Mean, OpKind
from autopar.operators.families import (
    attention,
    backward_ops,
    concat_repeat,
    constructors,
    contraction,
    convolution,
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
from autopar.operators.rule import OpSharding, ParallelForm, Rule, op

FAMILIES: Mapping[str, ModuleType] = {  # under the titles of docs/operators.md
    "Element by element: one tensor": pointwise_unary,
    "Element by element: several tensors": pointwise_binary,
    "Random numbers": random_ops,
    "Sums of products": contraction,
    "Convolutions": convolution,
    "Views": views,
    "Joins and repetitions": concat_repeat,
    "Reading and writing at places": indexing,
    "Planes and windows": pooling_padding,
    "Reductions": reductions,
    "Attention": attention,
    "Softmax and norms": normalization,
    "Losses": losses,
    "Recurrent networks": recurrent,
    "Linear algebra and Fourier transforms": linalg_fft,
    "New tensors": constructors,
    "Backward operators": backward_ops,
}
FUSED = (  # families of operators that go over memory, of which torch.compile generates the kernels
    concat_repeat, constructors, indexing, losses, normalization, pointwise_binary, pointwise_unary, pooling_padding,
    random_ops, reductions,
)  # fmt: skip
RULES: Mapping[str, Rule] = {target: row for family in FAMILIES.values() for target, row in family.TABLE.items()}
OTHERS: Mapping[str, Rule] = {
    # of a library that need not be there
    "transformers.grouped_mm_fallback.default": contraction.GROUPED_ROWS,
    # in double precision
    **{double: RULES[target] for target, double in DOUBLE.items()},
    # in the place of what is drawn
    CLASSES: op("... _ -> ... _", alone=True),
    NUMBERS: op("..., ... -> ..."),
    # without a rule for splitting
    "aten._reshape_alias.default": Rule(alias=Alias.ALWAYS, kind=OpKind.RESHAPE),
    "aten.nll_loss2d.default": Rule(mean=Mean.TARGETS, autocast=Autocast.FP32),
    "aten.conv_tbc.default": Rule(autocast=Autocast.LOWER),
}
UNKNOWN = Rule()
# Operators that write, and those that return what they write, where the name does not tell, or is a word of Python (`from`).
RETURNING = {
    "aten.bernoulli_.float": "aten.bernoulli.p", "aten.normal_.default": "aten.normal_functional.default",
    "aten.transpose_.default": "aten.transpose.int", "aten.random_.from": "aten.randint_like.low_dtype",
}  # fmt: skip
REGISTERED: dict[str, Rule] = {}  # the user's, by `autopar.register_rule`
FOUND: dict[str, Rule] = {}  # of the user's autograd functions, by `autopar.operators.autograd_functions`


def rule_of(target: str) -> Rule | None:
    """The rule of an operator: the user's, else that of the tables."""
    return REGISTERED.get(target) or RULES.get(target) or FOUND.get(target) or OTHERS.get(target)


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
    """The distributed forms of an op; random ops have none."""
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
    """The divisor of the local result: the parts of the factors over which the op takes a mean, else 1."""
    rule = rule or rule_of(op.target)
    averages = rule.averages if rule else None
    if averages is None or not averages(Call.of(op)):
        return 1
    return math.prod(parts[f] for f in fitted.summed)


def row_of(op: Op) -> Rule:
    """The facts about an op's operator: its row, or an empty one."""
    return rule_of(op.target) or UNKNOWN


@functools.cache
def row_named(name: str) -> Rule:
    """What is known of an operator of ATen by its short name, "dropout", under which functions of torch are known too."""
    found = (rule for target, rule in RULES.items() if aten(target) == name)
    return next(found, UNKNOWN)


def alias_of(op: Op, values: Mapping[str, Value]) -> Alias:
    """Whether the results of an op share the memory of its first operand; without a row the schema tells."""
    if not op.operands:
        return Alias.NEVER
    rule = rule_of(op.target)
    if rule is not None:
        return rule.alias if isinstance(rule.alias, Alias) else rule.alias(Call.of(op, values))
    schema = overload(op.target)._schema
    shared = not schema.is_mutable and any(returned.alias_info is not None for returned in schema.returns)
    return Alias.ALWAYS if shared else Alias.NEVER


def view_of(op: Op, values: Mapping[str, Value]) -> bool:
    """Whether an op is planned as a view of its first operand: no kernel, no price."""
    return row_of(op).alias is not Alias.NEVER and alias_of(op, values) is not Alias.NEVER


def writes(op: Op) -> tuple[str, ...]:
    """The values that an op changes in place: by its schema, or by its row where the schema does not say so."""
    row, formals = row_of(op), overload(op.target)._schema.arguments
    changed = row.writes or tuple(a.name for a in formals if a.alias_info is not None and a.alias_info.is_write)
    if not changed:
        return ()
    arguments = bound(op)
    if row.writes and row.training and not arguments[row.training]:
        return ()
    return tuple(ref.name for name in changed for ref in refs(arguments[name]))


def fusible(op: Op) -> bool:
    """Whether `torch.compile` generates the kernel of an op, instead of calling a hand-written one."""
    row = row_of(op)
    return any(op.target in family.TABLE for family in FUSED) and row.flops is None and not row.alone and not writes(op)


def training_flag(op: Op) -> str:
    """The argument of an op that follows the module's training mode, by name; empty if there is none.

    A norm that keeps no running statistics takes those of the batch in evaluation too.
    """
    row = row_of(op)
    kept = not row.writes or any(refs(tuple(bound(op)[name] for name in row.writes)))
    return row.training if kept else ""
