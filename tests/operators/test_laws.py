"""The law of rules on every operator of the table; wrong rules are caught."""

from __future__ import annotations

import pytest

from autopar.errors import RuleError
from autopar.operators import RULES, fit
from autopar.operators.checking.execution_check import check
from autopar.operators.rule import op as row
from tests.cost_models.cost_ops import call
from tests.operators.examples import EXAMPLES, Example, calls, ex, ints, t


def test_every_rule_has_an_example() -> None:
    assert sorted(set(RULES) - {target for target, examples in EXAMPLES.items() if examples}) == []


def test_every_example_has_a_rule() -> None:
    assert sorted(set(EXAMPLES) - set(RULES)) == []


@pytest.mark.parametrize("target", sorted(EXAMPLES))
def test_splitting_a_factor_and_joining_gives_the_whole(target: str) -> None:
    for example in EXAMPLES[target]:
        op, values, tensors = example.build(target)
        assert fit(op, values) is not None
        check(op, values, tensors)


def test_the_factors_of_an_op_have_different_names_so_that_a_choice_in_a_plan_can_name_one() -> None:
    for op, values in (made for target in sorted(EXAMPLES) for made in calls(target)):
        fitted = fit(op, values)
        assert fitted is not None
        names = [factor.name for factor in fitted.factors if not factor.whole]
        assert len(names) == len(set(names)), f"{op.target}: {fitted}"
        assert not any("," in name or "/" in name for name in names), f"{op.target}: {fitted}"
        assert not {"I", "R"} & set(names), f"{op.target}: {fitted}"


@pytest.mark.parametrize("target", sorted(EXAMPLES))
def test_the_examples_compute_numbers(target: str) -> None:
    """Where every result is NaN or infinite, any rule holds."""
    for example in EXAMPLES[target]:
        op, _, tensors = example.build(target)
        results = call(op, tensors)
        assert all(bool(result.isfinite().any()) for result in results if result.numel())


WRONG = [
    ("aten.linear.default", "... k, n k, n -> ... n", "", ex(t(4, 6), t(10, 6), t(10))),  # the bias is added on every rank
    ("aten.softmax.int", "... d -> ... d", "", ex(t(4, 6), -1)),  # normalised over a chunk
    ("aten.matmul.default", "m k, k n -> m n", "self other", ex(t(4, 6), t(6, 10))),  # linear in each, not in both
    ("aten.gelu.default", "... -> ...", "self", ex(t(4, 6))),  # not linear
    ("aten.cumsum.default", "a b -> a b", "", ex(t(4, 6), 1)),  # positions
    ("aten.add.Tensor", "... , ... -> ...", "self, other", ex(t(4, 6), t(4, 6))),  # linear in both, not in each
    ("aten.amax.default", "a b -> a", "", ex(t(4, 6), (1,))),  # a maximum is no sum
    ("aten.mean.dim", "a b -> a", "", ex(t(4, 6), (1,))),  # a sum of means
    ("aten.embedding.default", "v h, ... -> ... h", "", ex(t(6, 4), ints(10, high=6))),  # a row may lie elsewhere
    (
        "aten.scaled_dot_product_attention.default",
        "... q d!, ... k! d!, ... k! e!, ... q k! -> ... q e!",
        "",
        ex(t(2, 4, 6, 3), t(2, 4, 6, 3), t(2, 4, 6, 3), None, 0.0, True),
    ),  # causal: rows know their place
]


@pytest.mark.parametrize("target, text, linear, example", WRONG, ids=[target for target, *_ in WRONG])
def test_a_wrong_rule_is_caught(target: str, text: str, linear: str, example: Example) -> None:
    op, values, tensors = example.build(target)
    wrong = row(text, linear=linear)
    with pytest.raises(RuleError, match=f"the rule of {target} is wrong"):
        check(op, values, tensors, rule=wrong)
