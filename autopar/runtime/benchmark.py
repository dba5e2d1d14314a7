"""Measured times of operators, collectives and optimizers, while all workers run the same: they share cores and memory."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.ir.mesh import Bytes, Seconds
from autopar.ir.program import Argument, Ref, overload
from autopar.runtime.collectives import PRIMITIVES, SplitPosition
from autopar.runtime.custom_ops import Operators
from autopar.runtime.world import Axis

OperandSpec = tuple[tuple[int, ...], torch.dtype, bool]  # shape, dtype, requires_grad
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ENOUGH: Seconds = 0.02  # duration of one measurement, for which the operation is repeated
ROUNDS = 5  # measurements, of which the median is taken
SIDE = 384  # of the square matrices multiplied between collectives, which takes a millisecond or two


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCall:
    """An operator with its arguments, where `Ref`s are the `operands` in order."""

    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    operands: tuple[OperandSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to measure: operators, collectives for these group sizes and sizes of the larger buffer, optimizers."""

    operators: Operators
    calls: tuple[TimedCall, ...]
    groups: tuple[int, ...]
    bytes: tuple[Bytes, ...]
    optimizers: tuple[str, ...]
    parameters: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds: forward and backward of each call, of collectives by (group size, kind, bytes), of a step of each optimizer."""

    calls: tuple[tuple[Seconds, Seconds], ...]
    collectives: dict[tuple[int, str, Bytes], Seconds]
    optimizers: dict[str, Seconds]


def times(job: Job) -> Times:
    """Measure on this rank of a gloo group; all ranks call it with the same job."""
    job.operators.unpack()
    return Times(
        calls=tuple(map(_call, job.calls)),
        collectives=dict(_collectives(job)),
        optimizers={name: _optimizer(name, job.parameters) for name in job.optimizers},
    )


def repeated(run: Callable[[], object]) -> Seconds:
    """The median time of one call."""
    run()
    begin = time.perf_counter()
    run()
    count = max(1, round(ENOUGH / max(time.perf_counter() - begin, 1e-7)))
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(count):
            run()
        found.append((time.perf_counter() - begin) / count)
    return statistics.median(found)


def _call(call: TimedCall) -> tuple[Seconds, Seconds]:
    operands = [_tensor(*spec) for spec in call.operands]
    wanted = [tensor for tensor in operands if tensor.requires_grad]
    target = overload(call.target)

    def forward() -> list[torch.Tensor]:
        feed = iter(operands)
        out = target(*(_filled(a, feed) for a in call.args), **{name: _filled(a, feed) for name, a in call.kwargs})
        found = [out] if isinstance(out, torch.Tensor) else list(out)
        return [tensor for tensor in found if isinstance(tensor, torch.Tensor) and tensor.requires_grad]

    there = repeated(forward)
    results = forward()
    if not (wanted and results):
        return there, 0.0
    given = [torch.ones_like(result) for result in results]
    both = repeated(lambda: torch.autograd.grad(forward(), wanted, given, allow_unused=True))
    return there, max(both - there, 0.0)


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    """A tensor of numbers between 1 and 2; zeros for integers, which may be indices."""
    if dtype.is_floating_point or dtype.is_complex:
        return (1 + torch.rand(shape, dtype=dtype)).requires_grad_(requires_grad)
    return torch.ones(shape, dtype=dtype) if dtype is torch.bool else torch.zeros(shape, dtype=dtype)


def _filled(argument: Argument, feed: Iterator[torch.Tensor]) -> object:
    if isinstance(argument, Ref):
        return next(feed)
    if isinstance(argument, tuple):
        return [_filled(part, feed) for part in argument]
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _collectives(job: Job) -> Iterator[tuple[tuple[int, str, Bytes], Seconds]]:
    world, rank = dist.get_world_size(), dist.get_rank()
    for size in job.groups:
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        group = groups[rank // size]
        axis = Axis(name="measured", size=size, index=rank % size, group=str(group.group_name))
        for kind in KINDS:
            for count in job.bytes:
                given = count // size if kind == "all_gather" else count
                x = torch.ones(max(size, given // 4 // size * size), dtype=torch.float32)
                yield (size, kind, count), _agreed(functools.partial(PRIMITIVES[kind], x, axis, SplitPosition()), count)


def _agreed(run: Callable[[], object], count: Bytes) -> Seconds:
    """The median time that a collective adds to a matrix product before it: in training ranks compute between them.

    Every rank repeats it equally often.
    """
    often = max(3, min(20, (1 << 22) // count))
    factor = torch.ones(SIDE, SIDE)

    def both() -> None:
        factor @ factor
        run()

    found = []
    for _ in range(ROUNDS):
        dist.barrier()
        alone = _timed(lambda: factor @ factor, often)
        dist.barrier()
        found.append(_timed(both, often) - alone)
    return max(statistics.median(found), 0.0)


def _timed(run: Callable[[], object], often: int) -> Seconds:
    begin = time.perf_counter()
    for _ in range(often):
        run()
    return (time.perf_counter() - begin) / often


def _optimizer(name: str, shapes: Sequence[tuple[int, ...]]) -> Seconds:
    parameters = [torch.nn.Parameter(torch.rand(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizer: torch.optim.Optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name](parameters, lr=1e-3)
    return repeated(optimizer.step)
