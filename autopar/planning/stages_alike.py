"""Stages for another program of a model over the stored tensors of a pipeline, such as evaluation in addition to training.

The program is cut where the planned one is, by operator names, and each stage is planned with its stored tensors in their
existing layouts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from glob import escape

from autopar.errors import AutoparError, PlanError
from autopar.ir.layout import I, Layout, Shape, text
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.stage_regions import fine_starts, made_again
from autopar.plan.assignment_text import as_planned
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.stages import ResolvedPipeline, StageSteps
from autopar.planning.pipeline_plan import staged, written
from autopar.planning.pipeline_stages import Cut, without_axis
from autopar.planning.plan_search import limited
from autopar.planning.stage_plans import StagePlanner
from autopar.solver.settings import DEFAULTS


def planned_alike(program: Program, found: ResolvedPipeline, mesh: Mesh, options: Options, given: Mapping[str, Layout]) -> Plan:
    """Plan the captured program of the whole batch in the stages of another plan, with the same schedule.

    Args:
        program: another program of the same model.
        found: the plan whose stages store the model.
        mesh: that of the plan, with device and links.
        options: those of the plan; strategy, budget and constraints are open.
        given: the inputs of which ranks give parts, as `given_alike` says.

    Raises what planning raises, and PlanError if the program cannot be cut into such stages.
    """
    plan, pipeline = found.plan, found.plan.pipeline
    assert pipeline is not None, "the plan has a pipeline"
    known = program.values.keys()
    rooms = {name: line for name, line in plan.padded.items() if name in known}
    try:
        step = as_planned(replace(plan, padded=rooms), program)
    except PlanError as error:
        raise _other(f"stored with padding, which would count in what this mode computes: {', '.join(rooms)}") from error
    starts = _starts(found, step.program)
    try:
        steps = StageSteps(step, starts)
    except AutoparError as error:
        raise _other(error.what) from error
    stored = {
        escape(held.value.name): one.plan.layouts[held.value.name]
        for one in found.resolved
        for held in (*one.program.parameters, *one.program.buffers)
        if held.value.name in known
    }
    inputs = {escape(name): _at_least(found, name, layout) for name, layout in given.items()}
    asked = replace(options, strategy="auto", budget=None, constraints=stored | inputs, microbatches=plan.microbatches)
    planner = StagePlanner(
        without_axis(mesh, pipeline.axis), mesh.links[mesh.axes.index(pipeline.axis)], asked, limited(DEFAULTS, asked)
    )
    cut = Cut(starts=starts, modules=pipeline.modules, name=pipeline.schedule, schedule=pipeline.order)
    return written(staged(steps, mesh, pipeline.axis, cut, planner), planner, asked, "")


def stored_by_rank(found: ResolvedPipeline) -> dict[int, dict[str, Layout]]:
    """The tensors that each pipeline rank's stages store, with their layouts. Raises PlanError if two stages disagree."""
    pipeline = found.plan.pipeline
    assert pipeline is not None, "the plan has a pipeline"
    layouts: dict[int, dict[str, Layout]] = {}
    for stage, rank in sorted(pipeline.order.rank_of.items()):
        resolved = found.resolved[stage]
        known = layouts.setdefault(rank, {})
        for held in (*resolved.program.parameters, *resolved.program.buffers):
            layout = resolved.assignment.given[held.value.name]
            if known.setdefault(held.value.name, layout) != layout:
                raise PlanError(f"the plan is damaged: two stages of a rank store {held.value.name} differently")
    return layouts


def given_alike(found: ResolvedPipeline) -> dict[str, Layout]:
    """How each input of the whole program may be passed to all stages: split if the stages that read it split it alike.

    An input that no stage reads is split in its first dim like another one of that size.
    """
    given: dict[str, Layout] = {}
    samples: dict[Shape, Layout] = {}  # by the size of the first dim
    for value in found.step.program.inputs:
        if having := [one.assignment.given[value.name] for one in found.resolved if value in one.program.inputs]:
            states = zip(*having, strict=True)
            given[value.name] = tuple(first if all(state == first for state in others) else I for first, *others in states)
            first = tuple(state if state.kind == "S" and state.dim == 0 else I for state in given[value.name])
            samples.setdefault(value.shape[:1], first)
    whole = (I,) * len(found.resolved[0].plan.sizes)
    return {v.name: given.get(v.name, samples.get(v.shape[:1], whole)) for v in found.step.program.inputs}


def _at_least(found: ResolvedPipeline, name: str, layout: Layout) -> str:
    """The constraint to split an input at least as this layout does."""
    line = text(layout, found.step.program.values[name].shape, found.resolved[0].plan.sizes)
    return ", ".join("*" if state == "I" else state for state in line.split(", "))


def check_stored(found: ResolvedPipeline, other: ResolvedPipeline) -> None:
    """Raise PlanError unless the same ranks store the same tensors in the same layouts under both plans."""
    own = stored_by_rank(found)
    for rank, known in stored_by_rank(other).items():
        for name, layout in known.items():
            if own[rank].get(name) != layout:
                raise _other(f"its stages need {name} on rank {rank} of the pipeline, which does not store it so")


def _starts(found: ResolvedPipeline, program: Program) -> tuple[int, ...]:
    """Where stages begin in another program: at the regions that contain their first ops."""
    again = made_again(program)
    place = {op.name: number for number, stage in enumerate(found.stages) for op in stage.program.ops if op.name not in again}
    starts, first = fine_starts(program), dict[int, int]()
    for at, op in enumerate(program.ops):
        if op.name in place:
            first.setdefault(place[op.name], starts[bisect_right(starts, at) - 1])
    if lost := [stage for stage in range(len(found.stages)) if stage not in first]:
        raise _other(f"it has no operator of stage {lost[0]}")
    return (0, *(start for stage, start in sorted(first.items()) if stage))


def _other(why: str) -> PlanError:
    return PlanError(
        "the model in its other mode (training or evaluation) cannot be cut into stages over the stored tensors",
        why=why,
        fix="parallelize it in that mode too, and load its state dict there",
    )


__all__ = ["check_stored", "given_alike", "planned_alike", "stored_by_rank"]
