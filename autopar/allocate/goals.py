"""The goals of an allocation: what each number of devices means for a job, and its cost under each goal.

A job on n devices with t(n) seconds per step is done after

    completion = migration [n is not its present number] + steps t(n)

and until then runs at steps / completion steps per second, which counts the pause of its migration. A waiting job is assumed to
start last, after the least work of all others spread over the whole cluster, which is the squashed area bound (J. Turek et al.,
"Scheduling parallelizable tasks to minimize average response time", SPAA 1994), and then to run as fast as possible:

    completion = sum_others min_n n steps t(n) / devices + migration + min_n steps t(n)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.allocate.curves import Curve
from autopar.allocate.jobs import Cluster, TrainingJob
from autopar.errors import AllocationError
from autopar.explain.scaling import ScalingStep
from autopar.ir.device import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A job on a number of devices, 0 if it waits: its plan, the seconds until it is done, and steps per second until then."""

    devices: int
    step: ScalingStep | None  # none while it waits
    completion: Seconds
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Costs of a prospect, lower is better, most important first; `unit` is that of the first, which is negated if `most`."""

    costs: Callable[[TrainingJob, Prospect], tuple[float, ...]]
    unit: str
    most: bool = False

    def value(self, cost: float) -> float:
        """The sum of the first costs, in the sign that people expect."""
        return -cost if self.most else cost


def prospects(jobs: Sequence[TrainingJob], curves: Sequence[Curve], cluster: Cluster) -> list[list[Prospect]]:
    """The prospects of each job: first waiting, then on each number of devices."""
    areas = [job.steps * min(step.devices * step.step_time for step in curve) for job, curve in zip(jobs, curves, strict=True)]
    found = []
    for place, (job, curve) in enumerate(zip(jobs, curves, strict=True)):
        queue = sum(areas[:place] + areas[place + 1 :]) / cluster.devices
        last = queue + job.migration + job.steps * min(step.step_time for step in curve)
        waits = Prospect(devices=0, step=None, completion=last, rate=0.0)
        found.append([waits, *(_running(job, step) for step in curve)])
    return found


def _running(job: TrainingJob, step: ScalingStep) -> Prospect:
    moved = job.migration if step.devices != job.present else 0.0
    completion = moved + job.steps * step.step_time
    return Prospect(devices=step.devices, step=step, completion=completion, rate=job.steps / completion)


def late(job: TrainingJob, prospect: Prospect) -> bool:
    """Whether a job misses its deadline."""
    return job.deadline is not None and prospect.completion > job.deadline


GOALS: Mapping[str, Goal] = {
    "throughput": Goal(costs=lambda job, one: (-job.weight * one.rate,), unit="weighted steps/s", most=True),
    "samples": Goal(
        costs=lambda job, one: (-job.weight * one.rate * (one.step.samples if one.step else 0),),
        unit="weighted samples/s",
        most=True,
    ),
    "completion": Goal(costs=lambda job, one: (job.weight * one.completion,), unit="weighted seconds until done, in all"),
    "deadlines": Goal(
        costs=lambda job, one: (job.weight * late(job, one), job.weight * one.completion),
        unit="weight of the deadlines that are missed",
    ),
}


def check_goal(name: object) -> None:
    """Raise AllocationError if there is no goal of this name."""
    if not isinstance(name, str) or name not in GOALS:
        raise AllocationError(f"goal={str(name)[:40]!r} is not known", fix=f"one of {', '.join(GOALS)}")


def goal_of(name: str, jobs: Sequence[TrainingJob], expected: Sequence[Sequence[Prospect]]) -> Goal:
    """The goal with this name. Raises AllocationError if it does not exist, or the jobs do not support it."""
    check_goal(name)
    if name == "samples":
        for job, every in zip(jobs, expected, strict=True):
            if not all(one.step.samples for one in every if one.step):
                what = f"job {job.name!r} does not say how many samples a step has, which goal='samples' counts"
                raise AllocationError(what, fix="samples= of the job, or goal='throughput'")
    if name == "deadlines":
        _check_deadlines(jobs, expected)
    return GOALS[name]


def _check_deadlines(jobs: Sequence[TrainingJob], expected: Sequence[Sequence[Prospect]]) -> None:
    """Raise AllocationError if there are no deadlines, or a job cannot meet its deadline even on the whole cluster."""
    if jobs and all(job.deadline is None for job in jobs):
        raise AllocationError("goal='deadlines', and no job has one", fix="deadline= of a job, or goal='completion'")
    for job, every in zip(jobs, expected, strict=True):
        best = min(every[1:], key=lambda one: one.completion)
        if late(job, best):
            what = f"job {job.name!r} cannot meet its deadline in {job.deadline:g} s: on {best.devices} devices, the fastest"
            raise AllocationError(f"{what}, it takes {best.completion:.6g} s", fix="a later deadline, or none")


__all__ = ["GOALS", "Goal", "Prospect", "goal_of", "late", "prospects"]
