"""Rules for the user's operators: checked by execution, and kept in addition to the table.

autopar.register_rule("mylib::scaled", "... n, n -> ... n", linear="x, scale", example=(x, scale))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.errors import RuleError
from autopar.ir.program import Argument, overload, qualified
from autopar.operators.checking.execution_check import check, trials
from autopar.operators.checking.sample_call import Arguments, Example, target_of
from autopar.operators.notation import parse
from autopar.operators.registry import REGISTERED, RULES, fit, rule_of
from autopar.operators.rule import Rule, always
from autopar.operators.rule import op as row


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The checks that a rule passed on one call: each factor split, and each group of operands made of addends."""

    operator: str
    rule: str  # fitted to the call
    factors: tuple[str, ...]  # the factors that were split
    linear: tuple[str, ...]  # groups of operands, by position
    trials: int
    gradients: bool  # whether gradients were compared too

    def __str__(self) -> str:
        compared = "values and gradients" if self.gradients else "values only: it has no derivative"
        rows = (
            ("split", ", ".join(self.factors) or "nothing"),
            ("linear in", ", ".join(self.linear)),
            ("checked", f"{self.trials} ways to run it, {compared}" if self.trials else "nothing"),
        )
        return "\n".join([f"{self.operator}  {self.rule}", *(f"  {name:<9}  {said}" for name, said in rows if said)])


def check_rule(
    op: object,
    arguments: Arguments,
    *,
    rule: str | None = None,
    linear: str = "",
    averages: bool = False,
    when: Mapping[str, object] | None = None,
) -> Checked:
    """Check an operator's rule, or the one given, by execution: run it on parts, join them, and compare with the whole.

    Values are compared, and the gradients of the tensors that require them (of all floating-point ones if none does).

    Args:
        op: An overload, `"mylib::op"`, or what `torch.library.custom_op` returned.
        arguments: The arguments of one call, in order or by name: tensors of random numbers, with dims of different divisible
            sizes.
        rule: A pattern to check instead of the operator's own rule; `linear`, `averages` and `when` belong to it, as in
            `register_rule`.
        linear: Groups of arguments in which the operator is jointly linear.
        averages: Whether sums over a factor are divided by its size.
        when: The static arguments for which the rule holds.

    Returns:
        The checks that the rule passed.

    Raises:
        RuleError: The rule is wrong: the error says which factor was split how, which tensor is wrong, and by how much. Or the
            operator has no rule for this call.

    >>> print(check_rule("aten::mm", (torch.randn(4, 6), torch.randn(6, 10))))
    aten::mm  m k, k n -> m n
      split      m, k, n
      linear in  0, 1
      checked    18 ways to run it, values and gradients
    """
    example = Example.of(op, arguments)
    target = example.op.target
    given = _row(target, rule, linear, averages, when) if rule is not None else None
    fitted = fit(example.op, example.values, rule=given)
    if fitted is None:
        known = rule_of(target)
        raise RuleError(
            f"{qualified(target)} has no sharding rule" + (" for this call" if given or known else ""),
            rule=given or known,
            fix=f'autopar.register_rule("{qualified(target)}", "..."); autopar.discover_rule finds the line',
        )
    _telling(example)
    count = check(example.op, example.values, example.tensors, rule=given)
    split = {which for trial in trials(fitted) for kind, which, _ in trial.forms if kind == "split"}
    return Checked(
        operator=qualified(target),
        rule=str(fitted),
        factors=tuple(factor.name for place, factor in enumerate(fitted.factors) if place in split),
        linear=tuple(" and ".join(map(str, sorted(group))) for group in fitted.linear),
        trials=count,
        gradients=example.gradients,
    )


