"""The law of rules on every distributed form: its ranks run at once, as threads; forms that are wrong are caught."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import RuleError
from autopar.rules import RULES, fit
from autopar.rules.law import check, distributed_trials
from autopar.runtime.forms import FORMS
from autopar.runtime.lockstep import ranks
from tests.rules.examples import EXAMPLES

TARGETS = sorted(target for target, rule in RULES.items() if rule.distributed)


def test_every_form_of_the_table_can_be_run_and_every_function_is_in_the_table() -> None:
    assert {form.name for rule in RULES.values() for form in rule.distributed} == set(FORMS)


@pytest.mark.parametrize("target", TARGETS)
def test_the_ranks_of_a_distributed_form_together_give_the_whole(target: str) -> None:
    tried = set()
    for example in EXAMPLES[target]:
        op, values, tensors = example.build(target)
        fitted = fit(op, values)
        assert fitted is not None
        trials = list(distributed_trials(fitted))
        tried |= {form.name for form in fitted.distributed if trials}
        assert check(op, values, tensors, ranks=ranks) == check(op, values, tensors) + len(trials)
    assert tried == {form.name for form in RULES[target].distributed}


WRONG = [("aten.embedding.default", {"results": "I"}), ("aten.embedding.default", {"factors": ("h",)})]


@pytest.mark.parametrize("target, wrong", WRONG)
def test_a_wrong_form_is_caught(target: str, wrong: dict[str, object]) -> None:
    rule = RULES[target]
    rule = replace(rule, distributed=tuple(replace(form, **wrong) for form in rule.distributed))  # type: ignore[arg-type]
    op, values, tensors = EXAMPLES[target][0].build(target)
    with pytest.raises(RuleError, match=f"the rule of {target} is wrong"):
        check(op, values, tensors, rule=rule, ranks=ranks)
