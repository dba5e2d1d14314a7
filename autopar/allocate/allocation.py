"""Chooses how many devices of a cluster each job gets, by an integer program for a goal.

captured programs -> a plan on each number of devices (curves) -> prospects of each job (goals) -> a number for each, within the
    cluster (solver.knapsack) -> ClusterAllocation
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from autopar.allocate.choice import DeviceChoice
from autopar.allocate.curves import Curve, captured, curve
from autopar.allocate.goals import Prospect, goal_of, late, prospects
from autopar.allocate.jobs import Cluster, TrainingJob
from autopar.errors import AllocationError
from autopar.ir.device import Seconds
from autopar.plan.text import Part, grid, milliseconds, plain

COLUMNS = "job", "devices", "mesh", "step ms", "done in s", "why"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShare:
    """A job's share of a cluster: devices (0: it waits), their mesh, the predictions, and why it gets no more.

    `job` is the input for the next allocation: captured, with these devices as its present ones.
    """

    name: str
    devices: int
    mesh: tuple[int, ...]
    step_time: Seconds  # 0 if it waits
    completion: Seconds  # from now; of a job that waits, if it comes last
    on_time: bool | None  # None without a deadline
    migrates: bool
    why: str
    curve: Curve
    job: TrainingJob = field(compare=False)

    def data(self) -> dict[str, object]:
        """The share as plain data."""
        scaling = [{"devices": one.devices, "mesh": list(one.mesh), "step_time": one.step_time} for one in self.curve]
        names = ("name", "devices", "step_time", "completion", "on_time", "migrates", "why")
        return {name: getattr(self, name) for name in names} | {"mesh": list(self.mesh), "scaling": scaling}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAllocation:
    """The proven best allocation of a cluster for a goal; `value` is the goal's value in `unit`. Prints as a table."""

    goal: str
    value: float
    unit: str
    devices: int
    shares: tuple[JobShare, ...]  # by name

    def __getitem__(self, name: str) -> JobShare:
        """The share of the job of this name; raises KeyError if there is none."""
        return {share.name: share for share in self.shares}[name]

    @property
    def used(self) -> int:
        """The number of devices in use."""
        return sum(share.devices for share in self.shares)

    def to_json(self) -> str:
        """The allocation as one JSON object."""
        names = ("goal", "value", "unit", "devices", "used")
        return json.dumps(
            {name: getattr(self, name) for name in names} | {"jobs": [one.data() for one in self.shares]}, indent=1
        )

    def parts(self) -> Iterator[Part]:
        """The table, and the value of the goal."""
        table = grid(*COLUMNS, right=(1, 2, 3, 4))
        for share in self.shares:
            shape, took = "x".join(map(str, share.mesh)), milliseconds(share.step_time)
            running = (str(share.devices), shape, took) if share.devices else ("waits", "", "")
            table.add_row(share.name, *running, f"{share.completion:.6g}", share.why)
        yield table
        yield f"{self.used} of {self.devices} devices; goal {self.goal}: {self.value:.6g} {self.unit}, proven best"

    def __str__(self) -> str:
        return plain(self.parts())


def allocate(jobs: Iterable[TrainingJob], cluster: Cluster, *, goal: str = "throughput") -> ClusterAllocation:
    """Allocate the devices of a cluster to training jobs so as to optimise a goal; some jobs may wait.

    Each job is captured once and planned on each allowed number of devices, in the fastest mesh shape, as `autopar.plan(model,
    sample, "auto", devices=n)` does; plans are kept with the captured program. Ties are broken by fewest waiting jobs, then by
    fewest devices, then by more devices for names that come first.

    Args:
        jobs: the jobs, each with a unique name.
        cluster: the devices.
        goal: "throughput": most weighted steps per second until jobs are done; "samples": the same in samples; "completion":
            least weighted sum of seconds until each job is done; "deadlines": most weight of deadlines met, then completion.

    Returns:
        A share for each job, by name, with its predicted step time and completion, and why it gets no more.

    Raises:
        AllocationError: two jobs share a name, the goal is unknown, a model cannot be captured, a job fits on no number of
            devices, or a deadline cannot be met even on the whole cluster.
        MeshError: the device is unknown.

    >>> import autopar
    >>> jobs = [autopar.TrainingJob(name=name, steps=100, curve={1: 1.0, 2: 0.5}) for name in ("a", "b")]
    >>> allocation = autopar.allocate(jobs, autopar.Cluster(devices=2), goal="completion")
    >>> [(share.name, share.devices, share.completion) for share in allocation.shares]
    [('a', 2, 50.0), ('b', 0, 100.0)]
    """
    ordered = _ordered(jobs)
    if not isinstance(cluster, Cluster):
        raise AllocationError(f"the cluster is a {type(cluster).__name__}", fix="autopar.Cluster(devices=8, device='h100')")
    ready = [captured(job) for job in ordered]
    curves = [curve(job, cluster) for job in ready]
    expected = prospects(ready, curves, cluster)
    aim = goal_of(goal, ready, expected)
    choice = DeviceChoice(ready, expected, aim, cluster.devices)
    picks = choice.best()
    shares = tuple(
        _share(job, steps, every[pick], choice.why(picks, place))
        for place, (job, steps, every, pick) in enumerate(zip(ready, curves, expected, picks, strict=True))
    )
    return ClusterAllocation(goal=goal, value=choice.value(picks), unit=aim.unit, devices=cluster.devices, shares=shares)


def _share(job: TrainingJob, steps: Curve, chosen: Prospect, why: str) -> JobShare:
    plan = chosen.step
    return JobShare(
        name=job.name,
        devices=chosen.devices,
        mesh=plan.mesh if plan else (),
        step_time=plan.step_time if plan else 0.0,
        completion=chosen.completion,
        on_time=None if job.deadline is None else not late(job, chosen),
        migrates=chosen.devices != job.present,
        why=why,
        curve=steps,
        job=replace(job, present=chosen.devices),
    )


def _ordered(jobs: Iterable[TrainingJob]) -> list[TrainingJob]:
    """The jobs by name. Raises AllocationError for duplicate names, and for anything but a job."""
    if not isinstance(jobs, Iterable):
        raise AllocationError(f"the jobs are a {type(jobs).__name__}", fix="a list of autopar.TrainingJob")
    found = list(jobs)
    for one in found:
        if not isinstance(one, TrainingJob):
            raise AllocationError(f"a job is a {type(one).__name__}", fix="autopar.TrainingJob(name=..., steps=..., model=...)")
    twice = [name for name, number in Counter(one.name for one in found).items() if number > 1]
    if twice:
        raise AllocationError(f"two jobs are called {min(twice)!r}", fix="a name of its own for each")
    return sorted(found, key=lambda one: one.name)


__all__ = ["ClusterAllocation", "JobShare", "allocate"]
