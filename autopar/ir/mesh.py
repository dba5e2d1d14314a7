"""The mesh: named axes of devices, the device itself, and what connects the devices along each axis."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from autopar.errors import MeshError, printable
from autopar.ir.kernel_rates import AttentionRate, ProductRate, positive
from autopar.ir.layout import numbered_axes

Seconds = float
Bytes = int
# The axis of a device's memories, of size 1: what is stored is in state H on it, on the host, in D, on the disk, or I, on the
# device.
MEMORY = "memory"
MOST_DEVICES = 2**31 - 1
STAGES = "_stages"  # what the axis of a pipeline is called that was cut off another one, after that


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus:
    """What NCCL's collectives reach over a link: the coefficients of `autopar.cost_models.collectives.nccl`.

    A rate is a *bus bandwidth* as nccl-tests prints it: bytes per second that each device sends, by the devices of a group in
    one node. Sizes that are not listed have the rate of the next smaller one. A network has none: it is driven by its cards.
    """

    hop: Seconds  # from one device of a ring to the next
    ring: Mapping[int, float] = field(default_factory=dict)
    all_reduce: Mapping[int, float] = field(default_factory=dict)  # empty: as in a ring
    switch: bool = False  # whether a switch adds up what is reduced (NVLink SHARP)
    all_to_all: Mapping[int, float] = field(default_factory=dict)  # empty: as in a ring
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What connects the devices of one mesh axis."""

    name: str
    latency: Seconds  # per message
    bandwidth: float  # bytes per second that one device sends, one direction
    source: str  # "NVLink 4, H100 SXM data sheet, 2023"
    # Where it is known for its groups: kind of collective -> seconds of an empty message, and per byte of the larger buffer.
    # They count, not the above. A line, so that the price of a message is that of its parts and one latency.
    lines: Mapping[str, tuple[Seconds, Seconds]] = field(default_factory=dict)
    bus: Bus | None = None  # what NCCL reaches over it, from which `autopar.cost_models.links.connect` makes such lines

    def send(self, size: float) -> Seconds:
        """Seconds in which a rank's message of so many bytes is with another."""
        return self.latency + size / self.bandwidth

    def faster(self, times: float) -> Link:
        """A link by which messages take so many times less."""
        return replace(self, latency=self.latency / times, bandwidth=self.bandwidth * times)

    @staticmethod
    def of_lines(name: str, ranks: int, lines: Mapping[str, tuple[Seconds, Seconds]], source: str) -> Link:
        """A link with a line per kind of collective; its latency and bandwidth, for people, are those of the all-gather."""
        empty, per_byte = lines["all_gather"]
        return Link(name=name, latency=empty, bandwidth=(ranks - 1) / ranks / per_byte, source=source, lines=lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The disk of one node, which its devices share."""

    memory: Bytes  # what may be stored there; 0 where it is not known
    read: float  # bytes per second, one file after the other
    write: float
    latency: Seconds  # of one access
    source: str

    def __post_init__(self) -> None:
        positive("a disk's", {"memory": self.memory, "latency": self.latency}, zero=True)
        positive("a disk's", {"rate of reading": self.read, "rate of writing": self.write})

    def seconds(self, read: float, written: float) -> Seconds:
        """Seconds of reading and writing so many bytes, one after the other."""
        return self.latency + read / self.read + written / self.write


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or one process's share of a CPU): peak rates, memory and launch floor, with their source."""

    name: str
    flops: Mapping[str, float]  # dtype name ("float32", "bfloat16", ...) -> multiply and add operations per second
    memory: Bytes
    bandwidth: float  # bytes per second between memory and cores
    launch: Seconds  # least time of one kernel
    inner: str  # link between devices of one node, a name of the link catalog
    outer: str  # link between nodes, per device
    per_node: int  # devices in one node
    source: str
    host: Link | None = None  # to the host's memory; none where the device has that memory itself
    # The memory of one node's host, which its devices share, and the bytes per second between it and the host's cores, with
    # their source; 0 where they are not known.
    host_memory: Bytes = 0
    host_bandwidth: float = 0.0
    host_source: str = ""
    disk: Disk | None = None  # none where it is not known
    # Seconds that computing loses per second of a message sent beside it (beta): 0 = it does not notice, 1 = nothing is gained
    # by overlap, so that a step is the sum of what it computes and sends.
    interference: float = 1.0
    # What kernels reach of these peaks, by the laws of `cost_models.kernels`; without them, a roofline at the peaks themselves.
    product: ProductRate | None = None  # matrix products
    attention: AttentionRate | None = None  # fused attention
    compiled: bool = False  # whether torch.compile makes the kernels of what it can fuse
    # Shares of the memory bandwidth that kernels reach, forward and backward: "stream", and by the kind of operator "norm",
    # "softmax", "dropout", as a stream where there is none; 1 where none is given.
    achieved: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # Elements per second of pointwise kernels that compute an address for each, where operands are broadcast or strides differ.
    addresses: float = math.inf
    power: float = 1.0  # share of the products' rate that is left under a power limit below the board's own
    # Where it was measured: operator -> what its forward and its backward do in a second, operations of matrix products and
    # attention, bytes of others; "optimizer.NAME" -> bytes moved per second by its step; and links by the size of a group.
    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    links: Mapping[int, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whose = f"device {self.name}'s"
        positive(whose, {"memory": self.memory, "bandwidth": self.bandwidth, "devices per node": self.per_node})
        positive(whose, {f"{dtype} rate": rate for dtype, rate in self.flops.items()})
        positive(whose, {"power": self.power})
        if self.addresses != math.inf:
            positive(whose, {"rate of addresses": self.addresses})
        positive(whose, {"host's memory": self.host_memory, "host's bandwidth": self.host_bandwidth}, zero=True)
        positive(whose, {"launch": self.launch, "interference": self.interference}, zero=True)
        for kind, shares in self.achieved.items():
            positive(whose, dict(zip((f"share of bandwidth of {kind}", f"that of {kind} backward"), shares, strict=True)))
        for name, (there, back) in self.rates.items():
            positive(whose, {f"rate of {name}": there})
            positive(whose, {f"backward rate of {name}": back}, zero=True)

    def share(self, kind: str) -> tuple[float, float]:
        """The shares of the memory bandwidth that operators of a kind reach, forward and backward."""
        return self.achieved.get(kind) or self.achieved.get("stream", (1.0, 1.0))

    @property
    def streaming(self) -> float:
        """Bytes per second of a kernel that reads and writes plainly."""
        return self.bandwidth * self.share("stream")[0]

    def at_peak(self) -> Device:
        """This device as its data sheet has it: a roofline without efficiencies, and a step that is the sum of its parts."""
        return replace(self, product=None, attention=None, achieved={}, addresses=math.inf, power=1.0, interference=1.0)

    @property
    def aligns(self) -> bool:
        """Whether products of matrices are slower whose rows are not aligned: a compiler pads them."""
        return self.product is not None and self.product.unaligned < self.product.fraction and not self.compiled

    @property
    def cpu(self) -> bool:
        """Whether it is a CPU: some operators take another path there."""
        return cpu_named(self.name)


def cpu_named(device: str) -> bool:
    """Whether a device of this name is a CPU."""
    return re.match(r"cpu\b", device) is not None


def check_devices(number: int) -> None:
    """Raise MeshError for more devices than there are."""
    if number > MOST_DEVICES:
        said = number if number < 10**15 else "too many to print"
        raise MeshError(f"a mesh has at most {MOST_DEVICES} devices, not {said}", fix="the devices that there are")


@dataclass(frozen=True, slots=True)
class AutoMesh:
    """So many devices as the axes on which a step is fastest, which are searched (`autopar.planning.mesh_shapes`)."""

    devices: int

    def __post_init__(self) -> None:
        check_devices(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes, outermost first; the last axis is the innermost: its devices stand next to each other.

    `links[i]` connects the devices along axis i; empty until a device is known (`autopar.cost_models.links.connect`). So does
    each link in `flattened` those of several adjacent axes, as one group, over which messages may go, too.

    >>> Mesh.of((2, 4))
    Mesh(axis0=2, axis1=4)
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[Link, ...] = ()
    device: Device | None = None
    flattened: tuple[tuple[tuple[int, ...], Link], ...] = ()
    # Whether ranks ascend in the mesh's order: only then are they in it in a process group over flattened axes.
    ascending: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        if not self.sizes or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in self.sizes):
            fix = "the number of devices along every axis, as in mesh=(2, 4)"
            raise MeshError(f"a mesh needs axes of at least one device each, not {self.sizes}", fix=fix)
        check_devices(self.size)
        if len(set(self.axes)) != len(self.sizes):
            raise MeshError(f"a mesh needs one name per axis, not {self.axes} for sizes {self.sizes}")
        if not all(self.axes):
            raise MeshError(f"an axis of the mesh {self.axes} has no name", fix='names such as "dp" and "tp"')
        if self.links and len(self.links) != len(self.sizes):
            raise MeshError(f"a mesh needs one link per axis, not {len(self.links)} for axes {self.axes}")

    @staticmethod
    def of(mesh: object) -> Mesh:
        """A mesh from a `Mesh`, a size, a tuple of sizes, a dict name -> size, or a torch `DeviceMesh`."""
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, Integral):
            mesh = (mesh,)
        if isinstance(mesh, Mapping):
            return Mesh(axes=tuple(map(str, mesh)), sizes=tuple(map(_plain, mesh.values())))
        if isinstance(mesh, (tuple, list)):
            return Mesh(axes=tuple(f"axis{i}" for i in range(len(mesh))), sizes=tuple(map(_plain, mesh)))
        names, ranks = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "mesh", None)
        if ranks is None:
            raise MeshError(
                f"cannot make a mesh of {mesh!r}",
                fix="give a tuple of sizes, a dict name -> size, an autopar.Mesh or a DeviceMesh",
            )
        sizes = tuple(ranks.shape)
        flat = ranks.flatten().tolist()
        axes = tuple(names or (f"axis{i}" for i in range(len(sizes))))
        return Mesh(axes=axes, sizes=sizes, ascending=flat == sorted(flat))

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes)

    @property
    def has_memories(self) -> bool:
        """Whether its last axis is that of memories: what is stored may lie on the host or the disk."""
        return self.axes[-1] == MEMORY and self.sizes[-1] == 1

    @property
    def places(self) -> tuple[str, ...]:
        """The states, on the axis of memories, of what need not lie in a device's own memory; none without such an axis."""
        if not self.has_memories:
            return ()
        known = {"H": self.device is None or self.device.host_memory, "D": self.device is None or self.device.disk}
        return tuple(place for place, there in known.items() if there)

    @property
    def devices(self) -> Mesh:
        """The mesh without its axis of memories.

        >>> Mesh.of({"dp": 4, "memory": 1}).devices
        Mesh(dp=4)
        """
        if not self.has_memories or len(self.axes) == 1:
            return self
        flattened = tuple((axes, link) for axes, link in self.flattened if axes[-1] < len(self.axes) - 1)
        return replace(self, axes=self.axes[:-1], sizes=self.sizes[:-1], links=self.links[:-1], flattened=flattened)

    @property
    def bare(self) -> Mesh:
        """The mesh without its device and links."""
        return replace(self, links=(), device=None, flattened=())

    def without(self, axis: str) -> Mesh:
        """The mesh of the devices that have one place on an axis; of one device where there is no other axis."""
        if len(self.axes) == 1:
            return replace(self, sizes=(1,), flattened=())
        at = self.axes.index(axis)
        axes, sizes, links = ((*kept[:at], *kept[at + 1 :]) for kept in (self.axes, self.sizes, self.links))
        flattened = tuple(
            (tuple(place - (place > at) for place in places), link) for places, link in self.flattened if at not in places
        )
        return replace(self, axes=axes, sizes=sizes, links=links, flattened=flattened)

    def axes_over(self, axis: int) -> tuple[int, ...]:
        """The places of what has this number: of an axis, or of those that a flattened one is made of."""
        return numbered_axes(len(self.sizes))[axis]

    def ranks_over(self, axis: int) -> int:
        """How many devices a group over an axis has, of the mesh or flattened (`autopar.ir.layout.numbered_axes`)."""
        return math.prod(self.sizes[place] for place in self.axes_over(axis))

    def link_over(self, axis: int) -> Link:
        """What connects the devices over an axis, of the mesh or flattened. Raises MeshError if that is not known."""
        if axis < len(self.links):
            return self.links[axis]
        axes = self.axes_over(axis)
        found = next((link for places, link in self.flattened if places == axes), None)
        if found is None:
            what = f"nothing is known of messages over {self.name_of(axes)} at once"
            raise MeshError(what, mesh=self, fix="a plan made for this mesh")
        return found

    def name_of(self, axes: Sequence[int]) -> str:
        """The name of an axis of the mesh, or of a flattened one, as torch names it.

        >>> Mesh.of({"node": 2, "gpu": 4}).name_of((0, 1))
        'node_gpu'
        """
        return "_".join(self.axes[axis] for axis in axes)

    def axes_named(self, name: str) -> tuple[int, ...]:
        """The places of the axis of this name, or of those that a flattened one is made of; empty if there is none.

        >>> Mesh.of({"node": 2, "gpu": 4}).axes_named("node_gpu")
        (0, 1)
        """
        if name in self.axes:
            return (self.axes.index(name),)
        for start in range(len(self.axes)):
            for stop in range(start + 2, len(self.axes) + 1):
                found = self.name_of(range(start, stop))
                if found == name:
                    return tuple(range(start, stop))
                if not name.startswith(found):
                    break
        return ()

    def with_memories(self, link: Link | None) -> Mesh:
        """The mesh with an axis of memories, which are joined by the link, as its last."""
        links = (*self.links, link) if self.links and link is not None else ()
        return replace(self, axes=(*self.axes, MEMORY), sizes=(*self.sizes, 1), links=links)

    def merged(self, runs: Sequence[int]) -> Mesh:
        """The mesh with runs of adjacent axes as one axis each, named as torch names flattened dims; without links.

        Args:
            runs: how many axes become one, from the outermost on; they add up to the number of axes.

        >>> Mesh.of((2, 2, 8)).merged((2, 1))
        Mesh(axis0_axis1=4, axis2=8)
        """
        ends = list(itertools.accumulate(runs, initial=0))
        parts = [slice(*ends) for ends in itertools.pairwise(ends)]
        return Mesh(
            axes=tuple("_".join(self.axes[part]) for part in parts),
            sizes=tuple(math.prod(self.sizes[part]) for part in parts),
            device=self.device,
            ascending=self.ascending,
        )

    def merges(self, mesh: Mesh) -> bool:
        """Whether this is a mesh with some of its adjacent axes as one, or none."""
        left = list(zip(mesh.axes, mesh.sizes, strict=True))
        for axis, size in zip(self.axes, self.sizes, strict=True):
            runs = (n for n in range(1, len(left) + 1) if "_".join(name for name, _ in left[:n]) == axis)
            run = next(runs, 0)
            if not run or math.prod(one for _, one in left[:run]) != size:
                return False
            left = left[run:]
        return not left

    def cut(self, parts: int) -> Mesh:
        """The mesh whose outermost axis is cut: so many parts along a first axis, what is left of it along the second.

        >>> Mesh.of({"node": 8, "gpu": 4}).cut(2)
        Mesh(node_stages=2, node=4, gpu=4)
        >>> Mesh.of({"node": 8, "gpu": 4}).cut(8)
        Mesh(node_stages=8, gpu=4)

        Raises MeshError if the axis has not so many equal parts.
        """
        (axis, *axes), (size, *sizes) = self.axes, self.sizes
        if size % parts:
            raise MeshError(f"the {size} devices of mesh axis {axis!r} have not {parts} equal parts", mesh=self)
        kept = 1 if parts == size else 2
        return Mesh(
            axes=(*(f"{axis}{STAGES}", axis)[:kept], *axes),
            sizes=(*(parts, size // parts)[:kept], *sizes),
            links=(*(self.links[0], self.links[0])[:kept], *self.links[1:]) if self.links else (),
            device=self.device,
            ascending=self.ascending,
        )

    @property
    def joined(self) -> Mesh:
        """The mesh of which this one is a `cut`; itself if it is none."""
        axis = self.axes[0].removesuffix(STAGES)
        if axis == self.axes[0]:
            return self
        split = self.axes[1:2] == (axis,)
        first = self.sizes[0] * (self.sizes[1] if split else 1)
        axes, sizes = (axis, *self.axes[1 + split :]), (first, *self.sizes[1 + split :])
        return Mesh(axes=axes, sizes=sizes, device=self.device, ascending=self.ascending)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where a rank stands: one coordinate per axis, row-major."""
        where = []
        for size in reversed(self.sizes):
            rank, here = divmod(rank, size)
            where.append(here)
        return tuple(reversed(where))

    def __str__(self) -> str:
        return printable(f"({', '.join(f'{a}={s}' for a, s in zip(self.axes, self.sizes, strict=True))})")

    def __repr__(self) -> str:
        return f"Mesh{self}"


def _plain(size: Any) -> Any:
    """An integer of another library as Python's own."""
    return int(size) if isinstance(size, Integral) and not isinstance(size, bool) else size
