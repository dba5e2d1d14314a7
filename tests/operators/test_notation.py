"""The notation: what is read is printed again, and what cannot be read says where."""

from __future__ import annotations

import pytest

from autopar.errors import RuleError
from autopar.operators import RULES, fit
from autopar.operators.notation import parse
from autopar.operators.rule import op as row
from tests.operators.examples import ex, t

READABLE = [
    "... k, n k, +n -> ... n",
    "b (h g) q! d!, b h k! d! -> b (h g) q! d!",
    "... _ -> ... _, ...",
    "-> a b",
    "..., () -> ()",
    "b! c ...! -> b! c ...!",
]


@pytest.mark.parametrize("text", READABLE)
def test_a_rule_prints_as_it_was_written(text: str) -> None:
    assert str(parse(text)) == text
    assert str(row(text)) == text


def test_spaces_do_not_matter() -> None:
    assert parse("...k,n k,+n->...n") == parse("... k, n k, +n -> ... n")


UNREADABLE = [
    ("a b", "'->' is missing", "a b<here>"),
    ("a ? -> a", "'?' means nothing here", "a <here>? -> a"),
    ("a, -> a", "a term is empty", "a, <here>-> a"),
    ("a -> +a", "only an operand can be added", "a -> <here>+a"),
    ("a a -> a", "'a' appears twice in one tensor", "a <here>a -> a"),
    ("(a b -> a", "'->' is no name of a factor", "(a b <here>-> a"),
    ("(a ...) -> a", "'...' cannot be part of a dim", "(a <here>...) -> a"),
    ("a -> b -> c", "'->' cannot follow a term", "a -> b <here>-> c"),
    ("! -> a", "'!' is no name of a factor", "<here>! -> a"),
    ("(a", "the text ends too early", "(a<here>"),
]


@pytest.mark.parametrize("text, why, place", UNREADABLE)
def test_an_unreadable_rule_says_where_and_why(text: str, why: str, place: str) -> None:
    with pytest.raises(RuleError) as raised:
        parse(text)
    assert why in raised.value.what
    assert raised.value.details["at"] == place
    assert raised.value.details["fix"]


MISFITS = [
    ("a b, a -> a b", 'names 2 dims, a tensor has 3'),
    ("... k, k -> ... k", '"k" names 1 dims, a tensor has 2'),
    ("a b k, n k -> a b n", "(k) has size 10, but 6 elsewhere"),
    ("a b k -> a b k", "it names 1 operands, the op has 2"),
    ("a b k, n m -> a b k, n m", "it names 2 results, the op has 1"),
    ("a b (k l), n k -> a b (k l)", "(k l) has size 6, but"),
    ("a b (k l), n m -> a b (k l)", "the sizes of the factors of (k l) are unknown"),
]  # fmt: skip


@pytest.mark.parametrize("text, why", MISFITS)
def test_a_rule_that_does_not_fit_its_op_says_why(text: str, why: str) -> None:
    op, values, _ = ex(t(2, 4, 6), t(6, 10)).build("aten.matmul.default")
    with pytest.raises(RuleError) as raised:
        fit(op, values, rule=row(text))
    assert why in raised.value.details["why"]
    assert raised.value.details["shapes"] == "(2, 4, 6), (6, 10) -> (2, 4, 10)"


def test_every_rule_of_the_table_has_a_text() -> None:
    assert all(row.text for row in RULES.values())
