"""The test fixture `plan_cost`, which compares a plan with the baseline next to the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

import pytest
from torch import nn

from autopar.api import plan
from autopar.errors import AutoparError
from autopar.explain.baseline import Baseline, BaselineError, read, write
from autopar.explain.check import BETTER, TOLERANCE, WORSE, CheckedCost
from autopar.explain.summary import Summary
from autopar.plan.plan import Plan

UPDATE = "pytest --update-plan-costs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """Compares plans with baselines in `folder`; `test` names unnamed plans, `tell` reports anything short of a failure."""

    folder: Path
    test: str
    update: bool
    tell: Callable[[str], None]
    seen: set[str] = field(default_factory=set)

    @overload
    def __call__(self, what: Plan, name: str = "", /, *, tolerance: float = ...) -> Plan: ...

    @overload
    def __call__(
        self, what: nn.Module, sample: object, /, *, mesh: object, name: str = "", tolerance: float = ..., **options: object
    ) -> Plan: ...

    def __call__(
        self,
        what: Plan | nn.Module,
        sample: object = "",
        /,
        *,
        mesh: object = None,
        name: str = "",
        tolerance: float = TOLERANCE,
        **options: object,
    ) -> Plan:
        """Fail the test if a plan, or a model's plan, costs more than its baseline; returns the plan.

        `options` are those of `autopar.plan`. `tolerance` is the fraction by which a figure may be worse.
        """
        if isinstance(what, Plan):
            made, name = what, str(sample)
        else:
            made = plan(what, sample, mesh, **options)  # type: ignore[arg-type]
        try:
            outcome = self._compared(made, name or self.test, tolerance)
        except AutoparError as error:
            pytest.fail(str(error), pytrace=False)
        if outcome and outcome.status == WORSE:
            pytest.fail("\n".join([*outcome.lines(), f"if this change is intended: {UPDATE}"]), pytrace=False)
        return made

    def _compared(self, made: Plan, name: str, tolerance: float) -> CheckedCost | None:
        """The plan compared with its baseline; None if the baseline is written instead."""
        path, new = self.folder / f"{name}.json", Summary.of(made)
        if name in self.seen:
            raise BaselineError(f"one test has two plans named {name!r}", fix="give each its own name")
        self.seen.add(name)
        if self.update:
            write(path, [Baseline(target="", summary=new)])
            self.tell(f"written {path}")
            return None
        if not path.exists():
            raise BaselineError(f"there is no baseline {path}", fix=f"{UPDATE} writes it")
        found = read(path)
        if len(found) != 1:
            raise BaselineError(f"{path} holds {len(found)} baselines, but a test compares with one", fix=UPDATE)
        outcome = CheckedCost(name=name, old=found[0].summary, new=new, tolerance=tolerance)
        if outcome.status == BETTER:
            self.tell("\n".join([*outcome.lines(), f"        {UPDATE} keeps the improvement"]))
        return outcome
