"""Measured times of operators, collectives and optimizers, while all workers run the same: they share cores and memory.

With accelerators each worker has its own, messages go through NCCL, and a measurement ends when the device is done.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.ir.device import Bytes, Seconds
from autopar.ir.program import Argument, Ref, overload
from autopar.runtime.collectives import PRIMITIVES, SplitPosition, all_reduce_in_place
from autopar.runtime.custom_ops import Operators
from autopar.runtime.memory_rates import HostTimes, Timer, host_times
from autopar.runtime.world import Axis

OperandSpec = tuple[tuple[int, ...], torch.dtype, bool, tuple[int, ...]]  # shape, dtype, requires_grad, elements if not 0
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ENOUGH: Seconds = 0.02  # duration of one measurement, for which the operation is repeated
COLD: Bytes = 1 << 26  # of copies of an operator's operands, beyond the caches of a core or a GPU,
COPIES = 64  # if these are no more
ROUNDS = 5  # measurements, of which the median is taken
LARGE = 8192  # side of the square matrices that are multiplied beside an all-gather,
PRODUCTS = 10  # so many times, which takes longer than
GATHERED = 1 << 28  # gathering so many bytes
STALL = 4096  # side of the square matrices that are multiplied while
AHEAD = 20  # calls, at most, are issued
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
    parameters: tuple[tuple[tuple[int, ...], ...], ...]  # sets of shapes, of each of which a step is timed
    accelerator: bool = False  # CUDA devices, one for each process

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors are."""
        return torch.device("cuda", dist.get_rank()) if self.accelerator else torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds: forward and backward of each call, of collectives by (group size, kind, bytes), of a step of each optimizer over
    each set of parameters.

    `beside` is for accelerators only: a product, an all-gather among all, and the two concurrently; so is `host`. `noise` has
    the spread of every measurement's rounds: interquartile range over median.
    """

    calls: tuple[tuple[Seconds, Seconds], ...]
    collectives: dict[tuple[int, str, Bytes], Seconds]
    optimizers: dict[str, tuple[Seconds, ...]]
    beside: tuple[Seconds, Seconds, Seconds] | None = None
    host: HostTimes | None = None
    noise: tuple[float, ...] = ()


def times(job: Job) -> Times:
    """Measure on this rank of a gloo group; all ranks call it with the same job."""
    job.operators.unpack()
    if job.accelerator:
        torch.cuda.set_device(job.device)
    noise: list[float] = []
    timer = issued_ahead(job.device) if job.accelerator else repeated
    return Times(
        calls=tuple(_call(call, job.device, timer, noise) for call in job.calls),
        collectives=dict(_collectives(job, noise)),
        optimizers={
            name: tuple(_optimizer(name, shapes, job.device, noise) for shapes in job.parameters) for name in job.optimizers
        },
        beside=_beside(job) if job.accelerator and job.groups else None,
        host=host_times(job.device, noise, repeated) if job.accelerator else None,
        noise=tuple(noise),
    )


def _finish() -> None:
    """Wait until the accelerator is done, if this process uses one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _spread(rounds: Sequence[Seconds]) -> float:
    low, middle, high = statistics.quantiles(rounds, n=4)
    return (high - low) / middle if middle else 0.0


def repeated(run: Callable[[], object], noise: list[float]) -> Seconds:
    """The median time of one call; the spread of rounds is appended to `noise`."""
    run()
    _finish()
    begin = time.perf_counter()
    run()
    _finish()
    count = max(1, round(ENOUGH / max(time.perf_counter() - begin, 1e-7)))
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(count):
            run()
        _finish()
        found.append((time.perf_counter() - begin) / count)
    noise.append(_spread(found))
    return statistics.median(found)


def issued_ahead(device: torch.device) -> Timer:
    """Times calls as a CUDA device runs them, without the host's time to issue them, which runs ahead in a step.

    The device multiplies matrices until the host has issued the calls; calls that wait for the device are timed including that.
    """
    factor = torch.ones(STALL, STALL, dtype=torch.float16, device=device)
    product = repeated(lambda: factor @ factor, [])

    def timed(run: Callable[[], object], noise: list[float]) -> Seconds:
        run()
        _finish()
        begin = time.perf_counter()
        run()
        issued = time.perf_counter() - begin
        _finish()
        count = max(1, min(AHEAD, round(ENOUGH / (time.perf_counter() - begin))))
        found = list[Seconds]()
        for _ in range(ROUNDS):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            for _ in range(1 + round(2 * count * issued / product)):
                factor @ factor
            first.record()
            for _ in range(count):
                run()
            last.record()
            _finish()
            found.append(first.elapsed_time(last) / 1e3 / count)
        noise.append(_spread(found))
        return statistics.median(found)

    return timed


