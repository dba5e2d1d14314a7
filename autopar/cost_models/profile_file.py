"""Measured profiles: a device and its links as a JSON file that a person can read.

{"name": "cpu, 4 processes", "source": "...",
 "device": {"flops": {"float32": 5.1e10}, "memory": 6e9, "bandwidth": 8e9, "launch": 2e-6},
 "rates": {"aten.linear.default": [4.8e10, 4.1e10], ...},                    operations or bytes per second: forward, backward
 "updates": {"adamw": {"65536": 1.8e-4, ...}},                               seconds of a step over a parameter of so many bytes
 "links": {"2": {"all_reduce": [0.0003, 1.2e-9], ...}, ...}}       by the size of a group: seconds if empty, and per byte

Of a GPU there are also coefficients of kernels' laws (`kernels`), in the place of rates:

 "product": {"processors": 132, "fraction": 0.66, "wave": 5e-06, "unaligned": 0.125}, "addresses": 3.2e+11,
 "attention": {"forward": {"128": 3.6e14}, "backward": {"128": 3.2e14}, "start": [200, 510]},
 "achieved": {"stream": [0.85, 0.85], "norm": [0.52, 0.23]}, "interference": 0.45,
 "host": {"latency": 9e-06, "bandwidth": 5.2e10, "memory": 2.2e12, "memory_bandwidth": 6.1e11}     of the bus, and of a node

and where a disk was measured

 "disk": {"read": 7e9, "write": 5.1e9, "latency": 4.5e-05, "memory": 0}                            of a node; 0: the user says
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autopar import files
from autopar.errors import MeshError
from autopar.ir.device import Device, Disk, Link, Seconds
from autopar.ir.kernel_rates import AttentionRate, ProductRate, positive


def save(device: Device, path: str | Path) -> None:
    """Write a measured device with its links."""
    data = {
        "name": device.name,
        "source": device.source,
        "device": {
            "flops": dict(device.flops), "memory": device.memory, "bandwidth": device.bandwidth, "launch": device.launch,
        },
        **_measured(device),
        "rates": {name: list(rates) for name, rates in device.rates.items()},
        "links": {
            str(size): {kind: list(line) for kind, line in link.lines.items()} for size, link in device.links.items()
        },
    }  # fmt: skip
    files.write(path, json.dumps(data, indent=1) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peaks:
    """A file's `device`."""

    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    launch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A file's `product`."""

    processors: int
    fraction: float
    wave: float
    unaligned: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """A file's `attention`."""

    forward: Mapping[int, float]
    backward: Mapping[int, float]
    start: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """A file's `host`."""

    latency: float
    bandwidth: float
    memory: float
    memory_bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Disk:
    """A file's `disk`."""

    read: float
    write: float
    latency: float
    memory: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Profile:
    """The contents of a file."""

    name: str
    source: str
    device: _Peaks
    rates: Mapping[str, tuple[float, float]]
    links: Mapping[int, Mapping[str, tuple[float, float]]]
    updates: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    interference: float = 1.0
    achieved: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    addresses: float = math.inf
    product: _Product | None = None
    attention: _Attention | None = None
    host: _Host | None = None
    disk: _Disk | None = None


def load(path: str | Path) -> Device:
    """Read a measured device. Raises MeshError if the file is not one."""
    try:
        found = files.typed(_Profile, files.parse(files.read(path)))
    except (OSError, ValueError) as error:
        raise MeshError(
            f"{path} is not a machine profile",
            error=error,
            fix="python -m autopar.profile --processes N --save profile.json writes one",
        ) from error
    source, peaks, product, attention = found.source, found.device, found.product, found.attention
    links = {size: measured_link(size, lines, source) for size, lines in found.links.items()}
    return Device(
        name=found.name, flops=peaks.flops, memory=int(peaks.memory), bandwidth=peaks.bandwidth, launch=peaks.launch,
        inner="gloo", outer="gloo", per_node=max([1, *links]), source=source, links=links, rates=found.rates,
        updates=found.updates, interference=found.interference, achieved=found.achieved, addresses=found.addresses,
        product=ProductRate(**asdict(product), source=source) if product else None,
        attention=AttentionRate(**asdict(attention), source=source) if attention else None,
        **_memories(found),
    )  # fmt: skip


def _memories(found: _Profile) -> dict[str, Any]:
    """The host and the disk of a device, if a file has them."""
    memories: dict[str, Any] = {}
    if host := found.host:
        positive("a measured host's", {"latency": host.latency}, zero=True)
        positive("a measured host's", {"bandwidth of the bus": host.bandwidth})
        memories = {
            "host": Link(name="measured, host", latency=host.latency, bandwidth=host.bandwidth, source=found.source),
            "host_memory": int(host.memory),
            "host_bandwidth": host.memory_bandwidth,
            "host_source": found.source,
        }
    if disk := found.disk:
        memories["disk"] = Disk(**asdict(disk) | {"memory": int(disk.memory)}, source=found.source)
    return memories


def _measured(device: Device) -> dict[str, object]:
    """What kernels reach, and the memories behind the device's own, as far as they are known."""
    found: dict[str, object] = {}
    if device.updates:
        found["updates"] = {name: {str(size): took for size, took in known.items()} for name, known in device.updates.items()}
    if product := device.product:
        found["product"] = {name: number for name, number in asdict(product).items() if name != "source"}
    if attention := device.attention:
        found["attention"] = {
            "forward": {str(dim): rate for dim, rate in attention.forward.items()},
            "backward": {str(dim): rate for dim, rate in attention.backward.items()},
            "start": list(attention.start),
        }
    if device.achieved:
        found["achieved"] = {kind: list(shares) for kind, shares in device.achieved.items()}
    if device.addresses != math.inf:
        found["addresses"] = device.addresses
    if device.interference != 1:
        found["interference"] = device.interference
    if host := device.host:
        found["host"] = {
            "latency": host.latency, "bandwidth": host.bandwidth, "memory": device.host_memory,
            "memory_bandwidth": device.host_bandwidth,
        }  # fmt: skip
    if disk := device.disk:
        found["disk"] = {"read": disk.read, "write": disk.write, "latency": disk.latency, "memory": disk.memory}
    return found


def measured_link(size: int, lines: Mapping[str, tuple[Seconds, Seconds]], source: str) -> Link:
    """The link of groups of this size. Raises MeshError for invalid numbers."""
    if size < 2 or "all_gather" not in lines:
        raise MeshError(f"a link of groups of {size} has no all_gather", fix="a link is of two processes or more")
    for kind, (empty, per_byte) in lines.items():
        positive(f"a measured {kind}'s", {"time of no bytes": empty}, zero=True)
        positive(f"a measured {kind}'s", {"time per byte": per_byte})
    return Link.of_lines(f"measured, groups of {size}", size, lines, source)
