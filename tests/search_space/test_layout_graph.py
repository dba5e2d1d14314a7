"""The layout graph: its nodes are layouts that can be, its arcs conversions of one axis."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.analysis.block_counts import Blocks
from autopar.ir.conversion import CONVERSIONS
from autopar.ir.layout import I, P, R, local_shape, split, valid
from autopar.search_space.layout_graph import LayoutGraph, layout_graph, placeable, states

PAIRS = list(CONVERSIONS)
CASES: list[tuple[tuple[int, ...], tuple[int, ...], Blocks]] = [
    ((8, 6), (2,), ((1,), (1,))),
    ((8, 12), (2, 4), ((1,), (1, 3))),
    ((24,), (2, 2, 2), ((1,),)),
    ((16, 7), (4, 2), ((1, 2), (1,))),
    ((), (2, 4), ()),
]


def graph(shape: tuple[int, ...], sizes: tuple[int, ...], blocks: Blocks) -> LayoutGraph:
    allowed = tuple(map(tuple, states(shape, sizes, blocks, True)))
    return layout_graph(shape, sizes, allowed, blocks)


@pytest.mark.parametrize("shape, sizes, blocks", CASES)
def test_every_node_is_a_valid_layout_and_knows_its_local_size(
    shape: tuple[int, ...], sizes: tuple[int, ...], blocks: Blocks
) -> None:
    found = graph(shape, sizes, blocks)
    assert len(set(found.nodes)) == len(found.nodes)
    for place, layout in enumerate(found.nodes):
        assert valid(layout, shape, sizes)
        assert placeable(layout, shape, sizes, blocks)
        assert found.index[layout] == place
        assert found.elements[place] == np.prod(local_shape(shape, layout, sizes))


@pytest.mark.parametrize("shape, sizes, blocks", CASES)
def test_every_arc_changes_one_axis_by_a_conversion(shape: tuple[int, ...], sizes: tuple[int, ...], blocks: Blocks) -> None:
    found = graph(shape, sizes, blocks)
    arcs = zip(found.source.tolist(), found.target.tolist(), found.axis.tolist(), found.pair.tolist(), strict=True)
    for source, target, axis, pair in arcs:
        before, after = found.nodes[source], found.nodes[target]
        assert [a for a in range(len(sizes)) if before[a] != after[a]] == [axis]
        assert PAIRS[pair] == (before[axis].kind, after[axis].kind)


@pytest.mark.parametrize("shape, sizes, blocks", CASES)
def test_every_layout_is_reached_from_every_other_but_for_states_that_lose_nothing(
    shape: tuple[int, ...], sizes: tuple[int, ...], blocks: Blocks
) -> None:
    """Whatever an operator makes, whatever the next one wants: a route exists."""
    found = graph(shape, sizes, blocks)
    reach = np.eye(len(found.nodes), dtype=bool)
    reach[found.source, found.target] = True
    for _ in range(len(sizes) * 4):
        reach = (reach.astype(int) @ reach.astype(int)) > 0
    assert reach.all()


def test_a_value_without_a_gradient_has_no_replicated_state() -> None:
    assert R not in states((8,), (2,), ((1,),), False)[0]
    assert R in states((8,), (2,), ((1,),), True)[0]


def test_an_axis_of_one_device_knows_one_state() -> None:
    assert states((8, 8), (1, 2), ((1,), (1,)), True)[0] == [I]


def test_a_dim_that_an_axis_does_not_divide_is_not_split() -> None:
    assert states((7, 3), (2,), ((1,), (1,)), True) == [[I, R, P]]


def test_blocks_of_a_dim_give_a_layout_of_their_own() -> None:
    assert split(0, 4) in states((24,), (2,), ((1, 3),), True)[0]
    assert split(0, 4) not in states((24,), (2,), ((1,),), True)[0]
