"""Scaling curves: the fastest plan of each job on each allowed number of devices, in the fastest mesh shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.allocate.jobs import Cluster, TrainingJob
from autopar.errors import AllocationError, AutoparError
from autopar.explain.scaling import ScalingStep, scaling
from autopar.ir.program import Program, remembered
from autopar.plan.keyword_options import options_of
from autopar.plan.options import Options
from autopar.planning.planner import read_program

Curve = tuple[ScalingStep, ...]  # by number of devices, ascending; without those that have no plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Options as a cache key: they compare by their printed text."""

    text: str
    options: Options = field(compare=False)


def captured(job: TrainingJob) -> TrainingJob:
    """Replace a job's model by its captured program. Raises AllocationError for a model that cannot be captured."""
    if job.model is None:
        return job
    asked = _options(job)
    try:
        read = read_program(job.model, job.sample, asked)
    except AutoparError as error:
        raise AllocationError(f"job {job.name!r}: {error.what}", **error.details) from error
    return replace(job, model=None, sample=None, program=read.program)


def curve(job: TrainingJob, cluster: Cluster) -> Curve:
    """The plans of a captured job on each number of devices of a cluster, or its own curve.

    Plans are cached as long as the program lives. Raises AllocationError for a job that fits on no number of devices, and
    whatever planning raises for its options.
    """
    numbers = cluster.numbers(job)
    if not numbers:
        raise AllocationError(
            f"no number of devices that job {job.name!r} may get is at most the {cluster.devices} of the cluster",
            counts=job.counts or cluster.counts or "",
            curve=sorted(job.curve or ()) or "",
            fix="smaller numbers in its counts or curve, or a larger cluster",
        )
    if job.program is None:
        steps: Sequence[ScalingStep] = cluster.given(job)
    else:
        options = replace(_options(job), device=cluster.hardware())
        asked = Asked(text=f"{options!r} {id(options.cost_model)}", options=options)
        steps = [planned(job.program, devices, asked) for devices in numbers]
    found = tuple(step for step in steps if not step.refusal)
    if not found:
        raise _unfit(job, steps)
    return found


@remembered
def planned(program: Program, devices: int, asked: Asked) -> ScalingStep:
    """The fastest plan of a program on so many devices, in the fastest mesh shape."""
    (step,) = scaling(program, (devices,), asked.options, shapes=True)
    return step


def _options(job: TrainingJob) -> Options:
    return Options(**options_of(job.options))  # type: ignore[arg-type]


def _unfit(job: TrainingJob, steps: Sequence[ScalingStep]) -> AllocationError:
    tried = "; ".join(f"{step.devices} devices: {step.refusal}" for step in steps) or "no number of its counts is in its curve"
    fix = "where memory is short: a larger cluster, another device, or options that need less; else other options, or counts"
    return AllocationError(f"job {job.name!r} fits on no number of devices of the cluster", tried=tried, fix=fix)


__all__ = ["Curve", "captured", "curve"]
