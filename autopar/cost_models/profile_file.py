"""Measured profiles: a device and its links as a JSON file that a person can read.

{"name": "cpu, 4 processes", "source": "...",
 "device": {"flops": {"float32": 5.1e10}, "memory": 6e9, "bandwidth": 8e9, "launch": 2e-6},
 "rates": {"aten.linear.default": [4.8e10, 4.1e10], ...},                    operations or bytes per second: forward, backward
 "links": {"2": {"all_reduce": [0.0003, 1.2e-9], ...}, ...}}       by the size of a group: seconds if empty, and per byte

Of a GPU there are also coefficients of kernels' laws (`kernels`), in the place of rates:

 "product": {"processors": 132, "fraction": 0.66, "wave": 5e-06},
 "attention": {"forward": {"128": 3.6e14}, "backward": {"128": 3.2e14}, "start": [200, 510]},
 "achieved": {"stream": [0.85, 0.85], "norm": [0.52, 0.23]}, "interference": 0.45
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from autopar import files
from autopar.errors import MeshError
from autopar.ir.kernel_rates import AttentionRate, ProductRate, positive
from autopar.ir.mesh import Device, Link, Seconds


def save(device: Device, path: str | Path) -> None:
    """Write a measured device with its links."""
    data = {
        "name": device.name,
        "source": device.source,
        "device": {
            "flops": dict(device.flops), "memory": device.memory, "bandwidth": device.bandwidth, "launch": device.launch,
        },
        **_kernels(device),
        "rates": {name: list(rates) for name, rates in device.rates.items()},
        "links": {
            str(size): {kind: list(line) for kind, line in link.lines.items()} for size, link in device.links.items()
        },
    }  # fmt: skip
    files.write(path, json.dumps(data, indent=1) + "\n")


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
            interference=float(data.get("interference", 1.0)), achieved=_pairs(data.get("achieved", {})),
            product=_product(data["product"], source) if "product" in data else None,
            attention=_attention(data["attention"], source) if "attention" in data else None,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MeshError(
            f"{path} is not a machine profile",
            error=f"{type(error).__name__}: {error}",
            fix="python -m autopar.profile --processes N --save profile.json writes one",
        ) from error


def _kernels(device: Device) -> dict[str, object]:
    """What kernels reach, as far as it is known."""
    found: dict[str, object] = {}
    if product := device.product:
        found["product"] = {"processors": product.processors, "fraction": product.fraction, "wave": product.wave}
    if attention := device.attention:
        found["attention"] = {
            "forward": {str(dim): rate for dim, rate in attention.forward.items()},
            "backward": {str(dim): rate for dim, rate in attention.backward.items()},
            "start": list(attention.start),
        }
    if device.achieved:
        found["achieved"] = {kind: list(shares) for kind, shares in device.achieved.items()}
    return found | ({"interference": device.interference} if device.interference != 1 else {})


def _product(data: Mapping[str, float], source: str) -> ProductRate:
    return ProductRate(
        processors=int(data["processors"]), fraction=float(data["fraction"]), wave=float(data["wave"]), source=source
    )


def _attention(data: Mapping[str, Mapping[str, float]], source: str) -> AttentionRate:
    forward, backward = ({int(dim): float(rate) for dim, rate in data[way].items()} for way in ("forward", "backward"))
    plain, causal = map(float, data["start"])
    return AttentionRate(forward=forward, backward=backward, start=(plain, causal), source=source)


def _pairs(data: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    return {str(kind): (float(there), float(back)) for kind, (there, back) in data.items()}


def measured_link(size: int, lines: Mapping[str, tuple[Seconds, Seconds]], source: str) -> Link:
    """The link of groups of this size."""
    for kind, (empty, per_byte) in lines.items():
        positive(f"a measured {kind}'s", {"time of no bytes": empty}, zero=True)
        positive(f"a measured {kind}'s", {"time per byte": per_byte})
    return Link.of_lines(f"measured, groups of {size}", size, lines, source)
