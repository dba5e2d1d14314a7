"""Measured profiles: a device and its links as a JSON file that a person can read.

{"name": "cpu, 4 processes", "source": "...",
 "device": {"flops": {"float32": 5.1e10}, "memory": 6e9, "bandwidth": 8e9, "launch": 2e-6},
 "rates": {"aten.linear.default": [4.8e10, 4.1e10], ...},                    operations or bytes per second: forward, backward
 "links": {"2": {"all_reduce": [0.0003, 1.2e-9], ...}, ...}}       by the size of a group: seconds if empty, and per byte
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from autopar.errors import MeshError
from autopar.ir.mesh import Device, Link, Seconds


def save(device: Device, path: str | Path) -> None:
    """Write a measured device with its links."""
    data = {
        "name": device.name,
        "source": device.source,
        "device": {
            "flops": dict(device.flops), "memory": device.memory, "bandwidth": device.bandwidth, "launch": device.launch,
        },
        "rates": {name: list(rates) for name, rates in device.rates.items()},
        "links": {
            str(size): {kind: list(line) for kind, line in link.lines.items()} for size, link in device.links.items()
        },
    }  # fmt: skip
    Path(path).write_text(json.dumps(data, indent=1) + "\n")


def load(path: str | Path) -> Device:
    """Read a measured device. Raises MeshError if the file is not one."""
    try:
        data = json.loads(Path(path).read_text())
        source, held = str(data["source"]), data["device"]
        links = {
            int(size): measured_link(int(size), {str(k): (float(a), float(b)) for k, (a, b) in lines.items()}, source)
            for size, lines in data["links"].items()
        }
        return Device(
            name=str(data["name"]), flops={str(k): float(v) for k, v in held["flops"].items()}, memory=int(held["memory"]),
            bandwidth=float(held["bandwidth"]), launch=float(held["launch"]), inner="gloo", outer="gloo",
            per_node=max([1, *links]), source=source, links=links,
            rates={str(name): (float(there), float(back)) for name, (there, back) in data["rates"].items()},
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MeshError(
            f"{path} is not a machine profile",
            error=f"{type(error).__name__}: {error}",
            fix="python -m autopar.profile --processes N --save profile.json writes one",
        ) from error


def measured_link(size: int, lines: Mapping[str, tuple[Seconds, Seconds]], source: str) -> Link:
    """The link of groups of this size; its latency and bandwidth, for people, are those of the all-gather."""
    empty, per_byte = lines["all_gather"]
    return Link(
        name=f"measured, groups of {size}", latency=empty, bandwidth=(size - 1) / size / per_byte, source=source, lines=lines
    )
