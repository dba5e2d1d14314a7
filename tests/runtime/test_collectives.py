"""Conversions carry the value forward and the gradient back, and for second derivatives again, whatever the other axes do."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from autopar.errors import LayoutError
from autopar.ir.conversion import Conversion
from autopar.ir.layout import I, Layout, P, R, State, digits, join, numbered_axes, shard, split, valid
from autopar.ir.mesh import Mesh
from autopar.runtime.collectives import all_gather__slice, all_to_all__all_to_all, conversion_call
from autopar.runtime.recorder import Issued, recorded
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import Axis, connect

Shape = tuple[int, ...]
DUAL = {"I": I, "R": P, "P": I}  # how the gradient of a value lies, read as a value


@dataclass(frozen=True)
class Cases:
    shape: Shape
    sizes: tuple[int, ...]
    conversions: list[Conversion]


def states(shape: Shape, size: int) -> list[State]:
    splits = (split(d, s) for d in range(len(shape)) for s in range(1, shape[d]) if shape[d] % (s * size) == 0)
    return [I, R, P, *splits]


def one_step(conversion: Conversion, shape: Shape, sizes: tuple[int, ...]) -> bool:
    """Whether one collective can do it: two splits of one dim must own different digits."""
    try:
        conversion_call(conversion, shape, sizes)
        for layout in (conversion.source, conversion.target):
            others = [(a, s) for a, s in enumerate(layout) if a != conversion.axis]
            both = tuple(s for _, s in others) + (conversion.source[conversion.axis], conversion.target[conversion.axis])
            spread = tuple(sizes[a] for a, _ in others) + (sizes[conversion.axis],) * 2
            if both[-1].kind == both[-2].kind == "S" and not valid(both, shape, spread):
                return False
    except LayoutError:
        return False
    return True


def conversions(shape: Shape, sizes: tuple[int, ...]) -> Iterator[Conversion]:
    """Every conversion of one axis between valid layouts."""
    choices = [states(shape, size) for size in sizes]
    for source in itertools.product(*choices):
        for axis, state in ((a, s) for a in range(len(sizes)) for s in choices[a]):
            target = (*source[:axis], state, *source[axis + 1 :])
            pair = source[axis].kind, state.kind
            if source == target or pair in {("P", "P")} or not all(valid(x, shape, sizes) for x in (source, target)):
                continue
            conversion = Conversion(axis=axis, source=source, target=target)
            if one_step(conversion, shape, sizes):
                yield conversion


def flattened_conversions(shape: Shape, sizes: tuple[int, ...]) -> Iterator[Conversion]:
    """Every conversion of several axes at once between valid layouts."""
    for source in itertools.product(*(states(shape, size) for size in sizes)):
        for axes, kind in itertools.product(numbered_axes(len(sizes))[len(sizes) :], (I, R)):
            target = tuple(kind if axis in axes else state for axis, state in enumerate(source))
            found = Conversion.between(source, target, sizes) if valid(source, shape, sizes) else None
            if found and len(found.axes) > 1:
                yield found


def dual(layout: Layout) -> Layout:
    return tuple(DUAL.get(state.kind, state) for state in layout)


def part(whole: torch.Tensor, layout: Layout, sizes: tuple[int, ...], where: tuple[int, ...]) -> torch.Tensor:
    """A rank's part where no rank holds nothing: addends are unequal shares of the whole."""
    share = 1.0
    for axis, state in enumerate(layout):
        if state.kind == "P":
            share *= 2 * (where[axis] + 1) / (sizes[axis] * (sizes[axis] + 1))
    chunks = tuple(I if state.kind == "P" else state for state in layout)
    return shard(whole, chunks, sizes, where) * share


