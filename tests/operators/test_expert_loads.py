"""The cost of uneven experts: the fullest rank and the rows that change ranks, against experts with random loads."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.operators.families.contraction import LOAD_SPREAD, fullest, misplaced

DRAWS = 2000


def drawn(experts: int, rows: int) -> np.ndarray:
    """`(DRAWS, experts)` rows: choices at random among experts whose shares differ by the spread."""
    generator = np.random.default_rng(0)
    shares = np.maximum(generator.normal(1.0, LOAD_SPREAD, (DRAWS, experts)), 0.0)
    return generator.multinomial(rows, shares / shares.sum(1, keepdims=True))


@pytest.mark.parametrize("experts, ranks", [(8, 2), (8, 4), (8, 8), (64, 8), (128, 32)])
def test_the_fullest_rank_is_that_of_drawn_loads(experts: int, ranks: int) -> None:
    rows = 1024 * experts
    loads = drawn(experts, rows).reshape(DRAWS, ranks, -1).sum(2)
    assert fullest(experts, ranks) == pytest.approx((loads.max(1) * ranks / rows).mean(), rel=0.03)


@pytest.mark.parametrize("experts, rows", [(8, 256), (8, 8192), (64, 4096)])
def test_the_rows_that_change_ranks_are_those_of_drawn_loads(experts: int, rows: int) -> None:
    """As many as one boundary in the middle is off by: a rank has two, of which each takes rows of it in half of the draws."""
    first = drawn(experts, rows)[:, : experts // 2].sum(1)
    assert misplaced(rows, experts) == pytest.approx(np.abs(first - rows // 2).mean(), rel=0.05, abs=1)
