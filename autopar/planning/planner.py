"""Planning: from a model and a mesh to a `Plan`.

capture -> passes -> the best variant of the program (`plan_search`), each solved by `optimize` -> plan
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopar.analysis.analysis import Analysis
from autopar.capture import Captured, capture
from autopar.cost_models import catalog
from autopar.cost_models.links import LINKS, connect, merged
from autopar.errors import PlanError
from autopar.formulation.cost_breakdown import account
from autopar.formulation.prices import Prices
from autopar.formulation.read_solution import assignment
from autopar.formulation.step_collectives import messages
from autopar.formulation.step_time import hidden_time, step_events
from autopar.ir.device import Seconds
from autopar.ir.dynamic_dims import InputDim, Size, declared
from autopar.ir.mesh import AutoMesh, Mesh
from autopar.ir.program import Program
from autopar.passes import normalise
from autopar.passes.broadcast_attention import grouped
from autopar.passes.precision import DTYPES, MIXED, mixed, received, stored
from autopar.plan.assignment_text import describe, paddings
from autopar.plan.breakdown import BUDGET, CostParameter
from autopar.plan.budget import parse_bytes
from autopar.plan.options import AUTO, PLENTY, Options
from autopar.plan.plan import Collective, Plan
from autopar.plan.resolved import ResolvedPlan
from autopar.planning.dtype_checks import refuse_dtypes
from autopar.planning.memories import with_memories
from autopar.planning.mesh_shapes import connected_shapes
from autopar.planning.no_plan import explaining
from autopar.planning.optimize import Optimized, Stop, sent_seconds
from autopar.planning.plan_search import best_shape, best_variant, limited
from autopar.planning.respecialize import varied
from autopar.search_space.assignment import Assignment
from autopar.simulator.figures import figures
from autopar.simulator.instructions import simulated
from autopar.simulator.timeline import Transmission
from autopar.solver.settings import DEFAULTS

MOST_AXES = 3  # that are planned as they are
UNASKED = Options()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with its assignment, the captured program of the whole batch, its solution, and the seconds of each phase."""

    resolved: ResolvedPlan
    captured: Captured
    solved: Optimized
    phases: Mapping[str, float]

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return self.resolved.plan


