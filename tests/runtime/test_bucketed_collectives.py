"""Weights of one bucket are converted like each alone, forward and backward, in one collective."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from autopar.cost_models.catalog import DEVICES
from autopar.formulation.prices import Prices
from autopar.ir.conversion import COLLECTIVES, CONVERSIONS, WAYS, Conversion, scattered
from autopar.ir.layout import I, P, R, State, local_shape, shard, split
from autopar.ir.mesh import Mesh
from autopar.runtime import bucketed_collectives
from autopar.runtime.bucketed_collectives import PAIRS as FUNCTIONS
from autopar.runtime.bucketed_collectives import all_gather__reduce_scatter_start, all_gather__reduce_scatter_wait
from autopar.runtime.collectives import conversion_call, split_position
from autopar.runtime.recorder import Issued, recorded
from autopar.runtime.rematerialize.manager import Rematerializer
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import Axis, connect
from tests.support.dispatched import Dispatched, tensors

RANKS = 4
# The whole shape of each weight, how it is split on the one axis, and to what an all-to-all takes it.
WEIGHTS = [
    ((8, 12), split(0, 2), split(1, 3)),
    ((3, 24, 4), split(1, 2), split(2, 1)),  # in three blocks
    ((16,), split(0, 4), split(0, 1)),
    ((8, 5, 8), split(2, 1), split(0, 2)),  # in two blocks
    ((4, 16), split(1, 4), split(0, 1)),
]
PAIRS = [pair for pair in CONVERSIONS if pair[0] in "IS"]  # a weight is stored so
USES = [(0, 1, 2, 3, 4), (1, 2, 4), (3,)]  # the weights that get a gradient
TOGETHER = {"forward": {"all_gather"}, "recompute": {"all_gather"}, "backward": {"all_reduce", "reduce_scatter"}}


@dataclass(frozen=True)
class Found:
    """What one rank has for a pair of states and some used weights: alone, and in a bucket."""

    values: list[tuple[torch.Tensor, torch.Tensor]]
    gradients: list[tuple[torch.Tensor | None, torch.Tensor | None]]
    second: list[tuple[torch.Tensor | None, torch.Tensor | None]]  # those of a sum of squared gradients
    log: list[Issued]


def conversion(pair: tuple[str, str], weight: int) -> Conversion:
    _, here, there = WEIGHTS[weight]
    states: dict[str, State] = {"I": I, "R": R, "P": P, "S": here}
    target = there if pair == ("S", "S") else states[pair[1]]
    return Conversion(axis=0, source=(states[pair[0]],), target=(target,))


def stored(pair: tuple[str, str], rank: int) -> list[torch.Tensor]:
    """This rank's part of every weight."""
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape, _, _ in WEIGHTS]
    parts = [shard(whole, conversion(pair, i).source, (RANKS,), (rank,)) for i, whole in enumerate(wholes)]
    return [part.clone().requires_grad_() for part in parts]


def loss(values: Sequence[torch.Tensor], used: tuple[int, ...], rank: int) -> torch.Tensor:
    """Each value used is saved for the backward, and every rank has its own gradients."""
    return torch.stack([(values[i] * values[i]).sum() * (1 + i + rank) for i in used]).sum()


