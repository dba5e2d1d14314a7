"""Explanations: a planned model, with answers to questions about its plan."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from autopar.errors import ConstraintError
from autopar.explain.code import code
from autopar.explain.comparison import Compared, compare, comparison
from autopar.explain.report import report
from autopar.explain.sensitivity import Sensitivity, sensitivity
from autopar.explain.staged import StagedExplanation
from autopar.explain.why import Why, why
from autopar.explain.whynot import WhyNot, why_not
from autopar.formulation.read_solution import assignment
from autopar.ir import dynamic_dims
from autopar.plan.keyword_options import declared, options_of
from autopar.plan.options import AUTO, Options
from autopar.plan.plan import Plan
from autopar.plan.resolved import ResolvedPlan
from autopar.plan.text import Part, plain
from autopar.planning.optimize import Stop
from autopar.planning.pipeline_search import search_pipeline
from autopar.planning.planner import Planned, at_sizes, connected_meshes, make_plan, read_program
from autopar.planning.respecialize import varied_plan
from autopar.planning.saved_plan import planned_before
from autopar.simulator.instructions import simulated
from autopar.simulator.timeline import Timeline
from autopar.simulator.trace import trace


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A planned model with the answers to questions about its plan; prints as the whole report.

    >>> import autopar, torch
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    >>> found = autopar.explain.explain(model, torch.randn(32, 64), (2, 4), device="h100")
    >>> [entry.strategy for entry in found.compared]
    ['auto', 'ddp', 'zero1', 'zero2', 'fsdp', 'hsdp', 'megatron', 'fsdp+tp', 'replicate']
    """

    planned: Planned
    options: Options

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @functools.cached_property
    def compared(self) -> list[Compared]:
        """Every named strategy for the same model, mesh and budget."""
        return compare(self.planned, self.options)

    @functools.cached_property
    def sensitivity(self) -> list[Sensitivity]:
        """What the plan loses if links or kernels are 20% faster or slower than priced; plans four times."""
        return list(sensitivity(self.planned, self.options))

    @property
    def code(self) -> str:
        """The emitted module's code, as rank 0 runs it."""
        return code(self.planned)

    @functools.cached_property
    def timeline(self) -> Timeline:
        """What the streams of a device do in a step, by the simulator."""
        solved, chosen = self.planned.solved, self.planned.resolved.assignment
        return simulated(solved.memory_model.liveness, solved.formulated.step_prices, chosen)

    @property
    def trace(self) -> str:
        """The timeline as JSON that https://ui.perfetto.dev draws."""
        plan = self.plan
        return trace(self.timeline, f"each of {plan.mesh.size} {plan.device}, plan {plan.hash}")

    def why(self, name: str) -> list[Why]:
        """The candidates of the operators and tensors that a name matches; raises InputError if it matches nothing."""
        return why(self.planned.solved, name)

    def why_not(self, forced: Mapping[str, str]) -> WhyNot:
        """The best plan with these layouts forced; raises ConstraintError for a name that matches nothing."""
        return why_not(self.planned, self.options, forced)

    def parts(self) -> Iterator[Part]:
        """The report: the sections of the plan, how long planning took, and a comparison with the named strategies."""
        yield from report(self.plan)
        yield ""
        if phases := self.planned.phases:
            each = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items())
            yield f"planned in {sum(phases.values()):.2f} s ({each})"
            yield ""
        yield from comparison(self.compared, self.plan.options["strategy"])

    def __str__(self) -> str:
        return plain(self.parts())


def explain(
    model: nn.Module,
    sample_input: object,
    mesh: object = None,
    *,
    config: Mapping[str, object] | str | Path | None = None,
    devices: int | None = None,
    plan: Plan | None = None,
    **options: object,
) -> Explanation | StagedExplanation:
    """Plan a model and explain the plan; arguments and errors are those of `autopar.plan`.

    Args:
        model: as for `autopar.plan`.
        sample_input: as there.
        mesh: as there.
        config: as there.
        devices: as there.
        plan: an existing plan for this model and sample, which is explained at current prices instead of planning; its mesh and
            options are used, and only `device`, the plan's own, may be given as well.
        **options: as there.

    Raises:
        PlanError: the plan was made for another model, sample or device, in pipeline stages, or by other rules.
        AutoparError: what `autopar.plan` raises.
    """
    if plan is not None:
        given = {"mesh": mesh, "config": config, "devices": devices} | {n: o for n, o in options.items() if n != "device"}
        if names := [name for name, value in given.items() if value is not None]:
            raise ConstraintError(f"an existing plan has its own {', '.join(names)}", fix="leave them out, or plan= out")
        return explained_before(plan, model, sample_input, options.get("device"))
    mesh, options = declared(mesh, config, devices, options)
    return explained(model, sample_input, mesh, Options(**options_of(options)))  # type: ignore[arg-type]


def explained_before(
    plan: Plan, model: nn.Module, sample_input: object, device: object = None, stop: Stop = lambda phase: None
) -> Explanation:
    """Explain an existing plan; raises as `planned_before` does."""
    planned, options = planned_before(plan, model, sample_input, device, stop)  # type: ignore[arg-type]
    return Explanation(planned=planned, options=options)


def explained(
    model: nn.Module, sample_input: object, mesh: object, options: Options, stop: Stop = lambda phase: None
) -> Explanation | StagedExplanation:
    """Explain a model's plan under these options; `stop` is called at the end of each phase of planning."""
    if options.pipeline is None:
        return Explanation(planned=make_plan(model, sample_input, mesh, options, stop), options=options)
    captured = read_program(model, sample_input, options)
    stop("capture")
    meshes = connected_meshes(mesh, options, captured.program)
    search = search_pipeline(captured.program, meshes, options)
    sizes, plan = dynamic_dims.declared(options.dynamic, captured.signature.shapes), search.plan()
    plan, without = varied_plan(plan, captured.program, sizes, at_sizes(plan, model, sample_input)), search.without
    stop("solve")
    if without is not None:
        chosen = assignment(without.formulated, without.solution)
        resolved = ResolvedPlan(plan=plan, analysis=without.formulated.analysis, assignment=chosen)
        planned = Planned(resolved=resolved, captured=captured, solved=without, phases={})
        return Explanation(planned=planned, options=replace(options, pipeline=None, microbatches=plan.microbatches))
    assert search.found is not None, "a plan that was made has stages or none"
    made, over, _ = search.found
    solved = tuple(map(over.planner.named, made.stages))
    whole = made.mesh.joined if options.pipeline == AUTO else made.mesh
    uncut = next(one for one in meshes if (one.axes, one.sizes) == (whole.axes, whole.sizes))
    return StagedExplanation(
        plan=plan, program=captured.program, mesh=uncut, options=options, solved=solved, made=made, planner=over.planner
    )
