"""What shares a cluster: training jobs and devices, checked when they are made."""

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
    """A training job that takes a share of a cluster. Of `model` with `sample`, `program` and `curve` it has one.

    Args:
        name: what it is called; no other job of the cluster is.
        steps: how many steps are left to train.
        model: the module that is trained, as for `autopar.plan`; `meta` will do.
        sample: its global batch, which is the same on every number of devices.
        program: the captured program, in the place of both.
        curve: seconds of a step on each number of devices, where they are known.
        options: those of `autopar.plan`: {"precision": "bf16-mixed"}.
        counts: the numbers of devices that it may have; by default those of the cluster.
        weight: how much it counts beside the others.
        deadline: seconds from now until which it is to be done.
        present: on how many devices it is now; 0 if it does not run.
        migration: seconds that it loses if that number changes; of a job that does not run, what its start costs.
        samples: samples of a step beside a `curve`; a plan knows its own.

    Raises AllocationError for what no job has.
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
    """The devices that jobs share: equal ones, in equal nodes.

    Args:
        devices: how many there are.
        device: their kind, as for `autopar.plan`; by default what this machine has.
        per_node: how many a node has; by default as many as the device's.
        counts: the numbers of devices that a job may have; by default 1, 2, 4, ..., and all: they fill nodes.

    Raises AllocationError for what no cluster has.
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
        """The numbers of devices that a job may have here, ascending."""
        if job.counts is not None:
            asked: Sequence[int] = job.counts
        elif job.curve is not None:
            asked = [count for count in job.curve if self.counts is None or count in self.counts]
        else:
            asked = self.counts if self.counts is not None else [*(1 << n for n in range(31)), self.devices]
        return sorted({count for count in asked if count <= self.devices})

    def hardware(self) -> Device:
        """The device in its node. Raises MeshError for one that nothing is known of."""
        device = catalog.device(self.device, processes=self.devices)
        return device if self.per_node is None else replace(device, per_node=self.per_node)

    def given(self, job: TrainingJob) -> list[ScalingStep]:
        """The scaling of a job whose curve is given, on the mesh of its nodes."""
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
    """A value as an error shows it: Python does not print integers of many digits."""
    return "too large" if isinstance(value, int) and abs(value) > RANGE[1] else str(value)[:40]


def _counts(what: str, values: object) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence) or not 0 < len(values) <= MOST_COUNTS:
        raise AllocationError(f"{what} names no numbers of devices", fix=f"at most {MOST_COUNTS} of them: (1, 2, 4, 8)")
    for value in values:
        _count(f"{what}: a number of devices", value, 1)


__all__ = ["Cluster", "TrainingJob"]