def together(
    pair: tuple[str, str], weights: list[torch.Tensor], axis: Axis, used: tuple[int, ...], rematerializer: Rematerializer
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The values of a bucket and their loss."""
    name, steps = "__".join(CONVERSIONS[pair]), [conversion(pair, i) for i in range(len(WEIGHTS))]
    places = [tuple(split_position(s, shape, (RANKS,))) for s, (shape, _, _) in zip(steps, WEIGHTS, strict=True)]
    recompute = rematerializer if CONVERSIONS[pair][0] in COLLECTIVES else None
    with rematerializer.active():
        start, wait = FUNCTIONS[name]
        values = wait(start(weights, axis), axis, places if "S" in pair else None, recompute)
        return [value.detach().clone() for value in values], loss(values, used, axis.index)


def penalized(total: torch.Tensor, weights: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """The gradients of the sum of squared gradients."""
    gradients = torch.autograd.grad(total, weights, create_graph=True, allow_unused=True)
    penalty = torch.stack([gradient.square().sum() for gradient in gradients if gradient is not None]).sum()
    return torch.autograd.grad(penalty, weights, allow_unused=True)


def convert(cases: list[tuple[tuple[str, str], tuple[int, ...]]]) -> list[Found]:
    context = connect(Mesh.of(RANKS))
    (axis,) = context.axes
    found = []
    for pair, used in cases:
        alone, bucket = stored(pair, axis.index), stored(pair, axis.index)
        calls = [conversion_call(conversion(pair, i), shape, (RANKS,)) for i, (shape, _, _) in enumerate(WEIGHTS)]
        expected = [function(w, axis, *places) for w, (function, places) in zip(alone, calls, strict=True)]
        loss(expected, used, axis.index).backward()  # type: ignore[no-untyped-call]
        with recorded(context.axes) as log:
            values, total = together(pair, bucket, axis, used, Rematerializer())
            total.backward()  # type: ignore[no-untyped-call]
        gradients = [(one.grad, other.grad) for one, other in zip(alone, bucket, strict=True)]
        expected = [function(w, axis, *places) for w, (function, places) in zip(alone, calls, strict=True)]
        _, total = together(pair, bucket, axis, used, Rematerializer())
        second = list(zip(penalized(loss(expected, used, axis.index), alone), penalized(total, bucket), strict=True))
        both = [(one.detach(), other) for one, other in zip(expected, values, strict=True)]
        found.append(Found(values=both, gradients=gradients, second=second, log=log))
    return found


def messages(pair: tuple[str, str], used: tuple[int, ...]) -> Counter[Issued]:
    """What a bucket sends: one message of all where that is possible, else one for each."""
    forward, backward = CONVERSIONS[pair]
    expected: Counter[Issued] = Counter()
    every = tuple(range(len(WEIGHTS)))
    for role, kind, which in (("forward", forward, every), ("backward", backward, used), ("recompute", forward, used)):
        if kind in COLLECTIVES:
            sizes = [conversion(pair, i).collective_bytes(WEIGHTS[i][0], 8, (RANKS,)) for i in which]
            where = "forward" if role == "forward" else "backward"
            for size in [sum(sizes)] if kind in TOGETHER[role] else sizes:
                expected[Issued(kind=kind, axis="axis0", bytes=size, where=where)] += 1
    return expected


def test_a_bucket_converts_as_each_weight_alone_in_one_collective(pool: WorkerPool) -> None:
    cases = list(itertools.product(PAIRS, USES))
    for results in pool.run(f"{__name__}:convert", cases, ranks=RANKS, keep=True):
        assert isinstance(results, list)
        for (pair, used), found in zip(cases, results, strict=True):
            for weight, (alone, bucket) in enumerate(found.values):
                torch.testing.assert_close(bucket, alone, msg=lambda text: f"{pair} weight {weight}\n{text}")  # noqa: B023
            for weight, (alone, bucket) in [*enumerate(found.gradients), *enumerate(found.second)]:
                assert (bucket is not None) == (alone is not None) == (weight in used), (pair, used, weight)
                if alone is not None:
                    torch.testing.assert_close(bucket, alone, msg=lambda text: f"{pair} weight {weight}\n{text}")  # noqa: B023
            assert Counter(found.log) == messages(pair, used), (pair, used)


def test_the_tested_conversions_are_those_that_a_stored_weight_can_take() -> None:
    assert len(PAIRS) == 7
    assert {CONVERSIONS[pair][0] for pair in PAIRS} == {"identity", "slice", "keep", "all_gather", "pad", "all_to_all"}


def test_every_conversion_has_a_pair_of_functions_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for machinery in ("start_bucket", "wait_bucket"):
        monkeypatch.setattr(bucketed_collectives, machinery, lambda conversion, *_: called.append(conversion))
    assert list(FUNCTIONS) == ["__".join(primitives) for primitives in WAYS.values()]
    for name, (start, wait) in FUNCTIONS.items():
        assert (start.__name__, wait.__name__) == (f"{name}_start", f"{name}_wait")
        axis = Axis(name="axis", size=2, index=0, group=None)
        wait(start([], axis), axis)
        assert called[-2:] == [name, name]


@pytest.mark.parametrize("pair", PAIRS)
def test_on_an_axis_of_one_device_a_bucket_is_returned_as_it_is(pair: tuple[str, str]) -> None:
    axis, name = Axis(name="dp", size=1, index=0, group=""), "__".join(CONVERSIONS[pair])
    weights = [torch.randn(2, 3, requires_grad=True), torch.randn(4)]
    with recorded([axis]) as log:
        start, wait = FUNCTIONS[name]
        found = wait(start(weights, axis), axis, [(0,), (0,)], Rematerializer())
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in weights]
    assert not log


def add(reduce_dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.dtype, list[Issued]]:
    """The gradient of a gathered weight in bfloat16 to which the ranks add 256, 1, 1 and 1, and what it took."""
    context = connect(Mesh.of(RANKS))
    (axis,) = context.axes
    weight = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    with recorded(context.axes) as log:
        bucket = all_gather__reduce_scatter_start([weight], axis, reduce_dtype)
        (value,) = all_gather__reduce_scatter_wait(bucket, axis, [(0,)], Rematerializer())
        (value * (256 if axis.index == 0 else 1)).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return weight.grad, value.dtype, log


@pytest.mark.parametrize("reduce_dtype, size", [(None, 2), (torch.float32, 4)])
def test_gradients_are_reduced_in_the_given_dtype(pool: WorkerPool, reduce_dtype: torch.dtype | None, size: int) -> None:
    for found in pool.run(f"{__name__}:add", reduce_dtype, ranks=RANKS, keep=True):
        assert isinstance(found, tuple)
        gradient, value, log = found
        assert gradient.dtype == value == torch.bfloat16
        assert [(entry.kind, entry.bytes) for entry in log] == [("all_gather", 8 * 2), ("reduce_scatter", 8 * size)]
        if reduce_dtype:
            assert gradient.tolist() == [260.0, 260.0], "259 rounded once; 256 + 1 is 256 in bfloat16"


def moved(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object], found: object) -> int:
    """Bytes that a kernel reads and writes, but for those of collectives: what is copied into is written once."""
    if func.namespace != "aten" or "empty" in str(func) or "_unsafe_view" in str(func):
        return 0
    return sum(one.nbytes for one in {id(one): one for one in tensors((args, kwargs, found))}.values())


def copied(pair: tuple[str, str]) -> tuple[int, int]:
    """Bytes that two weights in bfloat16, whose gradients are reduced in float32, are copied by, forward and backward."""
    axis = connect(Mesh.of((RANKS,))).axes[0]
    shapes = [(8, 12), (16, 4)]
    weights = [torch.ones(rows // (RANKS if pair[0] == "S" else 1), columns, dtype=torch.bfloat16) for rows, columns in shapes]
    name = "__".join(WAYS[pair])
    start, wait = (getattr(bucketed_collectives, f"{name}_{half}") for half in ("start", "wait"))
    with Dispatched(moved) as forward:
        values = wait(start([weight.requires_grad_() for weight in weights], axis, torch.float32), axis, [(0,), (0,)])
    gradients = [torch.ones(shape, dtype=value.dtype) for shape, value in zip(shapes, values, strict=True)]
    with Dispatched(moved) as backward:
        torch.autograd.backward(values, gradients)
    return forward.bytes, backward.bytes


@pytest.mark.parametrize("pair", [("S", "R"), ("I", "R")], ids="".join)
def test_a_bucket_copies_what_is_priced(pool: WorkerPool, pair: tuple[str, str]) -> None:
    device = replace(DEVICES["h100"], launch=0.0)
    prices, whole = Prices(mesh=Mesh(axes=("axis0",), sizes=(RANKS,), device=device)), np.array([8 * 12 * 2, 16 * 4 * 2])
    there, back = WAYS[pair]
    of = whole, whole // RANKS, np.zeros((2, 2), dtype=np.bool_)
    unpacking, packing = prices.unpacking(there, *of, bucketed=True), prices.packing(back, *of, bucketed=True, wider=2)
    for found in pool.run(f"{__name__}:copied", pair, ranks=RANKS):
        assert found == tuple(round(float(seconds.sum()) * device.streaming) for seconds in (unpacking, packing))


SPLITS = [
    ((4, 8), split(0, 1), None),
    ((4, 8), split(1, 2), None),
    ((1, 8), split(1, 2), None),
    ((8, 8), split(0, 2), split(1, 2)),
]


def copied_alone(case: int) -> tuple[int, int]:
    """Bytes that a tensor of its own is copied by when it is gathered, or its split moves, forward and backward."""
    axis = connect(Mesh.of((RANKS,))).axes[0]
    shape, before, after = SPLITS[case]
    step = Conversion(axis=0, source=(before,), target=(after or R,))
    x = shard(torch.ones(shape), step.source, (RANKS,), (axis.index,)).clone().requires_grad_()
    function, arguments = conversion_call(step, shape, (RANKS,))
    with Dispatched(moved) as forward:
        value = function(x, axis, *arguments)
    gradient = torch.ones_like(value)
    with Dispatched(moved) as backward:
        value.backward(gradient)
    return forward.bytes, backward.bytes


@pytest.mark.parametrize("case", range(len(SPLITS)))
def test_a_tensor_of_its_own_is_copied_as_is_priced(pool: WorkerPool, case: int) -> None:
    """Where the parts of its dim lie apart."""
    shape, before, after = SPLITS[case]
    device = replace(DEVICES["h100"], launch=0.0)
    prices = Prices(mesh=Mesh(axes=("axis0",), sizes=(RANKS,), device=device))
    step = Conversion(axis=0, source=(before,), target=(after or R,))
    sizes = [np.array([4 * math.prod(local_shape(shape, layout, (RANKS,)))]) for layout in (step.source, step.target)]
    ends = np.array([[scattered(layout, 0, shape, (RANKS,)) for layout in (step.source, step.target)]])
    there, back = step.primitives
    of = max(sizes), min(sizes)
    unpacking = prices.unpacking(there, *of, ends, bucketed=False)
    packing = prices.packing(back, *of, ends[:, ::-1], bucketed=False)
    for found in pool.run(f"{__name__}:copied_alone", case, ranks=RANKS):
        assert found == tuple(round(float(seconds[0]) * device.streaming) for seconds in (unpacking, packing))
