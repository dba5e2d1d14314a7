"""The report as one HTML page, made with Bokeh, which is an extra of this package."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import AutoparError
from autopar.explain.budget_sweep import SweepStep, budget_sweep, improved
from autopar.explain.explanation import Explanation
from autopar.explain.scaling import ScalingStep
from autopar.explain.scaling import scaling as planned_on
from autopar.explain.staged import StagedExplanation
from autopar.explain.staged_prices import staged_budget_sweep
from autopar.explain.whynot import WhyNot
from autopar.plan.options import Options
from autopar.plan.plan import Plan

LIBRARY = "bokeh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The additional questions of a page: see the command-line options with these names."""

    budgets: bool = False
    devices: Sequence[int] = ()
    shapes: bool = False
    price: float | None = None
    why_not: Mapping[str, str] = field(default_factory=dict)

    def page(self, found: Explanation | StagedExplanation, options: Options) -> str:
        """The report with the answers; for other `devices` the model is planned with `options`.

        With `shapes` the mesh shapes are searched too, as with --mesh auto.
        """
        why_not = found.why_not(self.why_not) if self.why_not else None  # first: what is wrong with it is said at once
        if isinstance(found, StagedExplanation):
            program, steps = found.program, staged_budget_sweep(found)
        else:
            program, steps = found.planned.captured.program, budget_sweep(found.planned, found.options)
        sweep = improved([*steps]) if self.budgets else ()
        return html_report(
            found,
            sweep=sweep,
            scaling=[*planned_on(program, self.devices, options, shapes=self.shapes)],
            price=self.price,
            why_not=why_not,
        )


class MissingLibraryError(AutoparError):
    """A library that comes with an extra of this package is not installed."""


def html_report(
    found: Explanation | StagedExplanation | Plan,
    *,
    sweep: Sequence[SweepStep] = (),
    scaling: Sequence[ScalingStep] = (),
    price: float | None = None,
    why_not: WhyNot | None = None,
) -> str:
    """The report as a page with plots; it is self-contained and needs no network.

    Args:
        found: a planned model, or only a plan: then the page has no timeline, strategies and candidates.
        sweep: plans within smaller budgets, by `budget_sweep.budget_sweep`.
        scaling: plans on other numbers of devices, by `scaling.scaling`.
        price: the price of a device per hour, for the cost of these.
        why_not: what forcing layouts changes, by `Explanation.why_not`.

    Raises MissingLibraryError if Bokeh is not installed.
    """
    require()
    from autopar.explain.html.page import ReportInput, html_page

    plan = found if isinstance(found, Plan) else found.plan
    model = None if isinstance(found, Plan) else found
    return html_page(ReportInput(plan=plan, found=model, sweep=sweep, scaling=scaling, price=price, why_not=why_not))


def require() -> None:
    """Raise MissingLibraryError if Bokeh is not installed."""
    if importlib.util.find_spec(LIBRARY) is None:
        raise MissingLibraryError("the HTML report needs Bokeh, which is not installed", fix='pip install "autopar[html]"')


__all__ = ["MissingLibraryError", "Questions", "html_report", "require"]