def register_rule(
    op: object,
    rule: str,
    *,
    linear: str = "",
    averages: bool = False,
    when: Mapping[str, object] | None = None,
    example: Arguments | None = None,
    replace: bool = False,
) -> None:
    """Give an operator a sharding rule, `"... k, n k, +n -> ... n"`: names for the dims of its tensors, operands -> results.

    Dims of one name are split together. A factor in no result is summed away: split, it leaves a partial sum. `!` keeps a
    factor whole, `+` marks an operand that is added once, `(a b)` is one dim made of two factors, `[a]` a dim that a tensor may
    lack, `...` any dims, `... @dim ...` any dims of which the argument `dim` names some, `_` a dim that stays whole. The whole
    grammar is in `autopar.operators.notation`.

    Args:
        op: An overload, `"mylib::op"`, or what `torch.library.custom_op` returned.
        rule: The pattern.
        linear: Groups of arguments in which the operator is jointly linear: `"input bias, weight bias"`.
        averages: Whether sums over a factor are divided by its size, as in a mean.
        when: The static arguments for which the rule holds, `{"dim": -1}`; other calls have no rule.
        example: The arguments of a call, on which the rule is checked first (see `check_rule`).
        replace: Whether to replace a different rule that the operator already has.

    Raises:
        RuleError: The rule is wrong, cannot be read, or, without `replace`, differs from the operator's present rule. It is
            then not registered.
    """
    target = target_of(op, () if example is None else example)
    made, known = _row(target, rule, linear, averages, when), rule_of(target)
    if known is not None and known != made and not replace:
        raise RuleError(
            f"{qualified(target)} has another sharding rule already",
            rule=known,
            new=made,
            fix="replace=True, if the new one is right",
        )
    if example is not None:
        check_rule(op, example, rule=rule, linear=linear, averages=averages, when=when)
    REGISTERED[target] = made


def _row(target: str, rule: str, linear: str, averages: bool, when: Mapping[str, object] | None) -> Rule:
    """The rule as a row of the table; raises RuleError if it does not match the operator's schema."""
    if not isinstance(rule, str):
        raise RuleError(f"the rule {rule!r} is not text", op=target, fix='a pattern: "... k, n k -> ... n"')
    schema, pattern = overload(target)._schema, parse(rule)
    tensors = [a for a in schema.arguments if "Tensor" in str(a.type)]
    least = sum(1 for a in tensors if not str(a.type).startswith("Optional"))
    named = len(pattern.operands)
    if not any("List" in str(a.type) for a in tensors) and not least <= named <= len(tensors):
        wanted = str(least) if least == len(tensors) else f"{least} to {len(tensors)}"
        raise _misnamed(target, f"names {named} operands, the operator has {wanted}", rule)
    several = [str(returned.type) for returned in schema.returns]
    if "List[Tensor]" not in several and len(pattern.results) != len(several):
        raise _misnamed(target, f"names {len(pattern.results)} results, the operator has {len(several)}", rule)
    formals = {a.name: a for a in schema.arguments}
    for name in [*linear.replace(",", " ").split(), *(when or {}), *pattern.arguments]:
        if name not in formals:
            raise _misnamed(target, f"speaks of {name!r}, which is not an argument: {', '.join(formals)}", rule)
    made = row(
        rule,
        linear=linear,
        averages=always if averages else None,
        random=torch.Tag.nondeterministic_seeded in overload(target).tags,
        when={name: _static(value) for name, value in (when or {}).items()},
    )
    known = RULES.get(target, made)  # other facts about the operator, beside how it splits, are kept
    return dataclasses.replace(
        known, text=made.text, shapes=None, linear=made.linear, local=None, averages=made.averages, random=made.random,
        when=made.when, distributed=(),
    )  # fmt: skip


def _misnamed(target: str, why: str, rule: str) -> RuleError:
    return RuleError(f"the rule of {qualified(target)} {why}", rule=rule, schema=str(overload(target)._schema))


def _static(value: object) -> Argument:
    return tuple(map(_static, value)) if isinstance(value, (list, tuple)) else value  # type: ignore[return-value]


def _telling(example: Example) -> None:
    """Raise RuleError for an example whose numbers are all equal: wrong rules would pass too."""
    floats = [tensor for tensor in example.tensors.values() if tensor.dtype.is_floating_point and tensor.numel() > 1]
    if floats and all(bool((tensor == tensor.flatten()[0]).all()) for tensor in floats):
        raise RuleError(
            f"the example of {qualified(example.op.target)} proves nothing: every number in a tensor is the same",
            fix="random numbers: torch.randn",
        )


__all__ = ["Checked", "check_rule", "register_rule"]
