"""Renders a plan's page from the template. All text is escaped there; names may be anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from autopar.cost_models import catalog
from autopar.cost_models.board_power import board_power
from autopar.explain.budget_sweep import SweepStep
from autopar.explain.comparison import Compared, auto_of, comparison
from autopar.explain.difference import difference
from autopar.explain.explanation import Explanation
from autopar.explain.headline import headline, waste
from autopar.explain.html.answers import PageAnswers
from autopar.explain.html.comparison_plots import scaling_plots, strategy_plots, tradeoff_plot
from autopar.explain.html.module_tree import ModuleNode, module_tree
from autopar.explain.html.palette import OF_SCHEME
from autopar.explain.html.parts import HtmlPart, converted
from autopar.explain.html.plots import PlotItem
from autopar.explain.html.step_plots import memory_plot, timeline_plot
from autopar.explain.html.streams import rank_intervals, stream_intervals
from autopar.explain.memory_curve import memory_curve
from autopar.explain.report import memory
from autopar.explain.scaling import ScalingStep
from autopar.explain.staged import StagedExplanation, once_of
from autopar.explain.why import answer_parts, why_choice
from autopar.explain.whynot import WhyNot, why_not_parts
from autopar.plan.pipeline_tables import pipeline_tables
from autopar.plan.plan import Plan
from autopar.plan.tables import time, totals
from autopar.plan.text import Part, milliseconds, size_text
from autopar.planning.optimize import Optimized

FOLDER = Path(__file__).parent
COMPONENTS = ["bokeh"]  # of BokehJS: neither widgets nor tables, nor mathematics
SHOWN = 4  # candidates of an op or a parameter
ANSWERED = 500  # ops and parameters that have candidates: with more a page would be megabytes


@dataclass(frozen=True, kw_only=True)
class ReportInput:
    """The input of a page: a plan, with its model if known, and the answers to additional questions.

    `price` is per device and hour.
    """

    plan: Plan
    found: Explanation | StagedExplanation | None = None
    sweep: Sequence[SweepStep] = ()
    scaling: Sequence[ScalingStep] = ()
    price: float | None = None
    why_not: WhyNot | None = None

    @functools.cached_property
    def compared(self) -> Sequence[Compared]:
        """The named strategies; none without the model, or with stages."""
        return self.found.compared if isinstance(self.found, Explanation) else ()


def html_page(given: ReportInput) -> str:
    """The page as one self-contained text."""
    plots = {plot.id: plot for plot in _plots(given)}
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # a model is written out where it first occurs
    environment.filters |= {"milliseconds": milliseconds, "size": size_text}
    return environment.get_template("page.html.j2").render(
        plan=given.plan,
        headline=headline(given.plan),
        waste=waste(given.plan),
        answers=PageAnswers(plan=given.plan, compared=given.compared, sweep=given.sweep, scaling=given.scaling),
        trees=[*_trees(given)],
        colors=OF_SCHEME,
        plots=plots,
        items=[plot.item for plot in plots.values()],
        parts=_parts(given),
        why_not=[*_strategies(given)],
        asked=[*converted(why_not_parts(given.plan, given.why_not))] if given.why_not else [],
        scaling=given.scaling,
        sweep=given.sweep,
        known=given.found is not None,
        bokeh=Resources(mode="inline", components=COMPONENTS, log_level="error").js_raw,
    )


def _plots(given: ReportInput) -> Iterator[PlotItem]:
    plan, found = given.plan, given.found
    if plan.pipeline:
        yield timeline_plot(rank_intervals(plan.pipeline.timeline, once_of(plan.pipeline), plan.pipeline.axis))
    if isinstance(found, Explanation):
        yield timeline_plot(stream_intervals(found.timeline))
        yield memory_plot(memory_curve(found.planned.solved.memory_model, found.planned.resolved.assignment))
    if any(entry.plan for entry in given.compared):
        yield from strategy_plots(given.compared)
    if given.compared or given.sweep:
        yield tradeoff_plot(given.compared, given.sweep)
    device = catalog.DEVICES.get(plan.device)
    yield from scaling_plots(given.scaling, given.price, board_power(device) if device else None)


def _parts(given: ReportInput) -> Mapping[str, list[HtmlPart]]:
    """The tables of the text report."""
    plan = given.plan
    stages = plan.stages or (plan,)
    found: dict[str, list[HtmlPart]] = {
        "totals": [*converted(totals(plan))],
        "pipeline": [*converted(pipeline_tables(plan, plan.pipeline))] if plan.pipeline else [],
        "strategies": [*converted(comparison(given.compared, plan.options["strategy"]))] if given.compared else [],
    }
    for name, section in (("time", time), ("memory", memory)):
        found[name] = [part for number, stage in enumerate(stages) for part in _titled(plan, number, section(stage))]
    return found


def _titled(plan: Plan, stage: int, parts: Iterator[Part]) -> Iterator[HtmlPart]:
    if plan.pipeline:
        yield plan.pipeline.title(stage)
    yield from converted(parts)


def _strategies(given: ReportInput) -> Iterator[tuple[Compared, str, list[HtmlPart]]]:
    """Why not each strategy: how it compares with auto, and what differs from the plan."""
    auto, own = auto_of(given.compared), given.plan.options["strategy"]
    for entry in given.compared:
        if entry.strategy == own:
            continue
        if entry.plan is None:
            yield entry, entry.refusal, []
            continue
        other = replace(entry.plan, options=given.plan.options)
        yield entry, entry.relative(auto), [*converted(iter(difference(given.plan, other).lines()))]


def _trees(given: ReportInput) -> Iterator[tuple[str, ModuleNode]]:
    """The model's modules, of each stage if there are any."""
    plan, found = given.plan, given.found
    if plan.pipeline:
        solved = found.solved if isinstance(found, StagedExplanation) else (None,) * len(plan.stages)
        for number, (stage, its) in enumerate(zip(plan.stages, solved, strict=True)):
            yield plan.pipeline.title(number), module_tree(stage, _why(stage, its))
    else:
        yield "", module_tree(plan, _why(plan, found.planned.solved if isinstance(found, Explanation) else None))


def _why(plan: Plan, solved: Optimized | None) -> Callable[[str], tuple[HtmlPart, ...]]:
    """Answers why an op or a parameter is split as it is: its cheapest candidates, the same for repeated blocks."""
    if solved is None:
        return lambda name: ()
    of = solved.formulated.analysis.classes.of
    known = set(solved.formulated.names)

    @functools.cache
    def answer(choice: str) -> tuple[HtmlPart, ...]:
        if answer.cache_info().currsize >= ANSWERED:
            return ()
        found = why_choice(solved, choice, SHOWN, peaks=False)
        return tuple(converted(answer_parts(plan.axes, found)))

    return lambda name: answer(of[name]) if of.get(name) in known else ()


__all__ = ["ReportInput", "html_page"]
