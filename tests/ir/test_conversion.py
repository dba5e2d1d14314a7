"""Conversions on simulated ranks: the value is unchanged, and the gradient's conversion is the transpose of the value's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.conversion import COLLECTIVES, CONVERSIONS, Conversion
from autopar.ir.layout import I, Layout, P, R, State, join, local_shape, shard, split, take

N, SHAPE = 4, (8, 12)
STATES = {"I": [I], "R": [R], "P": [P], "S": [split(0, 2), split(1, 3), split(1, 1)]}
PAIRS = [
    (source, target)
    for kinds in CONVERSIONS
    for source in STATES[kinds[0]]
    for target in STATES[kinds[1]]
    if source.kind != target.kind or source.dim != target.dim
]


def apply(primitive: str, parts: Sequence[torch.Tensor], source: Layout, target: Layout) -> list[torch.Tensor]:
    """What every rank holds after a primitive that leads from one layout to another, on one axis of `N`."""
    zero = torch.zeros_like(parts[0])
    if primitive == "identity":
        return list(parts)
    if primitive == "keep":
        return [part if rank == 0 else zero for rank, part in enumerate(parts)]
    if primitive == "all_reduce":
        return [torch.stack(list(parts)).sum(0)] * N
    if primitive in ("slice", "reduce_scatter"):
        whole = [torch.stack(list(parts)).sum(0)] * N if primitive == "reduce_scatter" else parts
        return [shard(part, target, (N,), (rank,)) for rank, part in enumerate(whole)]
    if primitive == "pad":
        return [
            join([p if r == rank else torch.zeros_like(p) for r in range(N)], SHAPE, source, (N,))
            for rank, p in enumerate(parts)
        ]
    whole = [join(parts, SHAPE, source, (N,))] * N
    return [shard(part, target, (N,), (rank,)) if primitive == "all_to_all" else part for rank, part in enumerate(whole)]


@pytest.mark.parametrize("source, target", PAIRS, ids=str)
def test_a_conversion_keeps_the_value(source: State, target: State) -> None:
    whole = torch.randn(SHAPE, dtype=torch.float64)
    parts = [shard(whole, (source,), (N,), (rank,)) for rank in range(N)]
    if source == P:
        noise = torch.randn(SHAPE, dtype=torch.float64)
        parts = [part + noise * (1 if rank == 1 else -1 if rank == 2 else 0) for rank, part in enumerate(parts)]
    made = apply(CONVERSIONS[source.kind, target.kind][0], parts, (source,), (target,))
    assert {tuple(part.shape) for part in made} == {local_shape(SHAPE, (target,), (N,))}
    assert torch.allclose(join(made, SHAPE, (target,), (N,)), whole)
    if target.kind in "IR":
        assert all(torch.allclose(part, whole) for part in made)


# The layout of a gradient whose value is in this state: a gradient of R is partial, one of P is the same everywhere.
GRADIENT = {"I": I, "R": P, "P": I}


@pytest.mark.parametrize("source, target", PAIRS, ids=str)
def test_a_conversion_brings_the_gradient_back_into_the_state_of_its_source(source: State, target: State) -> None:
    gradient = torch.randn(SHAPE, dtype=torch.float64)
    there, here = GRADIENT.get(target.kind, target), GRADIENT.get(source.kind, source)
    parts = [shard(gradient, (there,), (N,), (rank,)) for rank in range(N)]
    made = apply(CONVERSIONS[source.kind, target.kind][1], parts, (there,), (here,))
    assert {tuple(part.shape) for part in made} == {local_shape(SHAPE, (source,), (N,))}
    assert torch.allclose(join(made, SHAPE, (here,), (N,)), gradient)
    if here == I:
        assert all(torch.allclose(part, gradient) for part in made)


@given(st.sampled_from(PAIRS), st.sampled_from([(I,), (R,), (split(0, 4),)]), st.sampled_from([2, 4, 8]))
def test_the_bytes_of_a_conversion_are_its_larger_side(pair: tuple[State, State], other: tuple[State], size: int) -> None:
    source, target = (state if state.kind != "S" or state.dim else split(1, 3) for state in pair)
    if source == target:
        return
    step = Conversion(axis=1, source=(*other, source), target=(*other, target))
    sides = [torch.empty(local_shape(SHAPE, layout, (2, N))).numel() * size for layout in (step.source, step.target)]
    assert step.collective_bytes(SHAPE, size, (2, N)) == max(sides)


def test_a_conversion_and_its_reverse_mirror_each_other() -> None:
    """The gradient of gathering is scattering, and so on: what goes forward one way comes back the other."""
    assert CONVERSIONS["S", "I"] == tuple(reversed(CONVERSIONS["I", "S"]))
    assert CONVERSIONS["P", "S"] == tuple(reversed(CONVERSIONS["S", "R"]))
    assert CONVERSIONS["P", "I"] == tuple(reversed(CONVERSIONS["I", "R"]))
    assert {p for pair in CONVERSIONS.values() for p in pair} == {*COLLECTIVES, "identity", "keep", "slice", "pad"}


@given(st.sampled_from([1, 2, 3]), st.sampled_from([2, 4]), st.integers(0, 3))
def test_a_blocked_part_is_the_parts_of_its_blocks(blocks: int, parts: int, index: int) -> None:
    whole = torch.arange(24)
    index %= parts
    expected = torch.cat([block.chunk(parts)[index] for block in whole.chunk(blocks)])
    assert torch.equal(take(whole, 0, blocks, parts, index), expected)
