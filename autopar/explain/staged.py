"""Explains a plan in pipeline stages: its report, answers by stage, the timeline of its schedule, and its code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import AutoparError, InputError
from autopar.explain.code import code_of
from autopar.explain.report import report
from autopar.explain.why import Why, why, why_parts
from autopar.explain.whynot import WhyNot
from autopar.formulation.read_solution import assignment
from autopar.ir.device import Seconds
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.plan.options import Options
from autopar.plan.pipeline import Pipeline
from autopar.plan.plan import Plan
from autopar.plan.resolved import ResolvedPlan
from autopar.plan.text import Part, plain
from autopar.planning.optimize import Optimized
from autopar.planning.pipeline_plan import StagedStep
from autopar.planning.pipeline_search import plan_pipeline
from autopar.planning.stage_plans import StagePlanner
from autopar.search_space.constraints import constrained
from autopar.simulator.schedule_trace import schedule_trace

StageWhy = tuple[int, Why]  # a stage, and what is chosen in it


@dataclass(frozen=True, kw_only=True)
class StagedExplanation:
    """A model planned in stages, with the answers to questions about its plan; prints as the whole report.

    `program` is that of the whole batch, `mesh` the mesh planned for, `solved` the solution of each stage, `made` the resolved
    plan, from `planner`.
    """

    plan: Plan
    program: Program
    mesh: Mesh
    options: Options
    solved: tuple[Optimized, ...]
    made: StagedStep
    planner: StagePlanner

    @property
    def trace(self) -> str:
        """The timeline of the schedule as JSON for https://ui.perfetto.dev."""
        return trace_of(self.plan)

    @property
    def code(self) -> str:
        """The emitted code of every stage, as the first rank of each runs it."""
        return "\n\n".join(f"# {self.title(place)}\n{self._code(place)}" for place in range(len(self.solved)))

    def title(self, stage: int) -> str:
        """A stage in words."""
        assert self.plan.pipeline is not None, "the plan has stages"
        return self.plan.pipeline.title(stage)

    def _code(self, place: int) -> str:
        formulated, solution = self.solved[place].formulated, self.solved[place].solution
        chosen = assignment(formulated, solution)
        return code_of(ResolvedPlan(plan=self.plan.stages[place], analysis=formulated.analysis, assignment=chosen))

    def why(self, name: str) -> list[StageWhy]:
        """The candidates of the operators and tensors that a name matches, by stage.

        Raises InputError if it matches nothing in any stage.
        """
        found: list[StageWhy] = []
        refused: list[InputError] = []
        for place, solved in enumerate(self.solved):
            try:
                found += [(place, answer) for answer in why(solved, name)]
            except InputError as error:
                refused.append(error)
        if not found:
            raise next((error for error in refused if error.details.get("close")), refused[0])
        return found

    def why_not(self, forced: Mapping[str, str]) -> WhyNot:
        """The best plan with these layouts forced; raises ConstraintError for a name that matches nothing."""
        assert self.plan.pipeline is not None, "the plan has stages"
        formulated = self.solved[0].formulated
        constrained(replace(formulated.analysis.step, program=self.program, loop=None, stage=None), formulated.mesh, forced)
        both = replace(self.options, constraints={**self.options.constraints, **forced})
        try:
            return WhyNot(forced=forced, plan=plan_pipeline(self.program, self.mesh, both))
        except AutoparError as error:
            return WhyNot(forced=forced, plan=None, error=error)

    def parts(self) -> Iterator[Part]:
        """The report."""
        return report(self.plan)

    def __str__(self) -> str:
        return plain(self.parts())


def trace_of(plan: Plan) -> str:
    """The timeline of the schedule of a plan in stages, as JSON."""
    found = plan.pipeline
    assert found is not None, "the plan has stages"
    return schedule_trace(found.timeline, once_of(found), found.axis)


def once_of(pipeline: Pipeline) -> list[Seconds]:
    """The seconds that each rank of a pipeline takes once, at the end of a step: the optimizer, sums of gradients."""
    once = [0.0] * len(pipeline.order.ranks)
    for stage, rank in pipeline.order.rank_of.items():
        once[rank] += pipeline.seconds[stage].once
    return once


def staged_why_parts(found: StagedExplanation, answers: Sequence[StageWhy]) -> Iterator[Part]:
    """The printed answers, each stage under its name."""
    for number, place in enumerate(dict.fromkeys(stage for stage, _ in answers)):
        yield from ("",) * (number > 0)
        yield found.title(place)
        yield from why_parts(found.solved[place], [answer for stage, answer in answers if stage == place])


__all__ = ["StageWhy", "StagedExplanation", "once_of", "staged_why_parts", "trace_of"]
