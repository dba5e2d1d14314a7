"""Links: what connects the devices along each mesh axis.

Bandwidth is what one device sends in one direction, in bytes per second. The latency of one message is that of NCCL's own
tuning table (`hwLat` in its src/graph/tuning.cc) for the protocol that reaches the full bandwidth (Simple, ring): 3.4
microseconds over NVLink, 5.7 over PCIe, 14 over a network.
"""

from __future__ import annotations

import dataclasses
import math

from autopar.errors import MeshError
from autopar.ir.mesh import Device, Link, Mesh, Seconds

NVLINK: Seconds = 3.4e-6
PCIE: Seconds = 5.7e-6
NETWORK: Seconds = 14e-6

# name: (latency in seconds, bandwidth in 10^9 bytes per second, source of the bandwidth)
TABLE: dict[str, tuple[Seconds, float, str]] = {
    "nvlink2": (NVLINK, 150, "NVLink 2, 6 links of 25 GB/s, V100 data sheet, 2018"),
    "nvlink3": (NVLINK, 300, "NVLink 3, 12 links of 25 GB/s, A100 data sheet, 2020"),
    "nvlink4": (NVLINK, 450, "NVLink 4, 18 links of 25 GB/s, H100 data sheet, 2023"),
    "pcie3": (PCIE, 15.75, "PCI Express 3.0, 16 lanes of 8 GT/s, 128b/130b"),
    "pcie4": (PCIE, 31.5, "PCI Express 4.0, 16 lanes of 16 GT/s, 128b/130b"),
    "pcie5": (PCIE, 63, "PCI Express 5.0, 16 lanes of 32 GT/s, 128b/130b"),
    "ib-edr": (NETWORK, 6.25, "InfiniBand EDR, 100 Gb/s for two GPUs, DGX-1 with V100 data sheet, 2018"),
    "ib-hdr": (NETWORK, 25, "InfiniBand HDR, 200 Gb/s per GPU, DGX A100 data sheet, 2020"),
    "ib-ndr": (NETWORK, 50, "InfiniBand NDR, 400 Gb/s per GPU, DGX H100 data sheet, 2023"),
    "ethernet-100g": (NETWORK, 12.5, "100 Gb/s per GPU, IEEE 802.3bj, latency as for InfiniBand"),
    "ethernet-25g": (NETWORK, 3.125, "25 Gb/s per GPU, IEEE 802.3by, latency as for InfiniBand"),
    "gloo": (100e-6, 2, "gloo over loopback, measured: all-gather of 8 bytes, all-reduce of 16 MiB, two processes"),
}

LINKS: dict[str, Link] = {
    name: Link(name=name, latency=latency, bandwidth=bandwidth * 1e9, source=source)
    for name, (latency, bandwidth, source) in TABLE.items()
}


def connect(mesh: Mesh, device: Device) -> Mesh:
    """The mesh laid over nodes of `device.per_node` devices, the last axis innermost, with a link for every axis.

        (2, 4) on nodes of 4: axis 1 lies inside a node, axis 0 between nodes
        (2, 8) on nodes of 4: axis 1 is partly inside and gets the slower of the two links

    Ranks are numbered row-major and fill the nodes in order. An axis lies inside a node if its groups do: if the product of its
    size and those of the axes inside it divides the node, or the whole mesh fits into one. An axis that leaves the node
    gets the outer link, whose bandwidth is counted per device: groups that use it at the same time do not share it.
    Links that the mesh already has are kept. Raises MeshError if the device names a link that is not in the catalog.
    """
    if mesh.links:
        return dataclasses.replace(mesh, device=device)
    if device.links:
        return dataclasses.replace(mesh, links=tuple(_measured(size, device) for size in mesh.sizes), device=device)
    inner, outer = _link(device.inner, device), _link(device.outer, device)
    slower = max(inner, outer, key=lambda link: (1 / link.bandwidth, link.latency))
    links, span = [], 1
    for size in reversed(mesh.sizes):
        starts_inside = _inside(span, mesh, device) and span < device.per_node
        span *= size
        if _inside(span, mesh, device):
            links.append(inner)
        else:
            links.append(slower if starts_inside else outer)
    return dataclasses.replace(mesh, links=tuple(reversed(links)), device=device)


def _measured(size: int, device: Device) -> Link:
    """The measured link of groups of so many devices."""
    if size > 1 and size not in device.links:
        raise MeshError(
            f"the profile {device.name} knows no groups of {size} devices",
            measured=", ".join(map(str, device.links)),
            fix="measure again with a number of processes that the group's size divides",
        )
    return device.links.get(size) or next(iter(device.links.values()))


def _inside(span: int, mesh: Mesh, device: Device) -> bool:
    """Whether every group of `span` consecutive devices stands in one node."""
    return device.per_node % span == 0 or mesh.size <= device.per_node


def host_seconds(bytes_moved: float, device: Device) -> Seconds:
    """Seconds of moving bytes to the host's memory and back: two copies, each at least a kernel's launch; inf if none can.

    They are priced as if nothing ran beside them.
    """
    return 2 * (device.launch + bytes_moved / device.host.bandwidth) if device.host else math.inf


def _link(name: str, device: Device) -> Link:
    if name not in LINKS:
        raise MeshError(f"device {device.name} names the link {name!r}, which is not in the catalog", links=", ".join(LINKS))
    return LINKS[name]
