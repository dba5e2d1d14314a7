"""Profile this machine, so that plans are priced by measurements instead of data sheets.

    python -m autopar.profile train.py:build --processes 4 --save machine.json       build() returns (model, sample_input)
    python -m autopar.explain train.py:build --mesh 2,2 --device machine.json

    python -m autopar.profile train.py:build --disk /nvme --save machine.json                  the disk of a folder, too
    python -m autopar.explain train.py:build --mesh 2 --device machine.json --offload disk --disk-memory 2TB

Every distinct operator of the model runs forward and backward at its local shapes under data parallelism, on all processes at
the same time; so do collectives, in groups of every size that divides the number of processes. The file can be read and edited.
Its source states how much repeated measurements differ, and a warning is printed if the machine was busy.

On a CPU, one thread each and gloo, an operator gets a rate: its work (`cost_models.compute`) over its time. Operators dominated
by the call itself, on scalars say, give the launch time and no rate: another model may run them on large tensors. Operators
without a rate are priced by the roofline. With --cuda, one GPU per process and NCCL, the times are fitted to the kernel laws
(`cost_models.kernels`): products and attention over several lengths, shares of the memory bandwidth, and how much messages slow
down computing. So a profile of one model prices others, and other sizes. The bus to the host and the host's memory are measured
by copies and a fused AdamW step on all processes at once. The GPU must be in the catalog, for its peaks.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopar.analysis.analysis import analyse
from autopar.cost_models import catalog
from autopar.cost_models.kernel_fit import interference
from autopar.cost_models.kernel_profile import Kernel, fitted, probes
from autopar.cost_models.optimizers import optimizer
from autopar.cost_models.profile_file import measured_link, save
from autopar.errors import MeshError
from autopar.explain.cli_arguments import UsageError, built
from autopar.explain.exit_code import exit_code
from autopar.ir.device import Bytes, Device, Disk, Link, Seconds
from autopar.ir.layout import local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.program import Op, Program, Value
from autopar.ir.training_step import TrainingStep
from autopar.operators import OpSharding, localise, row_of, view_of, writes
from autopar.operators.call import Call
from autopar.plan.assignment_text import resolve
from autopar.plan.options import Options
from autopar.planning.planner import connected_mesh, plan_program, read_program
from autopar.runtime.benchmark import KINDS, Job, TimedCall, Times
from autopar.runtime.custom_ops import Operators
from autopar.runtime.memory_rates import DiskTimes, disk_times
from autopar.runtime.progress import progress
from autopar.runtime.workers import WorkerPool
from autopar.search_space.assignment import Assignment
from autopar.search_space.candidates import distributed, parts_of

BYTES = tuple(1 << power for power in range(10, 25, 2))  # 1 KiB to 16 MiB
GPU_BYTES = tuple(1 << power for power in range(14, 31, 2))  # 16 KiB to 1 GiB
OPTIMIZERS = ("adamw", "sgd")
UPDATED = tuple(1 << power for power in (6, 12, 16, 20, 23, 26))  # bytes of parameters that are stepped: 64 to 64 MiB,
BEYOND = 1 << 24  # in sets of so many bytes or more, which caches lack with gradients and state,
MANY = 256  # but of no more parameters
CALLS = 2  # launches at the device's peaks, up to which an operator's time is that of the call
NOISY = 0.2  # where a quarter of the measurements differ by more from round to round, plans are of no use


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """An operator to measure, with its work in forward and backward in the unit of its rate: operations or bytes.

    It is `short` if at the device's peaks its forward would take no longer than about a call: its time says nothing about a
    rate.
    """

    call: TimedCall
    work: tuple[int, int]
    short: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How much rounds of a measurement differ: the quartiles of (interquartile range / median) over all measurements."""

    low: float
    middle: float
    high: float

    @staticmethod
    def of(found: Sequence[Times]) -> Noise:
        """The noise of all measurements of all processes."""
        spreads = [spread for times in found for spread in times.noise] or [0.0]
        low, middle, high = np.quantile(spreads, (0.25, 0.5, 0.75)).tolist()
        return Noise(low=low, middle=middle, high=high)

    def __str__(self) -> str:
        return f"repeats differ by {self.middle:.0%} (quartiles {self.low:.0%} .. {self.high:.0%})"