def _call(call: TimedCall, device: torch.device, timer: Timer, noise: list[float]) -> tuple[Seconds, Seconds]:
    """Seconds of an operator's forward and backward with cold caches: in a step caches hold other operators' tensors."""
    operands = _cold(lambda: [_tensor(*spec, device) for spec in call.operands])
    target = overload(call.target)

    def forward(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        feed = iter(given)
        args = (_filled(a, feed, device) for a in call.args)
        out = target(*args, **{name: _filled(a, feed, device) for name, a in call.kwargs})
        found = [out] if isinstance(out, torch.Tensor) else list(out)
        return [tensor for tensor in found if isinstance(tensor, torch.Tensor) and tensor.requires_grad]

    there = timer(lambda: forward(next(operands)), noise)
    results = forward(next(operands))
    if not results:
        return there, 0.0
    gradients = _cold(lambda: [torch.ones_like(result) for result in results])

    def both() -> None:
        given = next(operands)
        wanted = [tensor for tensor in given if tensor.requires_grad]
        torch.autograd.grad(forward(given), wanted, next(gradients), allow_unused=True)

    return there, max(timer(both, noise) - there, 0.0)


def _cold(make: Callable[[], list[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """Cycle through enough copies of tensors to exceed the caches."""
    copies = [make()]
    size = sum(tensor.numel() * tensor.itemsize for tensor in copies[0])
    copies += [make() for _ in range(1, min(COPIES, math.ceil(COLD / max(size, 1))))]
    return itertools.cycle(copies)


def _tensor(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, elements: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """A tensor of these elements; by default numbers between 1 and 2, and zeros for integers, which may be indices."""
    if elements:
        return torch.tensor(elements, dtype=dtype, device=device).reshape(shape)
    if dtype.is_floating_point or dtype.is_complex:
        return (1 + torch.rand(shape, dtype=dtype, device=device)).requires_grad_(requires_grad)
    return torch.full(shape, int(dtype is torch.bool), dtype=dtype, device=device)


def _filled(argument: Argument, feed: Iterator[torch.Tensor], device: torch.device) -> object:
    if isinstance(argument, Ref):
        return next(feed)
    if isinstance(argument, tuple):
        return [_filled(part, feed, device) for part in argument]
    return device if isinstance(argument, torch.device) else argument


def _collectives(job: Job, noise: list[float]) -> Iterator[tuple[tuple[int, str, Bytes], Seconds]]:
    world, rank = dist.get_world_size(), dist.get_rank()
    for size in job.groups:
        backend = "nccl" if job.accelerator else None
        groups = [dist.new_group(list(range(first, first + size)), backend=backend) for first in range(0, world, size)]
        group = groups[rank // size]
        axis = Axis(name="measured", size=size, index=rank % size, group=str(group.group_name))
        for kind in KINDS:
            primitive = all_reduce_in_place if kind == "all_reduce" else PRIMITIVES[kind]
            for count in job.bytes:
                given = count // size if kind == "all_gather" else count
                x = torch.ones(max(size, given // 4 // size * size), dtype=torch.float32, device=job.device)
                run = functools.partial(primitive, x, axis, SplitPosition())
                yield (size, kind, count), _agreed(run, count, job.device, noise)


def _agreed(run: Callable[[], object], count: Bytes, device: torch.device, noise: list[float]) -> Seconds:
    """The median time that a collective adds to a matrix product before it: in training ranks compute between them.

    Every rank repeats it equally often.
    """
    often = max(3, min(20, (1 << 22) // count))
    factor = torch.ones(SIDE, SIDE, device=device)

    def both() -> None:
        factor @ factor
        run()

    alone, together = [], []
    for _ in range(ROUNDS):
        dist.barrier()
        alone.append(_timed(lambda: factor @ factor, often))
        dist.barrier()
        together.append(_timed(both, often))
    noise.append(_spread(together))
    return max(statistics.median(more - less for more, less in zip(together, alone, strict=True)), 0.0)


def _timed(run: Callable[[], object], often: int) -> Seconds:
    _finish()
    begin = time.perf_counter()
    for _ in range(often):
        run()
    _finish()
    return (time.perf_counter() - begin) / often


def _beside(job: Job) -> tuple[Seconds, Seconds, Seconds]:
    """A product, an all-gather among all processes, and the product while the all-gather is under way."""
    group = dist.new_group(backend="nccl")
    factor = torch.ones(LARGE, LARGE, dtype=torch.float16, device=job.device)
    part = torch.ones(GATHERED // dist.get_world_size(), dtype=torch.uint8, device=job.device)
    whole = torch.empty(part.numel() * dist.get_world_size(), dtype=torch.uint8, device=job.device)

    def gather() -> None:
        work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
        if work is not None:
            work.wait()

    def both() -> None:
        work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
        for _ in range(PRODUCTS):
            factor @ factor
        if work is not None:
            work.wait()

    def products() -> None:
        for _ in range(PRODUCTS):
            factor @ factor

    for run in (products, gather, both):
        run()
    alone, sent, together = (statistics.median(_timed(run, 3) for _ in range(ROUNDS)) for run in (products, gather, both))
    return alone, sent, together


def _optimizer(name: str, shapes: Sequence[tuple[int, ...]], device: torch.device, noise: list[float]) -> Seconds:
    parameters = [torch.nn.Parameter(torch.rand(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizer: torch.optim.Optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name](parameters, lr=1e-3)
    return repeated(optimizer.step, noise)
