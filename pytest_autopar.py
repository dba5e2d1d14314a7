"""The pytest plugin: the fixture `plan_cost`, which fails when a plan costs more than its baseline.

    def test_cost(plan_cost):
        plan_cost(model, sample, mesh=(2, 4), device="h100")      # plan_costs/<file>-<test>.json beside the test
        plan_cost(plan, "ours")                                   # plan_costs/ours.json

`pytest --update-plan-costs` writes the baselines. The plugin stands outside the package, which imports torch: a run of pytest
that uses no `plan_cost` does not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from autopar.explain.plan_cost import PlanCost

TOLD = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --update-plan-costs."""
    what = "write what plans cost now into the baselines of plan_cost"
    parser.getgroup("autopar").addoption("--update-plan-costs", action="store_true", help=what)


@pytest.fixture
def plan_cost(request: pytest.FixtureRequest) -> PlanCost:
    """`plan_cost(plan, "name")` or `plan_cost(model, sample, mesh=..., device=...)` fails if the plan costs more."""
    from autopar.explain.plan_cost import PlanCost

    told = request.config.stash.setdefault(TOLD, [])
    return PlanCost(
        folder=request.path.parent / "plan_costs",
        test=re.sub(r"[^\w.]+", "-", f"{request.path.stem}-{request.node.name}").strip("-"),
        update=bool(request.config.getoption("--update-plan-costs")),
        tell=told.append,
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which plans got better, and which baselines were written."""
    if told := config.stash.get(TOLD, []):
        terminalreporter.section("plan costs")
        for line in told:
            terminalreporter.write_line(line)
