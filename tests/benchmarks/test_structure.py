"""A newcomer's questions about the code are answered in at most three files, and a rule is mostly one line of text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopar.operators import RULES
from benchmarks.structure import QUESTIONS, Question

FAMILIES = Path(__file__).parents[2] / "autopar" / "operators" / "families"


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.wants)
def test_a_question_is_answered_in_three_files(question: Question) -> None:
    assert len(question.files) <= 3
    assert question.now  # every file has the text that leads to the answer


def test_a_search_for_a_target_finds_its_rule() -> None:
    text = "\n".join(path.read_text() for path in FAMILIES.glob("*.py"))
    assert {target for target in RULES if target.startswith("aten.")} <= set(re.findall(r'"(aten\.\w+\.\w+)"', text))


def test_most_rules_are_patterns() -> None:
    assert sum(rule.shapes is None for rule in RULES.values()) >= 550
