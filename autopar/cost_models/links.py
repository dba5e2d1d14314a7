"""Links between the devices along each mesh axis.

Bandwidth is what one device sends in one direction, in bytes per second, by the data sheet. The latency of one message is that
of NCCL's own tuning table (`hwLat` in its src/graph/tuning.cc) for the protocol that reaches the full bandwidth (Simple, ring):
3.4 microseconds over NVLink, 5.7 over PCIe, 14 over a network.

NCCL's collectives reach less: `BUSES`, from published measurements. `connect` turns these into a line per kind of collective
for every axis, by the placement of its groups (`autopar.cost_models.collectives.nccl`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from autopar.cost_models.collectives import RankGroup, nccl
from autopar.errors import MeshError
from autopar.ir.device import Bus, Device, Link, Seconds
from autopar.ir.layout import numbered_axes
from autopar.ir.mesh import Mesh

NVLINK: Seconds = 3.4e-6
PCIE: Seconds = 5.7e-6
NETWORK: Seconds = 14e-6

# name: (latency in seconds, bandwidth in 10^9 bytes per second, source of the bandwidth)
TABLE: dict[str, tuple[Seconds, float, str]] = {
    "nvlink2": (NVLINK, 150, "NVLink 2, 6 links of 25 GB/s, V100 data sheet, 2018"),
    "nvlink3": (NVLINK, 300, "NVLink 3, 12 links of 25 GB/s, A100 data sheet, 2020"),
    "nvlink4": (NVLINK, 450, "NVLink 4, 18 links of 25 GB/s, H100 data sheet, 2023"),
    "nvlink5": (NVLINK, 900, "NVLink 5, 18 links of 50 GB/s, DGX B200 data sheet, 2024; latency as for NVLink 4"),
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

# One step of a ring: NCCL 2.19, src/graph/tuning.cc, hwLat of rings, protocol LL128. Without peer access a piece goes through
# the host's memory, which takes longer: an empty all-reduce among 2, 4 and 8 L4 takes 57, 58 and 115 microseconds (lines
# through the 412 sizes of each of Mist's prim_gpt_*_all_reduce_*gpus.csv, see below).
NVLINK_HOP: Seconds = 1.9e-6
HOST_HOP: Seconds = 7e-6
NETWORK_HOP: Seconds = 4e-6


def _bus(hop: Seconds, source: str, *, switch: bool = False, **rates: Mapping[int, float]) -> Bus:
    """The rates of collectives, by kind and devices of a group in a node, in 10^9 bytes per second."""
    scaled = {kind: {size: rate * 1e9 for size, rate in by_size.items()} for kind, by_size in rates.items()}
    return Bus(hop=hop, source=source, switch=switch, **scaled)


# Where a PCIe bus was not measured, L4's share of the data sheet's rate is taken.
NO_PEERS = (
    "L4 without peer access: gather and scatter as fitted by Mist (EuroSys 2025, gpu_gpu_comm_params of its tuned_configs), "
    "all_reduce as in its benchmark/superscaler/results-ref/profiled-time-mist-all-l4"
)


def _without_peers(share: float, source: str) -> Bus:
    """A PCIe bus that reaches a share of L4's."""
    ring, summed = ({2: 3.2, 4: 4.5, 8: 5.0}, {2: 4.1, 4: 4.7, 8: 5.1})
    ring, summed = ({size: share * rate for size, rate in rates.items()} for rates in (ring, summed))
    return _bus(HOST_HOP, source, ring=ring, all_reduce=summed)


