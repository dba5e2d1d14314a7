"""The law of rules on every distributed form: its ranks run at once, as threads; forms that are wrong are caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (the operator)

from autopar.errors import RuleError
from autopar.rules import RULES, fit
from autopar.rules.example import Example as Called
from autopar.rules.law import check, distributed_trials
from autopar.rules.table import OTHERS
from autopar.runtime.forms import FORMS
from autopar.runtime.lockstep import ranks
from tests.rules.examples import EXAMPLES

TARGETS = sorted(target for target, rule in RULES.items() if rule.distributed)
GROUPED = "transformers.grouped_mm_fallback.default"


def test_every_form_of_the_table_can_be_run_and_every_function_is_in_the_table() -> None:
    rules = (*RULES.values(), *OTHERS.values())
    assert {form.name for rule in rules for form in rule.distributed} == set(FORMS)


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


@pytest.mark.parametrize("ends", [(3, 6, 9, 12), (2, 7, 10, 12), (0, 0, 12, 12), (12, 12, 12, 12), (1, 2, 3, 9)], ids=str)
def test_experts_get_their_rows_however_many_they_are(ends: tuple[int, ...]) -> None:
    given = torch.randn(12, 5).double(), torch.randn(4, 5, 6).double(), torch.tensor(ends, dtype=torch.int32)
    op, values, tensors = (made := Called.of("transformers::grouped_mm_fallback", given)).op, made.values, made.tensors
    fitted = fit(op, values)
    assert fitted is not None
    assert str(fitted) == "t! k, e! k n, e! -> t! n"
    trials = list(distributed_trials(fitted))
    assert len(trials) == 6
    assert check(op, values, tensors, ranks=ranks) == check(op, values, tensors) + len(trials)


WRONG = [("aten.embedding.default", {"results": "I"}), ("aten.embedding.default", {"factors": ("h",)})]


@pytest.mark.parametrize("target, wrong", WRONG)
def test_a_wrong_form_is_caught(target: str, wrong: dict[str, object]) -> None:
    rule = RULES[target]
    rule = replace(rule, distributed=tuple(replace(form, **wrong) for form in rule.distributed))  # type: ignore[arg-type]
    op, values, tensors = EXAMPLES[target][0].build(target)
    with pytest.raises(RuleError, match=f"the rule of {target} is wrong"):
        check(op, values, tensors, rule=rule, ranks=ranks)
