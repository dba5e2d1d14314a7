"""Rules that were made wrong at random are caught by the law."""

from __future__ import annotations

from tests.rules.sabotage import mutants


def test_every_rule_that_is_made_wrong_is_caught() -> None:
    found = list(mutants(seed=0, count=20))
    assert len(found) == 20
    assert len({mutant.kind for mutant in found}) >= 7
    assert [mutant for mutant in found if not mutant.caught] == []
