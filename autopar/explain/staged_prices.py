"""Plans a pipeline's stages again for other budgets and other prices, keeping cuts and schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.cost_models.cost_model import CostModel
from autopar.cost_models.scaled import ScaledCostModel
from autopar.errors import BudgetError
from autopar.explain.budget_sweep import MARGIN, SweepStep, budgets_between, step_within
from autopar.explain.sensitivity import SCENARIOS, Sensitivity
from autopar.explain.staged import StagedExplanation
from autopar.formulation.prices import Prices
from autopar.formulation.step_time import StepPrices
from autopar.ir.device import Bytes, Link, Seconds
from autopar.ir.mesh import Mesh
from autopar.pipeline.clock import Clock, StageSeconds
from autopar.plan.options import PLENTY
from autopar.plan.plan import Plan
from autopar.planning.no_plan import SMALLEST
from autopar.planning.optimize import Optimized
from autopar.planning.pipeline_plan import StagedStep, staged, with_messages, written
from autopar.planning.stage_plans import StagePlanner, stage_seconds


def staged_budget_sweep(found: StagedExplanation) -> Iterator[SweepStep]:
    """Plan the same stages within less and less memory until one has no plan; then within 1% more than the smallest budget that
    this stage, or the next one without a plan there, asks for.
    """
    free = _within(found, PLENTY)
    yield step_within(free.peak_memory, free)
    try:
        for budget in budgets_between(0.0, free.peak_memory):
            yield step_within(budget, _within(found, budget))
    except BudgetError as error:
        last = _last(found, error)
        yield from () if last is None else (step_within(*last),)


def _last(found: StagedExplanation, error: BudgetError) -> tuple[Bytes, Plan] | None:
    """The smallest budget that a stage asks for, and the plan within it."""
    for _ in found.solved:
        budget = round(MARGIN * int(str(error.details[SMALLEST]).removeprefix("budget=")))
        try:
            return budget, _within(found, budget)
        except BudgetError as other:
            error = other
    return None


def _within(found: StagedExplanation, budget: Bytes) -> Plan:
    """The plan of the same stages within a budget per device."""
    old = found.planner
    planner = StagePlanner(old.mesh, old.link, replace(old.options, budget=budget), old.settings, waiting=old.waiting)
    return written(_staged(found.made, found.made.mesh, planner), planner, planner.options, "")


def _staged(made: StagedStep, mesh: Mesh, planner: StagePlanner) -> StagedStep:
    """The cuts and schedule of a plan with the stages of another planner."""
    return staged(made.steps, mesh, made.axis, made.cut, planner)


def staged_sensitivity(found: StagedExplanation) -> Iterator[Sensitivity]:
    """The plan and the best one with the same stages, in each of `SCENARIOS`, which include links between stages."""
    made, old = found.made, found.planner
    at = made.mesh.axes.index(made.axis)
    for what, speed in SCENARIOS:
        model, faster = ScaledCostModel(old.options.cost_model, **{what: speed}), speed if what == "links" else 1.0
        link = old.link.faster(faster)
        links = (*made.mesh.links[:at], link, *made.mesh.links[at + 1 :])
        planner = StagePlanner(old.mesh, link, replace(old.options, cost_model=model), old.settings, waiting=old.waiting)
        own = _seconds(found, link, model)
        best = min(own, _staged(made, replace(made.mesh, links=links), planner).seconds)
        yield Sensitivity(what=what, speed=speed, step_time=own, best=best, bound=None)


def _seconds(found: StagedExplanation, link: Link, model: CostModel) -> Seconds:
    """The step of the unchanged plan at other prices."""

    def of_stage(one: Optimized) -> StageSeconds:
        prices = Prices(mesh=found.planner.mesh, optimizer=one.optimizer, model=model)
        return stage_seconds(one, StepPrices(one.formulated.analysis, prices))

    stages = [of_stage(one) for one in found.solved]
    return Clock(found.made.cut.schedule).seconds(with_messages(stages, found.made.crossings, link))


__all__ = ["staged_budget_sweep", "staged_sensitivity"]
