"""Training jobs and the cluster that they share, checked on construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from autopar.cost_models import catalog
from autopar.errors import AllocationError
from autopar.explain.scaling import ScalingStep, node_mesh
from autopar.ir.device import Device, Seconds
from autopar.ir.mesh import MOST_DEVICES
from autopar.ir.program import Program
from autopar.plan.options import Options

RANGE = 1e-15, 1e15  # of weights and seconds: products of them are numbers
LONGEST = 100  # characters of a name, at most
MOST_COUNTS = 100  # numbers of devices that a job may have
FIXED = {  # options of `autopar.plan` that a job does not have, and why
    "device": "the cluster says which device it has",
    "constraints": "they name layouts on each axis, and the mesh is searched",
    "dynamic": "a step is priced at the sizes of its sample",
    "time_limit": "no clock decides an allocation",
}


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TrainingJob:
    """A training job that takes a share of a cluster. It has one of: `model` with `sample`, `program`, or `curve`.

    Args:
        name: its name, unique in the cluster.
        steps: the number of steps left to train.
        model: the module to train, as for `autopar.plan`; it may be on `meta`.
        sample: its global batch, which is the same on every number of devices.
        program: the captured program, instead of both.
        curve: seconds per step by number of devices, if known.
        options: those of `autopar.plan`: {"precision": "bf16-mixed"}.
        counts: the allowed numbers of devices; by default those of the cluster.
        weight: its weight relative to the others.
        deadline: seconds from now by which it should be done.
        present: the number of devices that it uses now; 0 if it is not running.
        migration: seconds lost if that number changes; for a job that is not running, the cost of its start.
        samples: samples per step, for a `curve`; a plan knows its own.

    Raises AllocationError for invalid values.
    """

    name: str
    steps: int
    model: nn.Module | None = field(default=None, repr=False)
    sample: object = field(default=None, repr=False)
    program: Program | None = field(default=None, repr=False)
    curve: Mapping[int, Seconds] | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    counts: Sequence[int] | None = None
    weight: float = 1.0
    deadline: Seconds | None = None
    present: int = 0
    migration: Seconds = 0.0
    samples: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable() or len(self.name) > LONGEST:
            what = f"a job is called {str(self.name)[:LONGEST]!r}"
            raise AllocationError(what, fix=f"a name of at most {LONGEST} characters that print")
        of = f"job {self.name!r}: "
        _count(f"{of}steps", self.steps, 1)
        _count(f"{of}present", self.present, 0)
        _count(f"{of}samples", self.samples, 0)
        _number(f"{of}weight", self.weight)
        _number(f"{of}migration", self.migration, zero=True)
        if self.deadline is not None:
            _number(f"{of}deadline", self.deadline)
        if self.counts is not None:
            _counts(f"{of}counts", self.counts)
        self._check_source(of)

    def _check_source(self, of: str) -> None:
        given = [name for name in ("model", "program", "curve") if getattr(self, name) is not None]
        if len(given) != 1:
            what = f"{of}{' and '.join(given) or 'neither model, program nor curve'} {'are' if given else 'is'} given"
            raise AllocationError(what, fix="a model with its sample, a captured program, or a curve {devices: seconds}")
        for name in self.options:
            if name in FIXED:
                raise AllocationError(f"{of}the option {name!r} is not a job's: {FIXED[name]}", fix="leave it out")
            if name not in Options.__dataclass_fields__:
                raise AllocationError(f"{of}no option is called {name!r}", fix="those of autopar.plan")
        if self.curve is not None:
            _counts(f"{of}curve", list(self.curve))
            for devices, seconds in self.curve.items():
                _number(f"{of}curve: seconds of a step on {devices}", seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices that jobs share: all alike, in equal nodes.

    Args:
        devices: their number.
        device: their kind, as for `autopar.plan`; by default this machine's.
        per_node: the number per node; by default that of the device's catalog entry.
        counts: the numbers of devices that a job may get; by default 1, 2, 4, ..., and all: they fill nodes.

    Raises AllocationError for invalid values.
    """

    devices: int
    device: str | Device | None = None
    per_node: int | None = None
    counts: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _count("the cluster's devices", self.devices, 1)
        if self.per_node is not None:
            _count("the cluster's per_node", self.per_node, 1)
        if self.counts is not None:
            _counts("the cluster's counts", self.counts)

    def numbers(self, job: TrainingJob) -> list[int]:
        """The numbers of devices that a job may get here, ascending."""
        if job.counts is not None:
            asked: Sequence[int] = job.counts
        elif job.curve is not None:
            asked = [count for count in job.curve if self.counts is None or count in self.counts]
        else:
            asked = self.counts if self.counts is not None else [*(1 << n for n in range(31)), self.devices]
        return sorted({count for count in asked if count <= self.devices})

    def hardware(self) -> Device:
        """The device in its node. Raises MeshError for an unknown one."""
        device = catalog.device(self.device, processes=self.devices)
        return device if self.per_node is None else replace(device, per_node=self.per_node)

    def given(self, job: TrainingJob) -> list[ScalingStep]:
        """The scaling of a job with a given curve, on the mesh of its nodes."""
        assert job.curve is not None, "it is given"
        plain = self.device is None and self.per_node is None  # of nodes nothing is said
        per_node = self.devices if plain else self.per_node or self.hardware().per_node
        return [
            ScalingStep(devices=n, mesh=node_mesh(n, per_node), step_time=job.curve[n], samples=job.samples)
            for n in self.numbers(job)
            if n in job.curve
        ]


def _count(what: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_DEVICES:
        raise AllocationError(f"{what} is {_said(value)}", fix=f"a whole number from {least} to {MOST_DEVICES}")


def _number(what: str, value: object, *, zero: bool = False) -> None:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not (RANGE[0] <= value <= RANGE[1] or (zero and value == 0)):  # type: ignore[operator]
        fix = f"{'0, or ' if zero else ''}a number from {RANGE[0]:g} to {RANGE[1]:g}"
        raise AllocationError(f"{what} is {_said(value)}", fix=fix)


def _said(value: object) -> str:
    """A value for an error message: Python does not print integers of many digits."""
    return "too large" if isinstance(value, int) and abs(value) > RANGE[1] else str(value)[:40]


def _counts(what: str, values: object) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence) or not 0 < len(values) <= MOST_COUNTS:
        raise AllocationError(f"{what} names no numbers of devices", fix=f"at most {MOST_COUNTS} of them: (1, 2, 4, 8)")
    for value in values:
        _count(f"{what}: a number of devices", value, 1)


__all__ = ["Cluster", "TrainingJob"]
