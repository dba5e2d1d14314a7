"""Measured rates of what lies behind a device's memory: the bus to the host, the host's memory, a disk.

Every rank copies and steps at the same time, since ranks share the host. The disk is measured by one process: a rank reads one
file after the other, and plans share the disk's rate among ranks.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import torch

from autopar.errors import DiskError
from autopar.ir.device import Bytes, Seconds
from autopar.runtime.disk import CHUNK

COPIED = tuple(1 << power for power in (20, 24, 28))  # bytes of the copies between host and device
STEPPED = 1 << 24  # float32 parameters of the step on the host: more than caches hold
WRITTEN: Bytes = 1 << 30  # of the file
SMALL: Bytes = 4096  # of one access
ACCESSES = 101
Timer = Callable[[Callable[[], object], list[float]], Seconds]  # the median time of a call; what rounds differ by is added


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Seconds of copies from the host's pinned memory by bytes; parameters (bytes) stepped by fused AdamW there in a second."""

    copies: dict[Bytes, Seconds]
    stepped: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTimes:
    """Bytes per second of reading and writing one file, and seconds of one small access."""

    read: float
    write: float
    latency: Seconds


def host_times(device: torch.device, noise: list[float], timed: Timer) -> HostTimes:
    """Measure a device's copies and a fused step of AdamW by this process's threads, while other ranks do the same."""

    def copied(size: Bytes) -> Seconds:
        source = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        target = torch.empty(size, dtype=torch.uint8, device=device)
        return timed(lambda: target.copy_(source, non_blocking=True), noise)

    parameter = torch.nn.Parameter(torch.ones(STEPPED))
    parameter.grad = torch.ones(STEPPED)
    seconds = timed(torch.optim.AdamW([parameter], fused=True).step, noise)
    return HostTimes(copies={size: copied(size) for size in COPIED}, stepped=4 * STEPPED / seconds)


def disk_times(folder: str) -> DiskTimes:
    """Measure the disk of a folder by a file of 1 GiB without a name, out of the system's page cache where it lets itself.

    Raises DiskError for a folder in which there is no room for it.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, WRITTEN)
            write = WRITTEN / _written(file)
            _forget(file)
            read = WRITTEN / _read(file)
            _forget(file)
            return DiskTimes(read=read, write=write, latency=_latency(file))
    except OSError as error:
        raise DiskError(
            f"a file of {WRITTEN / 2**30:.0f} GiB to measure the disk cannot be written", folder=folder, error=error,
            fix="a folder that is there, with so much room",
        ) from error  # fmt: skip


def _written(file: BinaryIO) -> Seconds:
    """Seconds of writing the file until the disk has it."""
    chunk = os.urandom(CHUNK)  # which no file system packs into less
    begin = time.perf_counter()
    for _ in range(WRITTEN // CHUNK):
        file.write(chunk)
    file.flush()
    os.fsync(file.fileno())
    return time.perf_counter() - begin


def _read(file: BinaryIO) -> Seconds:
    """Seconds of reading the file as weights are read: chunk by chunk of a mapping."""
    mapped = torch.UntypedStorage.from_file(f"/proc/self/fd/{file.fileno()}", True, WRITTEN)
    source = torch.empty(0, dtype=torch.uint8).set_(mapped)  # type: ignore[arg-type]
    target = torch.zeros(CHUNK, dtype=torch.uint8)
    begin = time.perf_counter()
    for start in range(0, WRITTEN, CHUNK):
        target.copy_(source[start : start + CHUNK])
    return time.perf_counter() - begin


def _latency(file: BinaryIO) -> Seconds:
    """The median time of one small read, at places far from each other."""
    found, stride = [], WRITTEN // ACCESSES // SMALL * SMALL
    for place in range(ACCESSES):
        begin = time.perf_counter()
        os.pread(file.fileno(), SMALL, (place * 37 % ACCESSES) * stride)
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def _forget(file: BinaryIO) -> None:
    """Have the system drop the file from its page cache, which a file system in memory cannot."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


__all__ = ["DiskTimes", "HostTimes", "Timer", "disk_times", "host_times"]
