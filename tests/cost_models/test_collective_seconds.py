"""Identities of the alpha-beta model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.collectives import messages, seconds
from autopar.cost_models.links import LINKS
from autopar.ir.conversion import COLLECTIVES
from autopar.ir.device import Link

LINK = LINKS["nvlink4"]

kinds = st.sampled_from(COLLECTIVES)
links = st.sampled_from(list(LINKS.values()))
ranks = st.integers(1, 4096)
sizes = st.integers(0, 2**40).map(float)


@given(sizes, ranks, links)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size: float, n: int, link: Link) -> None:
    parts = seconds("reduce_scatter", size, n, link) + seconds("all_gather", size, n, link)
    assert seconds("all_reduce", size, n, link) == parts


@given(kinds, sizes)
def test_an_axis_of_one_costs_nothing(kind: str, size: float) -> None:
    assert seconds(kind, size, 1, LINK) == 0


@given(kinds, sizes, sizes, ranks)
def test_more_bytes_never_cost_less(kind: str, one: float, other: float, n: int) -> None:
    assert seconds(kind, min(one, other), n, LINK) <= seconds(kind, max(one, other), n, LINK)


@given(kinds, sizes, st.integers(1, 4095))
def test_more_ranks_never_cost_less_for_the_same_buffer(kind: str, size: float, n: int) -> None:
    assert seconds(kind, size, n, LINK) <= seconds(kind, size, n + 1, LINK)


@given(kinds, st.lists(sizes, min_size=1, max_size=5), ranks)
def test_an_array_of_sizes_costs_what_each_costs(kind: str, several: list[float], n: int) -> None:
    together = seconds(kind, np.array(several), n, LINK)
    np.testing.assert_allclose(together, [seconds(kind, size, n, LINK) for size in several])


def test_large_buffers_move_at_the_link_s_bandwidth() -> None:
    size, n = 2.0**40, 8
    assert seconds("all_gather", size, n, LINK) == pytest.approx(size * 7 / 8 / LINK.bandwidth, rel=1e-4)
    assert seconds("all_reduce", size, n, LINK) == pytest.approx(2 * size * 7 / 8 / LINK.bandwidth, rel=1e-4)


@pytest.mark.parametrize(("n", "doubling"), [(2, 1), (3, 2), (4, 2), (8, 3), (9, 4), (64, 6)])
def test_small_buffers_cost_the_latency_of_their_messages(n: int, doubling: int) -> None:
    assert messages("all_gather", n) == messages("reduce_scatter", n) == doubling
    assert seconds("all_gather", 0.0, n, LINK) == pytest.approx(doubling * LINK.latency)
    assert seconds("all_reduce", 0.0, n, LINK) == pytest.approx(2 * doubling * LINK.latency)
    assert seconds("all_to_all", 0.0, n, LINK) == pytest.approx((n - 1) * LINK.latency)
