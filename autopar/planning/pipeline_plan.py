"""Plans with a pipeline: the program is cut, each stage planned on the mesh without the pipeline's axis, the step timed.

micro-batches -> cut -> stage 0 planned, as any program; what it sends keeps the layout that its plan leaves it in
                        stage 1 planned, which receives that; ...                     -> exact clock -> plan
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape

from torch import nn

from autopar.errors import BudgetError, ConstraintError
from autopar.formulation.read_solution import assignment
from autopar.formulation.step_time import hidden_time, step_events
from autopar.ir.layout import Layout, local_shape, text
from autopar.ir.mesh import Bytes, Link, Mesh, Seconds
from autopar.ir.program import Program, elements
from autopar.ir.training_step import TrainingStep
from autopar.memory.schedule import at
from autopar.passes.microbatches import microbatches
from autopar.passes.stages import shared_parameters
from autopar.pipeline.clock import Clock, StageSeconds
from autopar.plan.breakdown import CostParameter
from autopar.plan.budget import parse_bytes
from autopar.plan.options import AUTO, Options
from autopar.plan.pipeline import Crossing, Pipeline, in_flight
from autopar.plan.plan import Plan
from autopar.plan.stages import StageSteps, differentiated, loss_of
from autopar.plan.text import size_text
from autopar.planning.model_checks import without_rule
from autopar.planning.optimize import Optimized, analysed, solved
from autopar.planning.pipeline_stages import Cut, chosen_cut, without_axis
from autopar.planning.planner import connected_mesh, read_program, to_plan
from autopar.search_space.strategies import constrained, targets

TRIES = 4  # smaller budgets for a stage of which several micro-batches in flight are too much


def make_pipeline_plan(model: nn.Module, sample_input: object, mesh: object, options: Options) -> Plan:
    """Capture a model and plan it in stages; see `autopar.plan`."""
    captured = read_program(model, sample_input, options.precision, options.reduce)
    return plan_pipeline(captured.program, connected_mesh(mesh, options), options)


def plan_pipeline(program: Program, mesh: Mesh, options: Options) -> Plan:
    """The plan of a captured program in stages, on a mesh with device and links.

    Raises what planning raises, and ConstraintError or MeshError for stages, a schedule or an axis that there are not.
    """
    axis = _asked(options)
    spatial = without_axis(mesh, axis)
    if any(value.requires_grad for value in program.inputs):
        raise ConstraintError("a pipeline computes no gradients of inputs", fix="a sample whose tensors require none")
    assert isinstance(options.microbatches, int)
    step = microbatches(program, options.microbatches)
    loss = loss_of(step.program)
    cut = chosen_cut(step.program, mesh, axis, options, options.microbatches)
    steps = StageSteps(step, cut.starts)
    found = list(_planned(steps, spatial, cut, options))
    return _assembled(steps, mesh, axis, cut, found, differentiated(step.program, loss), options)


def _asked(options: Options) -> str:
    """The axis of the pipeline; raises ConstraintError for options that a pipeline does not have."""
    if not isinstance(options.pipeline, str) or options.pipeline == AUTO:
        what = f"pipeline={options.pipeline!r} is not the name of a mesh axis"
        raise ConstraintError(what, fix="the axis that has the stages: no axis is chosen by itself yet")
    if options.dynamic:
        raise ConstraintError("a pipeline has no sizes that vary yet", fix="drop dynamic= or pipeline=")
    if isinstance(options.microbatches, bool) or not isinstance(options.microbatches, int):
        what = f"microbatches={options.microbatches!r} is not a number, and a pipeline chooses none yet"
        raise ConstraintError(
            what, fix="how many micro-batches a step has: a multiple of the pipeline's ranks, and more is faster"
        )
    return options.pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A planned stage: its plan and layouts, what it takes of the step, and bytes that each micro-batch in flight holds."""

    plan: Plan
    step: TrainingStep
    outputs: Mapping[str, Layout]
    seconds: StageSeconds
    held: Bytes


