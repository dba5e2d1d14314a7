"""Rules corrupted at random are caught by the law."""

from __future__ import annotations

from pathlib import Path

from tests.support.forked import printed_by

KINDS = (
    "splits a whole factor",
    "swaps two dims of a result",
    "drops a factor of a result",
    "drops a factor of an operand",
    "changes what is added",
    "calls an operand linear",
    "takes a member from a group",
    "makes two groups one",
    "forgets to divide a mean",
)


def test_every_rule_that_is_made_wrong_is_caught(tmp_path: Path) -> None:
    """In a process of its own: an operator may trust the sizes that it is given."""
    said = printed_by("tests.operators.sabotage", "--seed", "0", "--count", "20", log=tmp_path / "said")
    assert said.endswith("20 of 20 were caught\n")
    assert [kind for kind in KINDS if kind not in said] == []
