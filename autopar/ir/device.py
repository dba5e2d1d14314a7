"""A device: its memories and rates, and the links that connect it to others."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import MeshError
from autopar.ir.field_types import check_fields
from autopar.ir.kernel_rates import AttentionRate, ProductRate, positive

Seconds = float
Bytes = int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus:
    """The rates of NCCL's collectives over a link: the coefficients of `autopar.cost_models.collectives.nccl`.

    A rate is a *bus bandwidth* as nccl-tests prints it: bytes per second sent by each device, by the number of a group's
    devices in one node. Unlisted sizes use the rate of the next smaller one. A network has no rates: its cards drive it.
    """

    hop: Seconds  # from one device of a ring to the next
    ring: Mapping[int, float] = field(default_factory=dict)
    all_reduce: Mapping[int, float] = field(default_factory=dict)  # empty: as in a ring
    switch: bool = False  # whether a switch adds up what is reduced (NVLink SHARP)
    all_to_all: Mapping[int, float] = field(default_factory=dict)  # empty: as in a ring
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link between the devices of one mesh axis."""

    name: str
    latency: Seconds  # per message
    bandwidth: float  # bytes per second that one device sends, one direction
    source: str  # "NVLink 4, H100 SXM data sheet, 2023"
    # Where it is known for its groups: kind of collective -> seconds of an empty message, and per byte of the larger buffer.
    # They count, not the above. A line, so that the price of a message is that of its parts and one latency.
    lines: Mapping[str, tuple[Seconds, Seconds]] = field(default_factory=dict)
    bus: Bus | None = None  # what NCCL reaches over it, from which `autopar.cost_models.links.connect` makes such lines

    def __post_init__(self) -> None:
        whose = f"link {self.name}'s"
        check_fields(whose, self)
        positive(whose, {"bandwidth": self.bandwidth})
        positive(whose, {"latency": self.latency}, zero=True)
        positive(whose, {f"time of {kind}": part for kind, line in self.lines.items() for part in line}, zero=True)

    def send(self, size: float) -> Seconds:
        """Seconds to send a message of so many bytes from one rank to another."""
        return self.latency + size / self.bandwidth

    def faster(self, times: float) -> Link:
        """A copy of the link that is so many times faster."""
        return replace(self, latency=self.latency / times, bandwidth=self.bandwidth * times)

    def without_latency(self) -> Link:
        """A copy of the link on which an empty message takes no time."""
        return replace(self, latency=0.0, lines={kind: (0.0, by_size) for kind, (_, by_size) in self.lines.items()})

    @staticmethod
    def of_lines(name: str, ranks: int, lines: Mapping[str, tuple[Seconds, Seconds]], source: str) -> Link:
        """A link with latency and bandwidth per kind of collective; the ones shown to people are the all-gather's."""
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
        check_fields("a disk's", self)
        positive("a disk's", {"memory": self.memory, "latency": self.latency}, zero=True)
        positive("a disk's", {"rate of reading": self.read, "rate of writing": self.write})

    def seconds(self, read: float, written: float) -> Seconds:
        """Seconds to read and then write so many bytes."""
        return self.latency + read / self.read + written / self.write


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or one process's share of a CPU): peak rates, memory and minimum launch time, with their source."""

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
    # attention, bytes of others; "optimizer.NAME" -> bytes moved per second by its step, or in `updates` NAME -> seconds of its
    # step over one parameter of so many bytes, where a step goes over one after the other; and links by the size of a group.
    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    updates: Mapping[str, Mapping[Bytes, Seconds]] = field(default_factory=dict)
    links: Mapping[int, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whose = f"device {self.name}'s"
        check_fields(whose, self)
        positive(whose, {"memory": self.memory, "bandwidth": self.bandwidth, "devices per node": self.per_node})
        positive(whose, {f"{dtype} rate": rate for dtype, rate in self.flops.items()})
        if "float32" not in self.flops:
            raise MeshError(
                f"{whose} flops have no rate of float32", fix='flops={"float32": ...}: dtypes without a rate have it'
            )
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
        for name, known in self.updates.items():
            positive(whose, {f"bytes of a parameter that {name} steps": size for size in known})
            positive(whose, {f"time of {name} for {size} bytes": seconds for size, seconds in known.items()})

    def share(self, kind: str) -> tuple[float, float]:
        """The fractions of the memory bandwidth that operators of a kind reach, forward and backward."""
        return self.achieved.get(kind) or self.achieved.get("stream", (1.0, 1.0))

    @property
    def streaming(self) -> float:
        """Bytes per second of a plain streaming kernel."""
        return self.bandwidth * self.share("stream")[0]

    def at_peak(self) -> Device:
        """This device at its data sheet's rates: a roofline without efficiencies, and a step that is the sum of its parts."""
        return replace(self, product=None, attention=None, achieved={}, addresses=math.inf, power=1.0, interference=1.0)

    @property
    def aligns(self) -> bool:
        """Whether matrix products with unaligned rows are slower, so that a compiler pads them."""
        return self.product is not None and self.product.unaligned < self.product.fraction and not self.compiled

    @property
    def cpu(self) -> bool:
        """Whether it is a CPU, where some operators take another path."""
        return cpu_named(self.name)


def cpu_named(device: str) -> bool:
    """Whether a device of this name is a CPU."""
    return re.match(r"cpu\b", device) is not None
