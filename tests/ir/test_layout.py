"""Layouts: their text, their parts, and the whole reassembled from the parts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import LayoutError
from autopar.ir.layout import I, Layout, P, R, digits, join, local_shape, parse, shard, split, storable, text, valid
from autopar.ir.mesh import Mesh

SIZES = [(2,), (4,), (2, 4), (4, 2), (2, 2), (2, 2, 2), (3, 2)]
SHAPES = [(24,), (8, 12), (48, 2), (16, 3, 4), (24, 24)]


@st.composite
def cases(draw: st.DrawFn, kinds: str = "IRPS") -> tuple[tuple[int, ...], tuple[int, ...], Layout]:
    """A shape, the sizes of a mesh, and a layout that is valid for them; dims are split blocked and nested in any order."""
    shape, sizes = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(SIZES))
    states = {"I": I, "R": R, "P": P}
    layout = [states[draw(st.sampled_from([k for k in kinds if k != "S"]))] for _ in sizes]
    free = dict(enumerate(shape))
    for axis in draw(st.permutations(range(len(sizes)))):
        dim = draw(st.sampled_from(sorted(free)))
        blocks = draw(st.sampled_from([1, 1, 1, 2, 3]))
        if "S" in kinds and draw(st.booleans()) and free[dim] % (blocks * sizes[axis]) == 0:
            layout[axis] = split(dim, free[dim] // (blocks * sizes[axis]))
            free[dim] = free[dim] // (blocks * sizes[axis])
    return shape, sizes, tuple(layout)


@given(cases())
def test_a_layout_is_read_back_from_its_text(case: tuple[tuple[int, ...], tuple[int, ...], Layout]) -> None:
    shape, sizes, layout = case
    assert valid(layout, shape, sizes)
    assert parse(text(layout, shape, sizes), shape, sizes) == layout


@given(cases())
def test_the_parts_of_a_tensor_join_to_the_whole(case: tuple[tuple[int, ...], tuple[int, ...], Layout]) -> None:
    shape, sizes, layout = case
    whole = torch.arange(math.prod(shape)).reshape(shape) + 1
    mesh = Mesh.of(sizes)
    parts = [shard(whole, layout, sizes, mesh.coordinates(rank)) for rank in range(mesh.size)]
    assert {tuple(part.shape) for part in parts} == {local_shape(shape, layout, sizes)}
    assert torch.equal(join(parts, shape, layout, sizes), whole)


@given(cases(kinds="IS"))
def test_every_element_of_a_split_tensor_lies_on_as_many_ranks_as_do_not_split_it(
    case: tuple[tuple[int, ...], tuple[int, ...], Layout],
) -> None:
    shape, sizes, layout = case
    whole = torch.arange(math.prod(shape)).reshape(shape)
    mesh = Mesh.of(sizes)
    parts = [shard(whole, layout, sizes, mesh.coordinates(rank)).flatten() for rank in range(mesh.size)]
    copies = math.prod(n for n, state in zip(sizes, layout, strict=True) if state == I)
    assert torch.equal(torch.cat(parts).sort().values, whole.flatten().repeat_interleave(copies))


@given(cases(kinds="IS"))
def test_a_rank_holds_the_elements_whose_digits_are_its_coordinates(
    case: tuple[tuple[int, ...], tuple[int, ...], Layout],
) -> None:
    shape, sizes, layout = case
    mesh = Mesh.of(sizes)
    for dim, length in enumerate(shape):
        line = torch.arange(length).reshape([length if d == dim else 1 for d in range(len(shape))]).expand(shape)
        rank = mesh.size - 1
        where = mesh.coordinates(rank)
        held = set(shard(line, layout, sizes, where).flatten().tolist())
        assert held == {i for i in range(length) if all(i // s % sizes[a] == where[a] for a, s in digits(layout, dim))}


@given(cases(kinds="IRS"))
@settings(max_examples=50)
def test_what_is_stored_is_invariant_or_split(case: tuple[tuple[int, ...], tuple[int, ...], Layout]) -> None:
    shape, sizes, layout = case
    if storable(layout, shape, sizes):
        assert R not in layout
    if all(s == I for s in layout):
        assert storable(layout, shape, sizes)


def test_axes_nest_in_mesh_order_unless_they_are_numbered() -> None:
    assert parse("S(0), S(0)", (16,), (2, 4)) == (split(0, 8), split(0, 2))
    assert parse("S(0)/2, S(0)/1", (16,), (2, 4)) == (split(0, 2), split(0, 4))
    assert text((split(0, 8), split(0, 2)), (16,), (2, 4)) == "S(0), S(0)"


def test_a_negative_dim_counts_from_the_end() -> None:
    assert parse("S(-1), I", (4, 16), (2, 4)) == (split(1, 8), I)


@pytest.mark.parametrize("line", ["S(0)", "I, I, I", "S(0), X", "S(2), I", "S(1), I", "S(0/3), I", "S(0), S(0)"])
def test_text_that_is_not_a_layout_of_the_shape_is_refused(line: str) -> None:
    with pytest.raises(LayoutError):
        parse(line, (4, 15), (2, 4))