class _Clock:
    """Seconds per phase; `tell` is called at the end of each."""

    def __init__(self, tell: Stop) -> None:
        self.phases: dict[str, float] = {}
        self._tell = tell
        self._last = time.perf_counter()

    def stop(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last = now
        self._tell(phase)


def make_plan(
    model: nn.Module, sample_input: object, mesh: object, options: Options, stop: Stop = lambda phase: None
) -> Planned:
    """Capture a model and plan it; see `autopar.plan`. `stop` is called at the end of each phase."""
    clock, settings = _Clock(stop), limited(DEFAULTS, options)
    captured = read_program(model, sample_input, options)
    sizes = declared(options.dynamic, captured.signature.shapes)
    clock.stop("capture")
    with settings.deadline.heard():
        found = best_shape(captured.program, connected_meshes(mesh, options, captured.program), options, clock.stop, settings)
    resolved = with_dynamic_sizes(resolved_plan(found, options), sizes, model, sample_input)
    clock.stop("write")
    return Planned(resolved=resolved, captured=captured, solved=found, phases=clock.phases)


def read_program(
    model: nn.Module,
    sample_input: object,
    options: Options = UNASKED,
    places: Mapping[InputDim, int] | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> Captured:
    """Capture a model and convert its program to the form for planning, in the requested precision.

    The options say how: `mode`, `precision`, `reduce`, `static` and `assume`. `places` are dims of the sample that get another
    size, `buffers` the values of a meta model's buffers.
    """
    dtype = stored(options.precision, options.reduce)
    captured = capture(model, sample_input, dtype, places, replace(options.assumptions, buffers=buffers or {}))
    program = normalise(captured.program)
    if options.precision in MIXED:
        program = mixed(program, DTYPES[options.reduce] if options.reduce else None, MIXED[options.precision])
    program = grouped(program)
    refuse_dtypes(program, options.precision)
    if dtype is not None:
        program = received(program, {planned.path: planned.dtype for planned in captured.signature.tensors})
    return replace(captured, program=program)


def with_dynamic_sizes(resolved: ResolvedPlan, sizes: Sequence[Size], model: nn.Module, sample_input: object) -> ResolvedPlan:
    """The plan of a model with its dynamic sizes.

    Raises CaptureError if the model is another program at other sizes.
    """
    return varied(resolved, sizes, at_sizes(resolved.plan, model, sample_input))


def at_sizes(plan: Plan, model: nn.Module, sample_input: object) -> Callable[[dict[InputDim, int]], Program]:
    """A function that captures the planned model at other sizes."""
    asked = Options().under(plan)
    return lambda places: read_program(model, sample_input, asked, places).program


def connected_meshes(mesh: object, options: Options, program: Program) -> tuple[Mesh, ...]:
    """The mesh with its device and links, or all shapes of an open mesh."""
    if isinstance(mesh, AutoMesh):
        return connected_shapes(mesh, options, len(program.ops))
    return (connected_mesh(mesh, options),)


def connected_mesh(mesh: object, options: Options, plan: Plan | None = None) -> Mesh:
    """The mesh with its device and links, the mesh's own where it has them; its axes are those of `plan` if there is one.

    Many axes are merged into a few: the ways to split an operator are a product over axes, and each further axis makes planning
    five to nine times slower. Constraints and strategies refer to individual axes: with them all axes stay.
    """
    found = Mesh.of(mesh).devices if plan is not None else Mesh.of(mesh)
    wanted = options.device if options.device is not None else found.device
    device = replace(catalog.device(wanted, processes=found.size), compiled=options.compiled)
    if plan is not None:
        found = planned_mesh(plan, found).devices
    elif len(found.sizes) > MOST_AXES and options.strategy == AUTO and not (_names_axes(options) or options.constraints):
        found = merged(found, device)
    if plan is not None:
        return _with_memories_of(plan, connect(found, device))
    return with_memories(connect(found, device if options.offload else replace(device, host=None)), options)


def _with_memories_of(plan: Plan, mesh: Mesh) -> Mesh:
    """A mesh with a plan's memory axis, if it has one, over the plan's link: storage places are already decided."""
    if not plan.mesh.has_memories:
        return mesh
    assert mesh.device is not None, "it is connected"
    device, link = mesh.device, mesh.device.host or LINKS.get(plan.links[-1], LINKS["pcie3"])
    host = {"host": link, "host_memory": PLENTY, "host_bandwidth": device.host_bandwidth or device.bandwidth}
    host["disk"] = replace(device.disk or catalog.ANY_DISK, memory=PLENTY)
    return replace(mesh.with_memories(link), device=replace(device, **host))  # type: ignore[arg-type]


def _names_axes(options: Options) -> bool:
    """Whether an axis has the stages of a pipeline."""
    return options.pipeline not in (None, AUTO)


def planned_mesh(plan: Plan, mesh: Mesh) -> Mesh:
    """The mesh with its plan's axes: some may be merged, or the outermost cut for pipeline stages.

    Raises PlanError if it was made for another mesh.
    """
    if plan.mesh.has_memories:
        found = planned_mesh(replace(plan, axes=plan.axes[:-1], sizes=plan.sizes[:-1]), mesh.devices)
        return mesh if mesh.has_memories else found.with_memories(None)
    if (plan.axes, plan.sizes) == (mesh.axes, mesh.sizes):
        return mesh
    planned = Mesh(axes=plan.axes, sizes=plan.sizes, device=mesh.device)
    if not (planned.merges(mesh) or planned.joined.merges(mesh)):
        raise PlanError(
            "the plan was made for another mesh",
            plan=plan.mesh,
            mesh=mesh,
            fix="plan again for this mesh; a plan holds the size of every axis",
        )
    return planned


def stored_layouts(plan: Plan, program: Program) -> dict[str, str]:
    """The layouts in which a plan stores another program's tensors, by name."""
    names = (stored.value.name for stored in (*program.parameters, *program.buffers) if stored.used)
    return {name: plan.layouts[name] for name in names}


def plan_program(program: Program, mesh: Mesh, options: Options, stop: Stop = lambda phase: None) -> Plan:
    """The plan of a captured program on a mesh with device and links."""
    return resolve_program(program, mesh, options, stop).plan


def resolve_program(program: Program, mesh: Mesh, options: Options, stop: Stop = lambda phase: None) -> ResolvedPlan:
    """The plan of a captured program on a mesh with device and links, with its analysis and assignment."""
    with explaining():
        found = resolved_plan(best_variant(program, mesh, options, stop), options)
    stop("write")
    return found


def resolved_plan(found: Optimized, options: Options, chosen: Assignment | None = None) -> ResolvedPlan:
    """The plan of a solution, or of `chosen`, which has another recomputation, with its analysis and assignment."""
    chosen = chosen or assignment(found.formulated, found.solution)
    plan = to_plan(found, options, chosen)
    return ResolvedPlan(plan=plan, analysis=found.formulated.analysis, assignment=chosen)


def to_plan(found: Optimized, options: Options, chosen: Assignment | None = None, *, alike: Plan | None = None) -> Plan:
    """The plan of a solution as text with its cost breakdown, or of `chosen`, which has another recomputation.

    With a plan `alike`, of the same solution under other names, the step is not simulated again.
    """
    formulated, solution = found.formulated, found.solution
    program, mesh, analysis = formulated.program, formulated.mesh, formulated.analysis
    chosen = chosen or assignment(formulated, solution)
    choices, layouts, routes, recompute = describe(program, chosen, analysis.fits, mesh.sizes)
    prices = formulated.step_prices
    events = step_events(found.memory_model.liveness.schedule(chosen), prices)
    said = "90% of the device's memory" if options.budget is None else "asked for"
    limit = CostParameter(of=BUDGET, name="memory", value=parse_bytes(options.budget, mesh), unit="B", source=said)
    hidden = hidden_time(events, prices, once=chosen.once)
    seconds = sum(event.seconds for event in events) - hidden
    counted = seconds + sent_seconds(formulated, chosen)
    if alike is None:
        timeline = simulated(found.memory_model.liveness, prices, chosen)
        collectives = list(collectives_of(analysis, chosen, prices.prices, timeline.sent))
        step = figures(timeline, prices, chosen)
    else:
        own = collectives_of(analysis, chosen, prices.prices)
        collectives = [replace(one, exposed=known.exposed) for one, known in zip(own, alike.collectives, strict=True)]
        step = alike.breakdown.simulated
    return Plan(
        hash=analysis.step.hash,
        axes=mesh.axes,
        sizes=mesh.sizes,
        links=tuple(link.name for link in mesh.links),
        device=mesh.device.name if mesh.device else "",
        options=options.text(),
        microbatches=analysis.step.microbatches,
        status=solution.status,
        gap=max(0.0, counted - solution.bound) / counted if counted else 0.0,
        step_time=seconds,
        peak_memory=round(float(found.memory_model.liveness.walk(chosen).max())),
        collectives=tuple(collectives),
        choices=choices,
        layouts=layouts,
        routes=routes,
        recompute=recompute,
        once=chosen.once,
        searched="; ".join(_searched(found, options)),
        padded=paddings(analysis.step),
        breakdown=account(found.memory_model, chosen, events, hidden, limit, step),
    )


def _searched(found: Optimized, options: Options) -> Iterator[str]:
    """A plan's notes on its search."""
    if len(found.shapes) > 1:
        yield f"the fastest of {len(found.shapes)} shapes of the mesh: {', '.join(found.shapes)}"
    if found.stopped:
        yield f"until {found.stopped}"
    if found.decided:
        yield found.decided


def collectives_of(
    analysis: Analysis, chosen: Assignment, prices: Prices, sent: Iterable[Transmission] = ()
) -> Iterator[Collective]:
    """Every collective of one step, forward and backward; the weights of a bucket travel in one.

    `sent` are those of a simulated step, with their exposed time.
    """
    exposed: dict[object, list[Seconds]] = defaultdict(list)
    for one in sent:
        exposed[one.transfer.message].append(one.exposed)
    for message in messages(analysis, chosen, prices):
        name, *more = message.values
        yield Collective(
            value=name,
            more=tuple(more),
            axis=prices.mesh.name_of(prices.mesh.axes_over(message.axis)),
            kind=message.kind,
            bytes=message.bytes,
            where=message.where,
            seconds=message.seconds,
            exposed=exposed[message].pop() if exposed[message] else 0.0,
        )
