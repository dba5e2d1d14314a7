"""The cost breakdown of a plan: the parameters that it was priced with, and where its seconds and bytes go.

step_time    =  compute (forward and backward of every op) + conversions + optimizer + the plan's collectives - hidden
peak_memory  =  the sum of `memory`, at `moment`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.device import Bytes, Seconds

INPUT = "input:"  # before the names of arguments in `stored`
DEVICE, OPTIMIZER, BUDGET, ACCURACY = "device", "optimizer", "budget", "accuracy"
# What is not split on an axis: states I, R, P, H and D.
WHOLE, REPEATED, ADDENDS, HOSTED, ON_DISK = "whole", "repeated", "addends", "host", "disk"
OWN_ROWS = "own rows"  # sorted by each rank alone


@dataclass(frozen=True, slots=True, kw_only=True)
class CostParameter:
    """A parameter of the prices, in `unit`: "B", "B/s", "s", "op/s" or none.

    `of` is "device", "optimizer", "budget", "accuracy" (how far predicted steps were from measured ones) or a mesh axis.
    """

    of: str
    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """An allocation at a moment: of a value, or of an op, for what autograd saves inside it; `count` equal ones together."""

    kind: str
    name: str
    count: int
    bytes: Bytes

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + (f" (x{self.count})" if self.count > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelGroup:
    """Kernels of one kind on one device: their seconds in a step, recomputation included.

    They would take `at_peak` if their operations ran at the device's peak, and `at_bandwidth` if all that they read and write
    moved at its memory bandwidth.
    """

    name: str
    seconds: Seconds
    at_peak: Seconds
    at_bandwidth: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A step as the simulator runs it, with messages overlapping computation; in seconds on one device.

    `seconds` = computing + its `slowdown` by overlapping messages + `exposed` waiting for messages. Three lower bounds hold for
    every schedule: `at_peak`, the model's products on all devices at their peaks; `memory`, the reads and writes of the plan's
    `kernels`; `links`, the messages of each axis. `samples` and `tokens` are those of a step, 0 where unknown.
    """

    seconds: Seconds
    exposed: Seconds
    slowdown: Seconds
    at_peak: Seconds
    kernels: tuple[KernelGroup, ...]
    links: Mapping[str, Seconds]
    samples: int
    tokens: int

    @property
    def computing(self) -> Seconds:
        """Computing, without the slowdown by overlapping messages."""
        return self.seconds - self.exposed - self.slowdown

    @property
    def memory(self) -> Seconds:
        """The time for all reads and writes of the kernels at the memory bandwidth."""
        return sum(group.at_bandwidth for group in self.kernels)

    @property
    def rates(self) -> dict[str, float]:
        """Samples and tokens per second, where known."""
        return self.rates_in(self.seconds)

    def rates_in(self, seconds: Seconds) -> dict[str, float]:
        """Samples and tokens per second of a step of this length."""
        counts = {"samples/s": self.samples, "tokens/s": self.tokens}
        return {unit: count / seconds for unit, count in counts.items() if count and seconds}

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the time of the model's products at the devices' peaks, as a share of the step."""
        return self.at_peak / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBreakdown:
    """The parts of a plan's totals, in seconds of one step and bytes on one device.

    `compute` is op -> (forward, backward) for ops that take time, `recompute` op -> repeating its forward for the backward;
    `offload` value -> its copies to the host and back; `conversions` counts slices, pads and copies that are not collectives,
    and what micro-batches share; `hidden` is the time of collectives that overlaps with computation. `runs` and `stored` say in
    words what is split, one entry per axis: the usual name of the dim ("out-features"), else "whole", "repeated" (its gradient
    in addends), "addends", "host" or "disk". `runs` has ops that use parameters, and well-known ops; `stored` has the
    parameters, "input:" and the name of an argument, "output:" and the name of a result. `tied` is every other name of a
    parameter -> its own, `copies` a copy of a parameter in another dtype -> that parameter. `host` and `disk` have the bytes
    stored there, by purpose: of one device, at the end of a backward.
    """

    cost_parameters: tuple[CostParameter, ...]
    compute: Mapping[str, tuple[Seconds, Seconds]]
    recompute: Mapping[str, Seconds]
    conversions: Seconds
    optimizer: Seconds
    memory: Mapping[str, Bytes]
    moment: str
    fullest: tuple[Allocation, ...]
    runs: Mapping[str, tuple[str, ...]]
    stored: Mapping[str, tuple[str, ...]]
    tied: Mapping[str, str]
    simulated: SimulatedStep
    copies: Mapping[str, str] = field(default_factory=dict)
    offload: Mapping[str, Seconds] = field(default_factory=dict)
    hidden: Seconds = 0.0
    host: Mapping[str, Bytes] = field(default_factory=dict)
    disk: Mapping[str, Bytes] = field(default_factory=dict)

    @property
    def forward(self) -> Seconds:
        """Computing in the forward."""
        return sum(there for there, _ in self.compute.values())

    @property
    def backward(self) -> Seconds:
        """Computing in the backward."""
        return sum(back for _, back in self.compute.values())

    @property
    def recomputed(self) -> Seconds:
        """Recomputing in the backward what the forward did not keep."""
        return sum(self.recompute.values())

    @property
    def offloaded(self) -> Seconds:
        """Moving to the host what the backward needs, and back."""
        return sum(self.offload.values())

    @property
    def local(self) -> Seconds:
        """Everything except collectives."""
        return self.forward + self.backward + self.recomputed + self.offloaded + self.conversions + self.optimizer
