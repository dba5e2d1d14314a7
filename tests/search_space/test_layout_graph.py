"""The layout graph: its nodes are possible layouts, its arcs conversions of one axis."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.analysis.block_counts import Blocks
from autopar.ir.conversion import CONVERSIONS, FLATTENED
from autopar.ir.layout import I, P, R, local_shape, numbered_axes, split, valid
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
def test_arcs_over_flattened_axes_do_what_those_over_each_do_one_after_the_other(
    shape: tuple[int, ...], sizes: tuple[int, ...], blocks: Blocks
) -> None:
    """Every way to take the same steps of the same kind over each of some adjacent axes is there once more as one arc."""
    plain, allowed = graph(shape, sizes, blocks), tuple(map(tuple, states(shape, sizes, blocks, True)))
    several = numbered_axes(len(sizes))[len(sizes) :]
    found = layout_graph(shape, sizes, allowed, blocks, several)
    count = len(plain.source)
    assert all((getattr(found, part)[:count] == getattr(plain, part)).all() for part in ("source", "target", "axis", "pair"))
    arcs = set(zip(*(getattr(found, part)[count:].tolist() for part in ("source", "target", "axis", "pair")), strict=True))
    steps = {
        (s, a, p): t
        for s, t, a, p in zip(*(getattr(plain, part).tolist() for part in ("source", "target", "axis", "pair")), strict=True)
        if plain.nodes[t][a].kind in "RI"
    }
    expected = set()
    for node, (axes, kinds) in itertools.product(range(len(found.nodes)), itertools.product(several, FLATTENED)):
        nest, place = [found.nodes[node][axis] for axis in axes], node
        for axis in reversed(axes):  # the innermost first, which alone can be gathered
            place = steps.get((place, axis, PAIRS.index(kinds)), -1)
        in_order = kinds[0] != "S" or (
            len({state.dim for state in nest}) == 1 and sorted(nest, key=lambda s: -s.stride) == nest
        )
        if place >= 0 and in_order:
            expected.add((node, place, numbered_axes(len(sizes)).index(axes), PAIRS.index(kinds)))
    assert arcs == expected
    assert len(arcs) > 0 or len(sizes) == 1


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