BUSES: dict[str, Bus] = {
    "nvlink2": _bus(
        NVLINK_HOP,
        "DGX-1 cube mesh: all_reduce and all_to_all of microsoft/SuperScaler, branch Aceso, prim_gpt_13B_*.csv",
        ring={2: 41, 4: 76, 8: 130}, all_to_all={2: 33, 4: 48, 8: 44},
    ),
    "nvlink3": _bus(
        NVLINK_HOP, "nccl-tests on 8 A100, stas00/ml-engineering network/README.md; NCCL's own limit", ring={8: 235}
    ),
    "nvlink4": _bus(
        NVLINK_HOP,
        "nccl-tests on 8 H100: NVIDIA/nccl issue 1047 (ring), NVIDIA/nccl-tests issue 212 (all_reduce with NVLink SHARP)",
        ring={8: 360}, all_reduce={2: 360, 3: 480}, switch=True,
    ),
    "nvlink5": _bus(
        NVLINK_HOP,
        "NVIDIA/nccl issue 1807: NCCL's own limit, 18 links of 40.1 (ring), and all_reduce on 8 B200; two devices: the ring's",
        ring={8: 721.8}, all_reduce={2: 721.8, 3: 830}, switch=True,
    ),
    "pcie3": _without_peers(1 / 2, f"half of PCIe 4: {NO_PEERS}"),
    "pcie4": _without_peers(1, NO_PEERS),
    "pcie5": _without_peers(2, f"twice PCIe 4: {NO_PEERS}"),
    **{
        name: _bus(NETWORK_HOP, "hop: NCCL 2.19, src/graph/tuning.cc")
        for name in TABLE
        if name.startswith(("ib-", "ethernet-"))
    },
}  # fmt: skip

LINKS: dict[str, Link] = {
    name: Link(name=name, latency=latency, bandwidth=bandwidth * 1e9, source=source, bus=BUSES.get(name))
    for name, (latency, bandwidth, source) in TABLE.items()
}


def connect(mesh: Mesh, device: Device) -> Mesh:
    """The mesh laid over nodes of `device.per_node` devices, the last axis innermost, with a link for every axis.

        (2, 4) on nodes of 4: axis 1 lies inside a node, axis 0 between nodes: each rank of its groups has a network card
        (2, 8) on nodes of 4: the groups of axis 1 stand on two nodes each, and enter them through four cards

    Ranks are numbered row-major and fill the nodes in order. Links of the catalog get lines for the groups of each axis, by the
    nodes that these span (`collectives.nccl`); links that NCCL does not drive are used unchanged, the slower one for an axis
    that is partly inside a node. Links that the mesh already has are kept, and so are measured ones. Adjacent axes also get a
    link as one flattened axis if groups of that size are known: one ring enters each node once for all of them. Raises
    MeshError if the device names a link that is not in the catalog.
    """
    if mesh.links:
        return dataclasses.replace(mesh, device=device)
    if device.links:
        links = tuple(_measured(size, device) for size in mesh.sizes)
        known = [(axes, math.prod(mesh.sizes[axis] for axis in axes)) for axes in _flattened(mesh)]
        flattened = tuple((axes, device.links[size]) for axes, size in known if size in device.links)
        return dataclasses.replace(mesh, links=links, device=device, flattened=flattened)
    inner, outer = _link(device.inner, device), _link(device.outer, device)
    single = [(axis,) for axis in range(len(mesh.sizes))]
    links = tuple(_of_groups(group, inner, outer) for group in groups(mesh, device.per_node, single))
    several = _flattened(mesh)
    found = (_of_groups(group, inner, outer) for group in groups(mesh, device.per_node, several))
    return dataclasses.replace(mesh, links=links, device=device, flattened=tuple(zip(several, found, strict=True)))


def _flattened(mesh: Mesh) -> list[tuple[int, ...]]:
    """The adjacent axes over which messages may go at once, of more than one device each; their names are no others'."""
    runs = [axes for axes in numbered_axes(len(mesh.sizes))[len(mesh.sizes) :] if all(mesh.sizes[axis] > 1 for axis in axes)]
    names = Counter([*mesh.axes, *map(mesh.name_of, runs)])
    return [axes for axes in runs if names[mesh.name_of(axes)] == 1] if mesh.ascending else []


