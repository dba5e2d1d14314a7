"""How much of ATen the table covers; the page about it is up to date."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from autopar.operators import RULES
from autopar.operators.registry import FAMILIES
from tests.operators import coverage
from tests.support.golden import Golden

FAMILY_FILES = [*(Path(__file__).parents[2] / "autopar" / "operators" / "families").glob("*.py")]
SOURCES = [path.read_text() for path in FAMILY_FILES]
PAGE = Path(__file__).parents[2] / "docs" / "operators.md"


def test_most_operators_of_core_aten_split_along_a_factor() -> None:
    assert len(coverage.core()) >= 185  # what torch calls core; a version of torch may change it a little
    assert len(coverage.covered()) >= 165


def test_every_operator_of_core_aten_that_does_not_split_has_a_reason() -> None:
    rest = set(coverage.tensor_operators()) - set(coverage.covered())
    assert sorted(target for target in rest if not coverage.reason(target, coverage.REASONS)) == []


@pytest.mark.parametrize("name", sorted(coverage.REASONS))
def test_every_reason_is_needed(name: str) -> None:
    rest = set(coverage.tensor_operators()) - set(coverage.covered())
    assert any(coverage.reason(target, {name: coverage.REASONS[name]}) for target in rest)


def test_the_table_has_more_than_two_hundred_operators() -> None:
    assert len({target.split(".")[1] for target in RULES}) > 200


def test_every_family_stands_on_the_page() -> None:
    named = {family.__name__.rpartition(".")[2] for family in FAMILIES.values()}
    assert named == {path.stem for path in FAMILY_FILES} - {"__init__"}


def test_every_row_is_found_by_the_name_of_its_operator() -> None:
    """`grep -r aten.softmax.int autopar/operators/families` gives one row."""
    rows = Counter(row[1] for text in SOURCES for row in re.finditer(r'^ +"([^"]+)": (?:op|arithmetic)\(', text, re.MULTILINE))
    assert {target: rows[target] for target in RULES if rows[target] != 1} == {}


def test_most_rules_are_patterns() -> None:
    """A function is there where shapes decide, and nowhere else."""
    assert sum(row.shapes is None for row in RULES.values()) >= 580


def test_the_page_of_operators_is_up_to_date(golden: Golden) -> None:
    golden.check(str(PAGE), coverage.page())
