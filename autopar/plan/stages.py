"""The stages of a pipeline as training steps of their own, with their resolved plans."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.analysis.analysis import analyse
from autopar.analysis.fits import fit_of
from autopar.analysis.recomputability import is_random
from autopar.errors import ConstraintError, PlanError
from autopar.ir.layout import I, Layout, Shape, text
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.training_step import MicrobatchLoop, StageEnds, TrainingStep
from autopar.passes.dead_code_elimination import dead
from autopar.passes.microbatches import batch_of
from autopar.passes.stages import Stage, cut, shared_parameters
from autopar.plan.assignment_text import as_planned, check_step, resolve
from autopar.plan.pipeline import Crossing, Pipeline
from autopar.plan.plan import Plan
from autopar.plan.resolved import ResolvedPlan, read_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPipeline:
    """A plan with a pipeline, the step of the whole program, and each stage with its plan and assignment."""

    plan: Plan
    step: TrainingStep
    stages: tuple[Stage, ...]
    resolved: tuple[ResolvedPlan, ...]


class StageSteps:
    """Makes the steps of the stages one after the other: each is given what it receives, and in which layouts."""

    def __init__(self, step: TrainingStep, starts: Sequence[int]) -> None:
        hoisted, program = step.loop.hoisted if step.loop else None, step.program
        self.step, self.stages = step, cut(program, starts, hoisted)
        self._random = {op.name for op in program.ops if is_random(op, fit_of(program, op.name))}
        self.hoisting = {name for op in (hoisted.ops if hoisted else ()) for name in op.operands}

    def made(self, place: int, layouts: Mapping[str, Layout], flights: int = 1, repeats: int = 1) -> TrainingStep:
        """The step of a stage, given the layouts in which the previous one sends, the number of micro-batches in flight, and
        the number that prices assume for all of them.
        """
        stage, last = self.stages[place], place == len(self.stages) - 1
        before = (op.name for earlier in self.stages[:place] for op in earlier.program.ops)
        ends = StageEnds(
            received=tuple((name, layouts[name]) for name in stage.received),
            sends=not last,
            batch=batch_of(self.step.program),
            random_ops=sum(name in self._random for name in before),
            flights=flights,
            repeats=repeats,
        )
        loop, padding = self._loop(stage.program), self._padding(stage.program, last=last)
        return TrainingStep(program=stage.program, loop=loop, padding=padding, stage=ends)

    def _padding(self, program: Program, *, last: bool) -> tuple[tuple[str, Shape], ...]:
        """The padding of parameters, and of the last stage's outputs: values sent between stages keep their padding."""
        ends = {held.value.name for held in program.parameters} | {output.value for output in program.outputs if last}
        return tuple((name, shape) for name, shape in self.step.padding if name in ends)

    def _loop(self, program: Program) -> MicrobatchLoop | None:
        """The loop over the micro-batches; a stage receives hoisted values like other inputs."""
        if self.step.loop is None:
            return None
        states = self.step.states
        return replace(
            self.step.loop,
            hoisted=None,
            inputs=tuple(states.get(value.name, I) for value in program.inputs),
            outputs=tuple(states.get(output.value, I) for output in program.outputs),
        )


def hoisting(step: TrainingStep, read: Collection[str]) -> MicrobatchLoop | None:
    """A step's loop, if it has one, hoisting only these of its inputs."""
    loop = step.loop
    if loop is None or loop.hoisted is None:
        return loop
    given = len(loop.hoisted.inputs)
    kept = [number for number, value in enumerate(step.hoisted) if value.name in read]
    ends = tuple(loop.hoisted.outputs[number] for number in kept)
    inputs = (*loop.inputs[:given], *(loop.inputs[given + number] for number in kept))
    return replace(loop, hoisted=dead(replace(loop.hoisted, outputs=ends)) if kept else None, inputs=inputs)


def loss_of(program: Program) -> str:
    """The value that a step differentiates: the output named "loss", else the only scalar with a gradient.

    Raises ConstraintError if there is none.
    """
    scalars = {o.path: o.value for o in program.outputs if _is_scalar(program, o.value)}
    if len(scalars) != 1 and "loss" not in scalars:
        what = f"a pipeline needs a loss, and {len(scalars)} outputs of the model are scalars with a gradient"
        raise ConstraintError(what, fix='return the loss from forward, under the name "loss" if there are several scalars')
    return scalars["loss"] if "loss" in scalars else next(iter(scalars.values()))