def _planned(steps: StageSteps, mesh: Mesh, cut: Cut, options: Options) -> Iterator[_Stage]:
    """Plan one stage after the other: what the one before sends it receives, and what they share it stores alike."""
    constrained(steps.step, mesh, options.constraints)  # which raises for what is in no stage
    wanted = _by_value(steps.step.program, options.constraints)
    shared, chunks = shared_parameters(steps.stages), len(steps.stages) // len(cut.schedule.ranks)
    limit = parse_bytes(options.budget, mesh) // chunks
    layouts: Mapping[str, Layout] = {}
    whole = ", ".join(["I"] * len(mesh.sizes))
    alike = {buffer.value.name: whole for buffer in steps.step.program.buffers if buffer.value.name in steps.hoisting}
    for place in range(len(steps.stages)):
        step = steps.made(place, layouts)
        names = step.program.values.keys() - step.received.keys()
        of_stage = {escape(name): line for name, line in (wanted | alike).items() if name in names}
        own = replace(options, pipeline=None, constraints=of_stage, budget=options.budget if chunks == 1 else limit)
        made = _within(step, mesh, own, limit, in_flight(cut.schedule, place), place)
        yield made
        layouts = made.outputs
        alike |= {name: made.plan.layouts[name] for name, places in shared.items() if place in places}


def _by_value(program: Program, constraints: Mapping[str, str]) -> dict[str, str]:
    """The constraints with the names of values in the place of globs."""
    known = list(targets(program)) if constraints else []
    return {value: line for glob, line in constraints.items() for name, value in known if fnmatchcase(name, glob)}


def _within(step: TrainingStep, mesh: Mesh, options: Options, limit: Bytes, flights: int, place: int) -> _Stage:
    """A stage planned so that it fits with all micro-batches that are in flight.

    Raises BudgetError, which names the stage, if there is no such plan.
    """
    asked, budget = options, limit
    for _ in range(TRIES):
        try:
            made = _solved(step, mesh, asked, flights)
        except BudgetError as error:
            details = {**error.details, "stage": place, "in flight": flights}
            raise BudgetError(f"stage {place} of the pipeline: {error.what}", **details) from error
        over = made.plan.peak_memory - limit
        if over <= 0:
            return replace(made, plan=replace(made.plan, options=options.text()))
        budget = max(1, min(budget - over, limit - (flights - 1) * made.held))
        asked = replace(options, budget=budget)
    raise BudgetError(
        f"no plan of stage {place} of the pipeline fits into {size_text(limit)} with {flights} micro-batches in flight",
        least=size_text(made.plan.peak_memory),
        fix="more micro-batches of fewer samples, more stages, or the schedule 1f1b in the place of gpipe",
    )


def _solved(step: TrainingStep, mesh: Mesh, options: Options, flights: int) -> _Stage:
    analysis = analysed(step, mesh, options)
    without_rule(analysis, strict=options.strict)
    found = solved(analysis, mesh, options)
    chosen = assignment(found.formulated, found.solution)
    plan = to_plan(found, options, chosen)
    held = _held(found)
    return _Stage(
        plan=replace(plan, peak_memory=plan.peak_memory + (flights - 1) * held),
        step=step,
        outputs=chosen.outputs,
        seconds=_seconds(found),
        held=held,
    )


def _held(found: Optimized) -> Bytes:
    """Bytes that one micro-batch holds between its forward and its backward."""
    chosen = assignment(found.formulated, found.solution)
    liveness, weights = found.memory_model.liveness, found.formulated.analysis.weights
    turn = at(liveness.count, 0)
    return sum(
        life.bytes
        for life in liveness.lives(chosen)
        if life.kind in ("kept", "internal") and life.start <= turn <= life.stop and life.name not in weights
    )


