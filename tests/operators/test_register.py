"""User-defined rules: checked on a call, registered, refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import autopar
from autopar.errors import RuleError
from autopar.operators import rule_of
from autopar.operators.registry import REGISTERED
from tests.support import own

X, W, B = torch.randn(4, 6), torch.randn(10, 6), torch.randn(10)
LINEAR = "... k, n k, +n -> ... n"


pytestmark = pytest.mark.usefixtures("registry")


@pytest.mark.parametrize(
    "op",
    [
        torch.ops.aten.linear.default,
        torch.ops.aten.linear,
        "aten::linear",
        "aten.linear.default",
    ],
)
def test_a_check_says_what_was_split(op: object) -> None:
    found = autopar.check_rule(op, (X, W, B))
    assert (found.operator, found.rule) == ("aten::linear", "...0 k, n k, +n -> ...0 n")
    assert found.factors == ("...0", "k", "n")
    assert found.gradients
    assert str(found).splitlines() == [
        "aten::linear  ...0 k, n k, +n -> ...0 n",
        "  split      ...0, k, n",
        "  linear in  0 and 2, 1 and 2",
        f"  checked    {found.trials} ways to run it, values and gradients",
    ]


def test_arguments_may_have_names_and_the_overload_follows_from_them() -> None:
    assert autopar.check_rule("aten::linear", {"input": X, "bias": B, "weight": W}).factors == ("...0", "k", "n")
    assert autopar.check_rule("aten::softmax", (X, -1)).operator == "aten::softmax.int"
    assert autopar.check_rule("aten::cumsum", (X, 1), rule="... @dim! ... -> ... @dim! ...").factors == ("d0",)
    assert autopar.check_rule("aten::add", (X, 0.0)).operator == "aten::add.Tensor"


def test_a_wrong_rule_is_refused_with_the_factor_the_tensor_and_the_error() -> None:
    with pytest.raises(RuleError, match=r"^the rule of own.scaled_linear.default is wrong") as refusal:
        autopar.check_rule(own.scaled_linear, (X, W, B, 0.5), rule="... k, n k, n -> ... n")
    details = refusal.value.details
    assert "k of size 6 split" in details["trial"]
    assert details["where"] == "result 0"
    assert float(details["error"]) > 0.1


def test_an_operator_that_raises_on_a_part_has_a_wrong_rule() -> None:
    with pytest.raises(RuleError, match="is wrong") as refusal:
        autopar.check_rule("aten::unflatten.int", (X, 1, (2, 3)), rule="a b -> a _ _")
    assert "rank 0 of" in refusal.value.details["where"]


def test_what_has_no_derivative_is_checked_for_values_only() -> None:
    found = autopar.check_rule(own.doubled, (X,), rule="... -> ...", linear="x")
    assert not found.gradients
    assert "values only" in str(found)
    assert found.linear == ("0",)


def register_linear(**options: object) -> None:
    autopar.register_rule("own::scaled_linear", LINEAR, linear="x bias, weight bias", **options)  # type: ignore[arg-type]


def test_a_registered_rule_is_the_rule_of_the_operator() -> None:
    register_linear(example=(X, W, B, 0.5))
    register_linear()  # the same once more
    assert autopar.check_rule(own.scaled_linear, (X, W, B, 0.5)).factors == ("...0", "k", "n")


def test_registering_a_second_rule_must_say_that_it_replaces_the_first() -> None:
    register_linear()
    with pytest.raises(RuleError, match=r"^own::scaled_linear has another sharding rule already") as refusal:
        autopar.register_rule("own::scaled_linear", "... k!, n k!, n -> ... n")
    assert "replace=True" in refusal.value.details["fix"]
    with pytest.raises(RuleError, match=r"^aten::relu has another sharding rule already"):
        autopar.register_rule("aten::relu", "a b -> a b")
    autopar.register_rule("own::scaled_linear", "... k!, n k!, n -> ... n", replace=True)
    assert autopar.check_rule(own.scaled_linear, (X, W, B, 0.5)).factors == ("...0", "n")


def test_a_rule_that_its_example_refutes_is_not_registered() -> None:
    with pytest.raises(RuleError, match="is wrong"):
        autopar.register_rule(own.centred, "a b -> a b", example=(X, 1))
    with pytest.raises(RuleError, match="is wrong"):
        autopar.register_rule(own.gated, "... (c k!) -> ... c", example=(torch.randn(4, 6),))
    assert rule_of("own.centred.default") is None
    assert rule_of("own.gated.default") is None


def test_a_rule_may_be_for_some_arguments_only() -> None:
    autopar.register_rule(own.centred, "a b! -> a b!", linear="x", when={"dim": 1}, example=(X, 1))
    assert autopar.check_rule(own.centred, (X, 1)).factors == ("a",)
    with pytest.raises(RuleError, match=r"^own::centred has no sharding rule for this call"):
        autopar.check_rule(own.centred, (X, 0))


def test_a_mean_is_divided() -> None:
    found = autopar.check_rule("aten::mean.dim", (X, (1,)), rule="a b -> a", averages=True, linear="self")
    assert found.factors == ("a", "b")
    with pytest.raises(RuleError, match="is wrong"):
        autopar.check_rule("aten::mean.dim", (X, (1,)), rule="a b -> a")


REFUSED: list[tuple[Callable[[], object], str, str]] = [
    (lambda: autopar.check_rule(own.doubled, (X,)), "own::doubled has no sharding rule", "autopar.discover_rule"),
    (lambda: autopar.check_rule("own::nothing", (X,)), "there is no operator own::nothing", "define it first"),
    (lambda: autopar.check_rule("nothing", (X,)), "there is no operator nothing", "define it first"),
    (lambda: autopar.check_rule(torch.relu, (X,)), "<built-in method relu", "torch.ops.mylib.op"),
    (lambda: autopar.check_rule("aten::where", ("a", "b")), "no overload of aten::where takes these arguments", ""),
    (lambda: autopar.register_rule("aten::div", "a -> a"), "aten::div has several overloads", "aten::div.Tensor"),
    (lambda: autopar.check_rule(own.filled, (X,)), "own::filled writes into an argument", "return their results"),
    (lambda: autopar.check_rule("aten::mm", (X, X)), "aten::mm does not run on these arguments", ""),
    (lambda: autopar.check_rule("aten::mm.default", {"self": X, "other": X}), "aten::mm has no argument 'other'", ""),
    (lambda: autopar.check_rule("aten::relu", (object(),)), "aten::relu is given <object", "tensors, numbers"),
    (
        lambda: autopar.check_rule("aten::mm", (torch.ones(4, 6), torch.zeros(6, 10))),
        "the example of aten::mm proves nothing: every number in a tensor is the same",
        "torch.randn",
    ),
    (
        lambda: autopar.register_rule(own.gated, "a, b -> a"),
        "the rule of own::gated names 2 operands, the operator has 1",
        "",
    ),
    (lambda: autopar.register_rule(own.gated, "a -> a, a"), "the rule of own::gated names 2 results, the operator has 1", ""),
    (
        lambda: autopar.register_rule(own.gated, "a -> a", linear="y"),
        "the rule of own::gated speaks of 'y', which is not an argument: x",
        "",
    ),
    (lambda: autopar.register_rule(own.gated, "a -> a", when={"k": 1}), "the rule of own::gated speaks of 'k'", ""),
    (lambda: autopar.register_rule(own.gated, "... @dim ... -> ..."), "the rule of own::gated speaks of 'dim'", ""),
    (lambda: autopar.register_rule(own.gated, "a -> a?"), "cannot read the rule 'a -> a?'", "write it like"),
    (lambda: autopar.register_rule(own.gated, "a -> a", example=(X,)), "the rule of own.gated.default does not fit", "every"),
]


@pytest.mark.parametrize("refused, first, fix", REFUSED)
def test_what_cannot_be_checked_or_registered_says_so(refused: Callable[[], object], first: str, fix: str) -> None:
    with pytest.raises(RuleError) as refusal:
        refused()
    assert refusal.value.what.startswith(first)
    assert fix in refusal.value.details.get("fix", "")
    assert REGISTERED == {}