def parser() -> argparse.ArgumentParser:
    """The options of `python -m autopar.profile`."""
    found = argparse.ArgumentParser(
        prog="python -m autopar.profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("targets", nargs="+", metavar="TARGET", help="file.py:function or package.module:function")
    found.add_argument("--processes", type=int, default=2, help="number of processes that run at the same time (2)")
    found.add_argument("--cuda", action="store_true", help="measure this machine's GPUs, one for each process")
    found.add_argument("--disk", metavar="FOLDER", default="", help="measure the disk of this folder, too, by a file of 1 GiB")
    found.add_argument("--save", required=True, metavar="FILE.json")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return exit_code(lambda: _run(parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    if options.processes < 1:
        raise UsageError(f"--processes {options.processes} is not a number of processes", fix="1 or more")
    if options.save.endswith(".py") or not Path(options.save).absolute().parent.is_dir() or Path(options.save).is_dir():
        raise UsageError(f"cannot write {options.save!r}", fix="a file in a folder that exists, not of Python code")
    with progress("building and capturing the models") as tell:
        programs = [read_program(*built(target)).program for target in options.targets]
        if options.disk:
            tell("measuring the disk")
        disk = disk_times(options.disk) if options.disk else None
        tell(f"measuring operators and collectives on {options.processes} processes")
        measure = gpu_profile if options.cuda else profile
        device, noise = measure(programs, options.processes, disk)
        try:
            save(device, options.save)
        except OSError as error:
            raise UsageError(f"cannot write {options.save}", error=error) from error
    print(noise)
    if noise.high > NOISY:
        print("these are the times of a busy machine: measure again while it does nothing else", file=sys.stderr)
    return 0


def profile(programs: Sequence[Program], processes: int, disk: DiskTimes | None = None) -> tuple[Device, Noise]:
    """Measure the device with `processes` gloo processes that run the operators of some programs; also returns the noise.

    Its disk is the measured one.
    """
    timed = list(dict.fromkeys(found for program in programs for found in _operators(program, processes)))
    groups = tuple(size for size in range(2, processes + 1) if processes % size == 0)
    job = Job(
        operators=Operators.of(one.call.target for one in timed), calls=tuple(one.call for one in timed), groups=groups,
        bytes=BYTES, optimizers=OPTIMIZERS, parameters=tuple(map(_alike, UPDATED)),
    )  # fmt: skip
    with WorkerPool(processes, preload=["autopar.runtime.benchmark"]) as pool:
        found = [one for one in pool.run("autopar.runtime.benchmark:times", job, timeout=1800) if isinstance(one, Times)]
    return _device(timed, job, found, disk), Noise.of(found)


def gpu_profile(programs: Sequence[Program], processes: int, disk: DiskTimes | None = None) -> tuple[Device, Noise]:
    """Measure the device with `processes` GPUs of this machine that run the operators of some programs; also returns the noise.

    Raises MeshError if there are fewer GPUs, or if they are not in the catalog.
    """
    count = torch.cuda.device_count()
    if count < processes:
        raise MeshError(
            f"a profile of {processes} GPUs on a machine that has {count}",
            fix="--processes with the number of GPUs" if count else "a profile of the CPU, without --cuda",
        )
    base = catalog.device(None)
    found = gpu_kernels(programs, processes, base)
    job = Job(
        operators=Operators.of(kernel.op.target for kernel in found), calls=tuple(map(timed_call, found)),
        groups=tuple(size for size in range(2, processes + 1) if processes % size == 0), bytes=GPU_BYTES,
        optimizers=OPTIMIZERS, parameters=(tuple(p.value.shape for p in programs[0].parameters),), accelerator=True,
    )  # fmt: skip
    with WorkerPool(processes, preload=["autopar.runtime.benchmark"]) as pool:
        times = [one for one in pool.run("autopar.runtime.benchmark:times", job, timeout=1800) if isinstance(one, Times)]
    return gpu_device(found, job, times, base, torch.cuda.get_device_properties(0).multi_processor_count, disk), Noise.of(times)


def gpu_kernels(programs: Sequence[Program], processes: int, base: Device) -> list[Kernel]:
    """What is timed on a GPU: the operators of some programs, and whatever else the fit needs."""
    calls: dict[TimedCall, Kernel] = {}
    for program in programs:
        for op, values in _local_ops(program, processes, base):
            kernel = Kernel.of(op, values, base)
            calls.setdefault(timed_call(kernel), kernel)
    own = list(calls.values())
    return [*own, *probes(own, base)]


def gpu_device(
    kernels: Sequence[Kernel], job: Job, found: Sequence[Times], base: Device, processors: int, disk: DiskTimes | None = None
) -> Device:
    """The device fitted to these times, each the mean over the processes."""
    seconds = [
        (statistics.fmean(times.calls[place][0] for times in found), statistics.fmean(times.calls[place][1] for times in found))
        for place in range(len(kernels))
    ]
    device = fitted(kernels, seconds, base, processors)
    beside = [times.beside for times in found if times.beside]
    lost = statistics.fmean(interference(*times) for times in beside) if beside else base.interference
    return dataclasses.replace(
        device,
        name=f"{base.name}, {len(found)} processes measured",
        interference=lost,
        **_host(found, device),
        disk=_disk(disk, device.source) or device.disk,
        rates=_optimizer_rates(job, found),
        links={size: _link(size, job, found, device.source) for size in job.groups},
    )


def timed_call(kernel: Kernel) -> TimedCall:
    """The kernel as processes time it."""
    op, elements = kernel.op, {}
    if timed := row_of(op).timed:
        call = Call.of(op, dict(zip(op.operands, kernel.given, strict=True)))
        elements = {position: found for name, found in timed(call).items() for position in call.positions(name)}
    specs = tuple(
        (value.shape, value.dtype, value.requires_grad, elements.get(position, ()))
        for position, value in enumerate(kernel.given)
    )
    return TimedCall(target=op.target, args=op.args, kwargs=op.kwargs, operands=specs)


def _operators(program: Program, processes: int) -> Iterator[Timed]:
    """The operators of a program that take time, with their work, on a CPU."""
    device = catalog.device("cpu", processes)
    for op, values in _local_ops(program, processes, device):
        kernel = Kernel.of(op, values, device)
        work = kernel.price.amount(kernel.work(0)), kernel.price.amount(kernel.work(1))
        short = kernel.price.forward_seconds(kernel.operands, kernel.results) <= CALLS * device.launch
        yield Timed(call=timed_call(kernel), work=work, short=short)


def _local_ops(program: Program, processes: int, device: Device) -> Iterator[tuple[Op, dict[str, Value]]]:
    """The operators of a program that take time, at their local shapes under data parallelism, with their operands; at whole
    shapes if data parallelism runs them in a distributed form, such as experts whose tokens are sent.
    """
    mesh = connected_mesh((processes,), Options(device=device))
    plan = plan_program(program, mesh, Options(device=device, strategy="ddp" if processes > 1 else "auto"))
    analysis = analyse(TrainingStep(program=program), mesh)
    chosen = resolve(plan, analysis.step, analysis.fits)
    for op in program.ops:
        if not view_of(op, program.values) and not writes(op):
            yield _local(op, analysis.fits[op.name], program, chosen, mesh)


def _local(op: Op, fitted: OpSharding | None, program: Program, chosen: Assignment, mesh: Mesh) -> tuple[Op, dict[str, Value]]:
    candidate, values = chosen.ops[op.name], program.values
    if distributed(fitted, candidate):  # code of its own, in which the operator has other operands
        return op, {name: values[name] for name in op.operands}
    inside = [local_shape(values[n].shape, x, mesh.sizes) for n, x in zip(op.operands, candidate.operands, strict=True)]
    outside = [local_shape(r.shape, x, mesh.sizes) for r, x in zip(op.results, candidate.results, strict=True)]
    args, kwargs = (
        localise(op, fitted, inside, outside, parts_of(fitted, candidate, mesh.sizes)) if fitted else (op.args, op.kwargs)
    )
    results = tuple(dataclasses.replace(r, shape=s) for r, s in zip(op.results, outside, strict=True))
    local = {n: dataclasses.replace(values[n], shape=s) for s, n in zip(inside, op.operands, strict=True)}
    return dataclasses.replace(op, args=args, kwargs=kwargs, results=results), local


def _device(timed: Sequence[Timed], job: Job, found: Sequence[Times], disk: DiskTimes | None = None) -> Device:
    """A device with the mean rates over the processes; its launch time is the median of the short calls."""
    base = catalog.cpu(len(found))
    work: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    launches = list[Seconds]()
    for place, one in enumerate(timed):
        seconds = [statistics.fmean(times.calls[place][way] for times in found) for way in (0, 1)]
        if one.short:
            launches.append(seconds[0])
            continue
        for slot, value in enumerate((*one.work, *seconds)):
            work[one.call.target][slot] += value
    rates = {target: (_rate(w[0], w[2]), _rate(w[1], w[3])) for target, w in sorted(work.items()) if w[0] and w[2]}
    source = (
        f"measured {date.today()} on {platform.machine()}, {base.source}; torch {torch.__version__}, gloo, "
        f"{len(found)} processes at the same time; {Noise.of(found)}"
    )
    links = {size: _link(size, job, found, source) for size in job.groups}
    return Device(
        name=f"cpu, {len(found)} processes measured", flops=base.flops, memory=base.memory, bandwidth=base.bandwidth,
        launch=statistics.median(launches or [base.launch]), inner="gloo", outer="gloo", per_node=len(found), source=source,
        rates=rates, updates=_updates(job, found), links=links, disk=_disk(disk, source),
    )  # fmt: skip


def _optimizer_rates(job: Job, found: Sequence[Times]) -> dict[str, tuple[float, float]]:
    """Bytes per second that a step of each optimizer moves, over all parameters at once."""
    (shapes,), rates = job.parameters, dict[str, tuple[float, float]]()
    total = sum(4 * torch.Size(shape).numel() for shape in shapes)
    for name in job.optimizers:
        seconds = statistics.fmean(times.optimizers[name][0] for times in found)
        rates[f"optimizer.{name}"] = total * optimizer(name).moved / seconds, 0.0
    return rates


def _updates(job: Job, found: Sequence[Times]) -> dict[str, dict[Bytes, Seconds]]:
    """Seconds of a step of each optimizer over one parameter, by its bytes: on a CPU it steps them one after the other."""
    return {
        name: {
            4 * torch.Size(shapes[0]).numel(): statistics.fmean(times.optimizers[name][place] for times in found) / len(shapes)
            for place, shapes in enumerate(job.parameters)
        }
        for name in job.optimizers
    }


def _alike(size: Bytes) -> tuple[tuple[int, ...], ...]:
    """The shapes of enough parameters of so many bytes to exceed the caches, at most MANY."""
    return ((size // 4,),) * max(1, min(MANY, BEYOND // size))


def _host(found: Sequence[Times], device: Device) -> dict[str, Any]:
    """What is measured of the host: the bus of one device, and the memory bandwidth of all processes together."""
    measured = [times.host for times in found if times.host]
    if not measured:
        return {}
    seconds = {size: statistics.fmean(host.copies[size] for host in measured) for size in measured[0].copies}
    latency, per_byte = _line(seconds)
    bus = Link(name="measured, host", latency=latency, bandwidth=1 / per_byte, source=device.source)
    return {
        "host": bus,
        "host_bandwidth": optimizer("adamw").moved * sum(host.stepped for host in measured),
        "host_source": device.source,
    }


def _disk(measured: DiskTimes | None, source: str) -> Disk | None:
    """The measured disk; the user says how much of it may be used."""
    return Disk(memory=0, **dataclasses.asdict(measured), source=source) if measured else None


def _rate(work: float, seconds: float) -> float:
    """Work per second; a large constant if there is no time or no work."""
    return work / seconds if work and seconds else 1e15


def _link(size: int, job: Job, found: Sequence[Times], source: str) -> Link:
    """Latency and seconds per byte of each collective."""
    lines = {
        kind: _line({count: statistics.fmean(times.collectives[size, kind, count] for times in found) for count in job.bytes})
        for kind in KINDS
    }
    return measured_link(size, lines, source)


def _line(seconds: Mapping[Bytes, Seconds]) -> tuple[Seconds, float]:
    """Latency and seconds per byte, by least squares of relative errors; both non-negative."""
    sizes, found = np.array([*seconds], dtype=np.float64), np.array([*seconds.values()])
    found = np.maximum(found, found[found > 0].min(initial=1e-6))
    (empty, per_byte), *_ = np.linalg.lstsq(np.stack([1 / found, sizes / found], axis=1), np.ones(len(sizes)))
    return max(float(empty), 0.0), max(float(per_byte), 1e-15)


if __name__ == "__main__":
    sys.exit(main())