def _seconds(found: Optimized) -> StageSeconds:
    """What a stage takes for one micro-batch, and once a step."""
    chosen, prices = assignment(found.formulated, found.solution), found.formulated.step_prices
    events = step_events(found.memory_model.liveness.schedule(chosen), prices)
    total, runs = sum(event.seconds for event in events), found.formulated.analysis.step.microbatches
    shown = 1 - hidden_time(events, prices, once=chosen.once) / total if total else 1.0
    parts: dict[str, Seconds] = {"forward": 0.0, "backward": 0.0, "once": 0.0}
    for event in events:
        once = event.kind == "optimizer" or (event.message is not None and event.message.once)
        parts["once" if once else "forward" if event.phase == "forward" else "backward"] += shown * event.seconds
    return StageSeconds(forward=parts["forward"] / runs, backward_input=parts["backward"] / runs, once=parts["once"])


def _assembled(
    steps: StageSteps, mesh: Mesh, axis: str, cut: Cut, found: Sequence[_Stage], back: frozenset[str], options: Options
) -> Plan:
    """The plan of the whole: the step by the clock, the memory of the fullest rank."""
    crossings = tuple(_crossings(found, mesh, axis, back))
    link = mesh.links[mesh.axes.index(axis)]
    seconds = tuple(_with_messages(place, one, crossings, link) for place, one in enumerate(found))
    pipeline = Pipeline(
        axis=axis,
        schedule=cut.name,
        ranks=tuple(str(cut.schedule).splitlines()),
        starts=cut.starts,
        modules=cut.modules,
        seconds=seconds,
        crossings=crossings,
        tied=shared_parameters(steps.stages),
    )
    slowest = max(found, key=lambda one: one.plan.step_time).plan
    ranks: dict[int, Bytes] = {}
    for stage, rank in cut.schedule.rank_of.items():
        ranks[rank] = ranks.get(rank, 0) + found[stage].plan.peak_memory
    return Plan(
        hash=steps.step.hash,
        axes=mesh.axes,
        sizes=mesh.sizes,
        links=tuple(link.name for link in mesh.links),
        device=mesh.device.name if mesh.device else "",
        options=options.text(),
        microbatches=steps.step.microbatches,
        status="feasible",
        gap=1.0,
        step_time=Clock(cut.schedule).seconds(seconds),
        peak_memory=max(ranks.values()),
        choices={},
        layouts={},
        routes={},
        recompute={},
        padded={},
        collectives=(),
        breakdown=replace(
            slowest.breakdown,
            cost_parameters=(
                CostParameter(of=axis, name="bandwidth", value=link.bandwidth, unit="B/s", source=link.source),
                CostParameter(of=axis, name="latency", value=link.latency, unit="s", source=link.source),
                *(parameter for parameter in slowest.breakdown.cost_parameters if parameter.of != axis),
            ),
            runs={},
            stored={},
        ),
        pipeline=pipeline,
        stages=tuple(one.plan for one in found),
    )


def _crossings(found: Sequence[_Stage], mesh: Mesh, axis: str, back: frozenset[str]) -> Iterator[Crossing]:
    """What each stage sends to the next for one micro-batch."""
    sizes = without_axis(mesh, axis).sizes
    for place, one in enumerate(found[:-1]):
        for output in one.step.program.outputs:
            value, layout = one.step.program.values[output.value], one.outputs[output.path]
            size = elements(local_shape(value.shape, layout, sizes)) * value.dtype.itemsize
            said = text(layout, value.shape, sizes)
            yield Crossing(value=value.name, stage=place, layout=said, bytes=size, gradient=value.name in back)


def _with_messages(place: int, one: _Stage, crossings: Sequence[Crossing], link: Link) -> StageSeconds:
    """The seconds of a stage with those of its messages: each value is one, over the link of the pipeline's axis."""

    def sent(chosen: list[Crossing]) -> Seconds:
        return sum(link.latency + crossing.bytes / link.bandwidth for crossing in chosen)

    there = sent([crossing for crossing in crossings if crossing.stage == place])
    back = sent([crossing for crossing in crossings if crossing.stage == place - 1 and crossing.gradient])
    return replace(one.seconds, activations=there, gradients=back)


__all__ = ["make_pipeline_plan", "plan_pipeline"]
