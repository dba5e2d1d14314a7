"""Constraint propagation: no solution contains what it leaves out, tested by solving with each; the optimum is unchanged."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.analysis.analysis import Analysis, analyse
from autopar.capture import Captured
from autopar.cost_models.optimizers import OPTIMIZERS
from autopar.formulation.formulate import PlanningProblem, formulate
from autopar.ir.training_step import TrainingStep
from autopar.search_space.strategies import StrategyConstraints, constraints_of
from autopar.solver.solve import solve
from tests.support import planning

PROPAGATED = "autopar.search_space.reachable._propagated"
ON = planning.mesh((2, 2), planning.NVLINK)


def posed(analysis: Analysis, constraints: StrategyConstraints) -> PlanningProblem:
    return formulate(analysis, ON, OPTIMIZERS["adamw"], constraints=constraints)


def both(captured: Captured, strategy: str, monkeypatch: pytest.MonkeyPatch) -> tuple[PlanningProblem, PlanningProblem]:
    """A strategy's problem, and the same with all that constraint propagation leaves out."""
    step = TrainingStep(program=captured.program)
    analysis = analyse(step, ON)
    constraints = constraints_of(step, ON, strategy, {}, analysis.fits)
    with monkeypatch.context() as patched:
        patched.setattr(PROPAGATED, lambda kept, spaces: {"as where no plan is possible": np.zeros(1, dtype=np.bool_)})
        everything = posed(analysis, constraints)
    return posed(analysis, constraints), everything


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "megatron", "2d", "replicate"])
def test_the_optimum_is_that_of_all_candidates(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, everything = both(planning.gpt2(8, 16, 64, depth=1), strategy, monkeypatch)
    found, expected = solve(part.problem).solution, solve(everything.problem).solution
    assert found is not None
    assert expected is not None
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
    sizes, before = (sum(map(len, one.candidates)) for one in (part, everything))
    assert sizes < before / 2 if strategy != "replicate" else sizes == before


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_no_solution_has_a_candidate_that_is_left_out(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, everything = both(planning.layers(8, 16, 32, 16), strategy, monkeypatch)
    left_out = 0
    for choice, (kept, found) in enumerate(zip(part.candidates, everything.candidates, strict=True)):
        assert [candidate for candidate in found if candidate in kept] == list(kept), "in their order"
        for number in (i for i, candidate in enumerate(found) if candidate not in kept):
            picks = [np.arange(len(one)) for one in everything.candidates]
            picks[choice] = np.array([number])
            assert solve(everything.within(picks).problem).solution is None
            left_out += 1
    assert left_out > 20
