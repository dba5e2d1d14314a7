"""Checks that a plan from a file is consistent, so that it can be printed, compared and read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from typing import TYPE_CHECKING

from autopar.errors import AutoparError
from autopar.ir.conversion import WAYS
from autopar.pipeline.dependencies import check as check_schedule
from autopar.plan.breakdown import BUDGET, OPTIMIZER
from autopar.plan.tables import COLLECTIVE, UNITS

if TYPE_CHECKING:
    from autopar.plan.plan import Plan


AWAY = {"H", "D"}  # on the host, on the disk


def check(plan: Plan) -> None:
    """Raise ValueError, with the first problem found, for an inconsistent plan."""
    if wrong := next(_wrong(plan), None):
        raise ValueError(wrong)


def _wrong(plan: Plan) -> Iterator[str]:
    """The problem in words."""
    axes, found = plan.axes, plan.breakdown
    if not axes or not len(set(axes)) == len(axes) == len(plan.sizes) == len(plan.links):
        yield "mesh needs different axes, and a size and a link for each"
    if any(size < 1 for size in plan.sizes) or plan.microbatches < 1:
        yield "sizes of the mesh and microbatches are at least 1"
    if plan.step_time < 0 or plan.peak_memory < 0:
        yield "step_time and peak_memory are not negative"
    if "strategy" not in plan.options:
        yield 'options has no entry "strategy"'
    for place, sent in enumerate(plan.collectives):
        if sent.kind not in COLLECTIVE or not plan.mesh.axes_named(sent.axis) or sent.bytes < 0 or sent.seconds < 0:
            yield f"collectives.{place} is not a collective over an axis of the mesh"
    of = [figure.of for figure in found.cost_parameters]
    if (of.count(BUDGET), of.count(OPTIMIZER)) != (1, 1) or any(figure.unit not in UNITS for figure in found.cost_parameters):
        yield "breakdown.cost_parameters has one budget and one optimizer, and units that are known"
    if any(group.seconds <= 0 or min(group.at_peak, group.at_bandwidth) < 0 for group in found.simulated.kernels):
        yield "breakdown.simulated.kernels take time"
    if any(size < 0 for size in found.memory.values()) or (found.memory and not plan.peak_memory):
        yield "breakdown.memory is not the peak's"
    for kind, words in (("runs", found.runs), ("stored", found.stored)):
        yield from (
            f"breakdown.{kind}.{name} has not one entry per axis" for name, one in words.items() if len(one) != len(axes)
        )
    placed = plan.placed
    for name, layout in plan.layouts.items():
        *others, last = (entry.strip() for entry in layout.split(","))
        if AWAY & {*others} or (last in AWAY and not (plan.mesh.has_memories and name in placed)):
            yield f"layouts.{name} is on the host or the disk, which is said of parameters, on the axis of memories only"
    if any(size < 0 for size in (*found.host.values(), *found.disk.values())):
        yield "breakdown.host and breakdown.disk are not negative"
    if plan.pipeline or plan.stages:
        yield from _wrong_stages(plan)
    for name, steps in plan.routes.items():
        yield from (
            f"routes.{name}: {step!r} is not a conversion on one axis, or on several at once"
            for step in steps
            if not _conversion(step, len(axes))
        )


def _conversion(step: str, axes: int) -> bool:
    """Whether a text may denote a conversion; entries of other axes may differ too, in the order of splits."""
    sides = [[entry.strip() for entry in side.split(",")] for side in step.split(" -> ")]
    if [len(side) for side in sides] != [axes, axes]:
        return False
    changed = [(source[:1], target[:1]) for source, target in zip(*sides, strict=True) if source != target]
    return bool(changed) and changed[0] in WAYS


def _wrong_stages(plan: Plan) -> Iterator[str]:
    """The problem with a pipeline and its stages, in words."""
    found = plan.pipeline
    if found is None:
        yield "stages are of a pipeline"
        return
    count = len(plan.stages)
    if found.axis not in plan.axes or len(found.ranks) != dict(zip(plan.axes, plan.sizes, strict=True))[found.axis]:
        yield "pipeline.ranks has not one line per rank of an axis of the mesh"
        return
    if not count == len(found.starts) == len(found.modules) == len(found.seconds):
        yield "pipeline has not one entry per stage"
    try:
        check_schedule(found.order)
    except AutoparError as error:
        yield f"pipeline.ranks: {error.what}"
        return
    if (found.order.stages, found.order.microbatches) != (count, plan.microbatches):
        yield "pipeline.ranks has other stages or micro-batches than the plan"
    if len(found.order.ranks) != len(found.ranks):
        yield "pipeline.ranks has a line that is not one rank's"
    if len(found.memory) != len(found.ranks) or min(found.memory) < 0:
        yield "pipeline.memory has not one size per rank"
    if any(min(astuple(seconds)) < 0 for seconds in found.seconds):
        yield "pipeline.seconds are not negative"
    if any(not 0 <= one.stage < count - 1 or one.bytes < 0 for one in found.crossings):
        yield "pipeline.crossings are between stages"
    for place, stage in enumerate(plan.stages):
        if stage.pipeline or stage.microbatches != plan.microbatches or not _without(plan, found.axis, stage):
            yield f"stages.{place} is not a stage of this plan"
        yield from (f"stages.{place}: {wrong}" for wrong in _wrong(stage))


def _without(plan: Plan, axis: str, stage: Plan) -> bool:
    """Whether a stage's mesh is the plan's without the pipeline's axis; without another axis it is one device."""
    rest = [(name, size) for name, size in zip(plan.axes, plan.sizes, strict=True) if name != axis]
    return [*zip(stage.axes, stage.sizes, strict=False)] == (rest or [(axis, 1)])