def groups(mesh: Mesh, per_node: int, axes: Sequence[tuple[int, ...]]) -> Iterator[RankGroup]:
    """The placement of the groups over some axes, single ones or several adjacent ones.

    >>> [(group.nodes, group.local) for group in groups(Mesh.of((4, 2, 4)), 8, [(0,), (1,), (2,), (0, 1)])]
    [(4, 1), (1, 2), (1, 4), (4, 2)]
    """
    for places in axes:
        size = math.prod(mesh.sizes[axis] for axis in places)
        stride = math.prod(mesh.sizes[places[-1] + 1 :])
        span = stride * size
        if mesh.size <= per_node or per_node % span == 0:
            yield RankGroup(ranks=size, nodes=1, local=size)
        elif per_node % stride == 0 and span % per_node == 0:
            yield RankGroup(ranks=size, nodes=span // per_node, local=per_node // stride)
        elif size == mesh.size:  # all ranks: the last node has what is left
            nodes = -(-size // per_node)
            yield RankGroup(ranks=size, nodes=nodes, local=size - (nodes - 1) * per_node)
        else:  # unevenly: some node has one rank only
            yield RankGroup(ranks=size, nodes=min(size, -(-(span - stride) // per_node) + 1), local=1)


def _of_groups(group: RankGroup, inner: Link, outer: Link) -> Link:
    """The link of an axis with this placement of its groups."""
    within = group.nodes == 1
    if inner.bus is None or outer.bus is None:
        if group.nodes < group.ranks and not within:
            return max(inner, outer, key=lambda link: (1 / link.bandwidth, link.latency))
        return inner if within else outer
    if group.ranks == 1:
        return inner if within else outer
    used = {inner.name: inner.bus.source} if group.local > 1 else {}
    used |= {} if within else {outer.name: f"{outer.source}, less 5% with every doubling of nodes"}
    return Link.of_lines("+".join(used), group.ranks, nccl(group, inner, outer), "; ".join(used.values()))


def _measured(size: int, device: Device) -> Link:
    """The measured link of groups of so many devices."""
    if size > 1 and size not in device.links:
        raise MeshError(
            f"the profile {device.name} knows no groups of {size} devices",
            measured=", ".join(map(str, device.links)),
            fix="measure again with a number of processes that the group's size divides",
        )
    return device.links.get(size) or next(iter(device.links.values()))


def merged(mesh: Mesh, device: Device) -> Mesh:
    """The mesh with adjacent axes of one kind as one axis: those inside a node, those between nodes, those of equal links.

        (2, 2, 2, 2, 2, 2) on nodes of 8    ->    (8, 8)
        (2, 2, 2, 2) on nodes of 8          ->    (2, 8)

    A dim that may be split over several such axes may be split over the merged one instead, in one message instead of one for
    each. Axes that are partly inside a node stay separate, and so do those for whose joint groups a profile has no link.
    """
    single = [(axis,) for axis in range(len(mesh.sizes))]
    kinds = mesh.links or [_kind(group, place) for place, group in enumerate(groups(mesh, device.per_node, single))]
    runs: list[int] = []
    for _, same in itertools.groupby(enumerate(kinds), key=lambda pair: pair[1]):
        places = [place for place, _ in same]
        size = math.prod(mesh.sizes[places[0] : places[-1] + 1])
        measured = not device.links or bool(mesh.links) or size in device.links
        runs += [len(places)] if measured else [1] * len(places)
    if len(runs) == len(mesh.sizes):
        return mesh
    links = [mesh.links[end - 1] for end in itertools.accumulate(runs)] if mesh.links else ()
    return dataclasses.replace(mesh.merged(runs), links=tuple(links))


def _kind(group: RankGroup, place: int) -> str | int:
    """The kind of an axis: neighbours of the same kind may be merged."""
    if group.nodes == 1:
        return "inside a node"
    return "between nodes" if group.nodes == group.ranks else place


def host_seconds(bytes_moved: float, device: Device) -> Seconds:
    """Seconds to move bytes to the host's memory and back: two copies, each at least a kernel's launch; inf without a host.

    They are priced without overlap.
    """
    return 2 * (device.launch + bytes_moved / device.host.bandwidth) if device.host else math.inf


def _link(name: str, device: Device) -> Link:
    if name not in LINKS:
        raise MeshError(f"device {device.name} names the link {name!r}, which is not in the catalog", links=", ".join(LINKS))
    return LINKS[name]