def wholes(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A value, the gradient of what a conversion makes of it, and the gradient of the gradient that it passes on."""
    generator = torch.Generator().manual_seed(0)
    value, gradient, second = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3))
    return value, gradient, second


def convert_all(cases: Cases) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Issued]]]:
    context = connect(Mesh.of(cases.sizes))
    value, gradient, second = wholes(cases.shape)
    found = []
    for conversion in cases.conversions:
        function, arguments = conversion_call(conversion, cases.shape, cases.sizes)
        x = part(value, conversion.source, cases.sizes, context.coordinates).requires_grad_()
        axis = context.over(conversion.axes)
        with recorded(context.known_axes) as log:
            y = function(x * 1, axis, *arguments)
            y.backward(part(gradient, dual(conversion.target), cases.sizes, context.coordinates))
        assert x.grad is not None
        given = part(gradient, dual(conversion.target), cases.sizes, context.coordinates).requires_grad_()
        y = function(x * 1, axis, *arguments)
        (passed,) = torch.autograd.grad(y, x, given, create_graph=True)
        (again,) = torch.autograd.grad(passed, given, part(second, conversion.source, cases.sizes, context.coordinates))
        found.append((y.detach(), x.grad, again, log))
    return found


def check(whole: torch.Tensor, parts: list[torch.Tensor], layout: Layout, sizes: tuple[int, ...], name: object) -> None:
    """The parts join to the whole, and ranks that must hold the same do."""
    torch.testing.assert_close(join(parts, tuple(whole.shape), layout, sizes), whole, msg=lambda text: f"{name}\n{text}")
    mesh = Mesh.of(sizes)
    where = {mesh.coordinates(rank): rank for rank in range(mesh.size)}
    for place, rank in where.items():
        twin = tuple(0 if layout[a].kind in "IR" else c for a, c in enumerate(place))
        torch.testing.assert_close(parts[rank], parts[where[twin]], msg=lambda text: f"{name}\n{text}")


@pytest.mark.parametrize(
    "shape, sizes, count",
    [
        ((16, 6), (4,), 0),
        ((8, 4), (2, 2), 150),
        ((16, 8), (2, 4), 50),
        ((24, 3, 4), (4, 2), 25),
        ((4, 4), (1, 4), 20),
        ((8, 8), (2, 2, 2), 40),
    ],
)
def test_a_conversion_carries_the_value_forward_and_the_gradient_back(
    pool: WorkerPool, shape: Shape, sizes: tuple[int, ...], count: int
) -> None:
    every, several = list(conversions(shape, sizes)), list(flattened_conversions(shape, sizes))
    assert len(several) >= (len(sizes) > 1 and 1 not in sizes)
    chosen = random.Random(0).sample(every, min(count or len(every), len(every)))
    chosen += random.Random(1).sample(several, min(count, len(several)))
    results = pool.run(f"{__name__}:convert_all", Cases(shape, sizes, chosen), ranks=Mesh.of(sizes).size, keep=True)
    value, gradient, second = wholes(shape)
    for index, conversion in enumerate(chosen):
        values, gradients, again, logs = zip(*(result[index] for result in results), strict=True)  # type: ignore[index]
        check(value, list(values), conversion.target, sizes, conversion)
        check(gradient, list(gradients), dual(conversion.source), sizes, conversion)
        check(second, list(again), conversion.target, sizes, conversion)  # the dual of the dual
        check_log(conversion, shape, sizes, list(logs))


def check_log(conversion: Conversion, shape: Shape, sizes: tuple[int, ...], logs: list[list[Issued]]) -> None:
    """What was issued is what the conversion says, in bytes too."""
    sends = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    expected = [
        Issued(
            kind=primitive,
            axis="_".join(f"axis{axis}" for axis in conversion.axes),
            bytes=conversion.collective_bytes(shape, 8, sizes),
            where=where,
        )
        for primitive, where in zip(conversion.primitives, ("forward", "backward"), strict=True)
        if primitive in sends and any(sizes[axis] > 1 for axis in conversion.axes)
    ]
    assert all(log == expected for log in logs), conversion


def test_the_two_axes_of_a_nest_are_among_the_cases() -> None:
    layouts = [c.source for c in conversions((8, 4), (2, 2))]
    nests = {tuple(axis for axis, _ in digits(layout, 0)) for layout in layouts}
    assert {(0, 1), (1, 0)} <= nests


def other_types(_: None) -> None:
    context = connect(Mesh.of(2))
    axis = context.axes[0]
    for dtype in (torch.bool, torch.int64, torch.int32, torch.bfloat16, torch.float16, torch.float32):
        whole = (torch.arange(24).reshape(4, 6) % 3).to(dtype)
        mine = shard(whole, (split(1, 1),), (2,), (axis.index,))
        assert torch.equal(all_gather__slice(mine, axis, 1, 3), whole), dtype
        moved = all_to_all__all_to_all(mine, axis, 1, 0, 3)
        assert torch.equal(moved, shard(whole, (split(0, 2),), (2,), (axis.index,))), dtype


def test_every_type_can_be_gathered_and_exchanged(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:other_types", ranks=2, keep=True)


def test_a_move_between_overlapping_digits_of_one_dim_is_refused() -> None:
    axis = Axis(name="tp", size=4, index=0, group="none")
    with pytest.raises(LayoutError, match="one all-to-all"):
        all_to_all__all_to_all(torch.zeros(4), axis, 0, 0, 1, 2)
