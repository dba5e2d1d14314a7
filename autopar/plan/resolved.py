"""A plan resolved against its program: what code generation emits, and what reading a plan's text returns."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.analysis.analysis import Analysis, analyse
from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.training_step import TrainingStep
from autopar.plan.assignment_text import as_planned, resolve
from autopar.plan.plan import Plan
from autopar.search_space.assignment import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPlan:
    """A plan, the analysis of the step that it is for, and its assignment."""

    plan: Plan
    analysis: Analysis
    assignment: Assignment

    @property
    def step(self) -> TrainingStep:
        """The step that the plan is for, in micro-batches and padded."""
        return self.analysis.step

    @property
    def program(self) -> Program:
        """The program that the assignment refers to."""
        return self.analysis.program


def read_plan(plan: Plan, program: Program, mesh: Mesh) -> ResolvedPlan:
    """Read the text of a plan for the captured program of the whole batch.

    Raises PlanError if the plan was made for another program, has pipeline stages, or has an entry that does not fit.
    """
    if plan.pipeline:
        what = "the plan has a pipeline, whose stages are read one by one"
        raise PlanError(what, pipeline=plan.pipeline.axis, fix="autopar.parallelize(..., plan=plan)")
    step = as_planned(plan, program)
    analysis = analyse(step, mesh)
    return ResolvedPlan(plan=plan, analysis=analysis, assignment=resolve(plan, step, analysis.fits))