def _is_scalar(program: Program, name: str) -> bool:
    value = program.values[name]
    return value.requires_grad and not value.shape


def differentiated(program: Program, loss: str) -> frozenset[str]:
    """The values through which gradients of the loss flow."""
    found = {loss}
    for op in reversed(program.ops):
        if any(result.name in found for result in op.results):
            found |= {name for name in op.operands if program.values[name].requires_grad}
    return frozenset(found)


def crossing_values(program: Program, stages: Sequence[tuple[Program, Mapping[str, Layout]]], mesh: Mesh) -> Iterator[Crossing]:
    """What each stage sends to the next for one micro-batch.

    Args:
        program: the whole one, of a micro-batch.
        stages: the program of each, and the layouts of its outputs by path.
        mesh: that of a stage, without the pipeline's axis.
    """
    back = differentiated(program, loss_of(program))
    for place, (own, outputs) in enumerate(stages[:-1]):
        for output in own.outputs:
            value, layout = own.values[output.value], outputs[output.path]
            said, size = text(layout, value.shape, mesh.sizes), value.local_bytes(layout, mesh.sizes)
            yield Crossing(value=value.name, stage=place, layout=said, bytes=size, gradient=value.name in back)


def read_pipeline(plan: Plan, program: Program, *, alike: bool = False) -> ResolvedPipeline:
    """Read the text of a plan with a pipeline for the captured program of the whole batch.

    With `alike` the program may differ from the planned one in dtypes and constants; the returned plan is for this program.

    Raises PlanError if the plan was made for another program, or if an entry of it does not fit.
    """
    pipeline = plan.pipeline
    assert pipeline is not None, "the plan has a pipeline"
    step = as_planned(plan, program)
    plan = replace(plan, hash=step.hash) if alike else plan
    check_step(plan, step)
    try:
        steps = StageSteps(step, pipeline.starts)
    except ConstraintError as error:
        raise PlanError("the plan is damaged", error=error.what, fix="make the plan again") from error
    found: list[ResolvedPlan] = []
    layouts: Mapping[str, Layout] = {}
    for place, stage in enumerate(plan.stages):
        analysis = analyse(steps.made(place, layouts, pipeline.in_flight(place)), stage.mesh)
        stage = replace(stage, hash=analysis.step.hash) if alike else stage
        assignment = resolve(stage, analysis.step, analysis.fits)
        found.append(ResolvedPlan(plan=stage, analysis=analysis, assignment=assignment))
        layouts = assignment.outputs
    _check_sent(pipeline, step.program, steps.stages, found)
    plan = replace(plan, stages=tuple(one.plan for one in found))
    return ResolvedPipeline(plan=plan, step=step, stages=steps.stages, resolved=tuple(found))


def read_any(plan: Plan, program: Program, mesh: Mesh) -> ResolvedPlan | ResolvedPipeline:
    """Read a plan, in stages or not, for the captured program of the whole batch. Raises PlanError if it is for another one."""
    return read_pipeline(plan, program) if plan.pipeline else read_plan(plan, program, mesh)


def _check_sent(pipeline: Pipeline, program: Program, stages: Sequence[Stage], found: Sequence[ResolvedPlan]) -> None:
    """Raise PlanError if a plan and its stages disagree on what they send, or on the parameters that they share."""
    known = crossing_values(program, [(one.program, one.assignment.outputs) for one in found], found[0].plan.mesh)
    sent = [{(one.value, one.stage, one.layout, one.gradient) for one in own} for own in (known, pipeline.crossings)]
    for what, wrong in (("crossings", sent[0] != sent[1]), ("tied", dict(pipeline.tied) != shared_parameters(stages))):
        if wrong:
            raise PlanError(f"the plan is damaged: its pipeline.{what} are not those of its stages", fix="make the plan again")


__all__ = [
    "ResolvedPipeline",
    "StageSteps",
    "crossing_values",
    "differentiated",
    "hoisting",
    "loss_of",
    "read_any",
    "read_pipeline",
]
