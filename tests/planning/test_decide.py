"""The simulator decides between the plan of least price and the one by sums."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from autopar.cost_models.catalog import DEVICES
from autopar.formulation.budget_loop import within
from autopar.ir.program import Program
from autopar.passes.microbatches import microbatches
from autopar.plan.options import Options
from autopar.planning.decide import decided, simulated_seconds
from autopar.planning.optimize import Optimized, analysed, problem_of, solved
from autopar.planning.planner import connected_mesh, read_program, to_plan
from autopar.solver.problem import Problem, Solution
from autopar.solver.proposal import summed
from autopar.solver.settings import DEFAULTS
from tests.capture.models import gpt2
from tests.support.planning import layers

BETA = 0.45


@functools.cache
def optimized(beta: float, program: Callable[[], Program]) -> tuple[Optimized, Options]:
    """The plan on four devices whose links are slow beside their cores."""
    asked = Options(device=replace(DEVICES["l4"], interference=beta))
    mesh = connected_mesh((2, 2), asked)
    return solved(analysed(microbatches(program(), 1), mesh, asked), mesh, asked), asked


def block() -> Program:
    """A GPT-2 of one block."""
    torch.manual_seed(0)
    return read_program(*gpt2(layers=1)).program


def products() -> Program:
    """Layers, of which less memory is planned in a second."""
    return layers(512, 256, 1024, 512, 256).program


def posed(name: str, sizes: tuple[int, ...], beta: float) -> Problem:
    """The problem of the block on such devices."""
    asked = Options(device=replace(DEVICES[name], interference=beta))
    mesh = connected_mesh(sizes, asked)
    return problem_of(analysed(microbatches(block(), 1), mesh, asked), mesh, asked.stepped, asked).formulated.problem


@pytest.mark.parametrize(("name", "sizes"), [("l4", (2, 2)), ("h100", (2, 8))])
def test_prices_by_sums_are_those_of_a_device_that_gains_nothing_by_overlap(name: str, sizes: tuple[int, ...]) -> None:
    by_law, by_sums = (posed(name, sizes, beta) for beta in (BETA, 1.0))
    assert len(by_law.regions[0].links) == len({link.name for link in connected_mesh(sizes, Options(device=name)).links})
    priced = summed(by_law, BETA)
    pairs = [(one.seconds, other.seconds) for one, other in zip(priced.choices, by_sums.choices, strict=True)]
    for one, other in zip(priced.edges, by_sums.edges, strict=True):
        pairs.append((one.seconds, other.seconds))
        costs = zip(one.conditional_costs, other.conditional_costs, strict=True)
        pairs += [(cost.seconds, due.seconds) for cost, due in costs]
    charges = zip(priced.fixed_charges, by_sums.fixed_charges, strict=True)
    pairs.append(tuple(np.array(seconds) for seconds in zip(*((a.seconds, b.seconds) for a, b in charges), strict=True)))
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-15)


class Proposing:
    """A search that has ended, and proposes this."""

    def __init__(self, solution: Solution) -> None:
        self.solution = solution

    def by_sums(self, best: Solution, limit: int) -> Solution:
        return self.solution


@functools.cache
def smaller() -> Optimized:
    """The same in eight tenths of the memory."""
    found, _ = optimized(BETA, products)
    peak = float(found.memory_model.walk(found.solution).max())
    small = within(found.formulated, found.memory_model, int(0.8 * peak))
    assert small is not None
    return replace(found, solution=replace(small, bound=found.solution.bound))


@pytest.mark.parametrize("turned", [False, True])
def test_the_faster_of_two_is_the_plan_whichever_is_proposed(turned: bool) -> None:
    found, asked = optimized(BETA, products)
    other = smaller()
    first, second = (other, found) if turned else (found, other)
    times = {one.solution.picks: simulated_seconds(one) for one in (found, other)}
    assert len(set(times.values())) == 2, "the two differ"
    proposing: Any = Proposing(second.solution)
    unasked = decided(replace(first, loop=proposing), asked, replace(DEFAULTS, simulated_gap=1.0), lambda phase: None)
    assert unasked.solution == first.solution, "its step is no longer than twice its price"
    chosen = decided(replace(first, loop=proposing), asked, replace(DEFAULTS, simulated_gap=-1.0), lambda phase: None)
    assert simulated_seconds(chosen) == min(times.values())
    assert bool(chosen.decided) == (chosen.solution.picks == second.solution.picks)
    if chosen.decided:
        plan = to_plan(chosen, asked)
        assert "decided by the simulator" in plan.searched
        assert math.isclose(plan.gap, 1 - found.solution.bound / plan.step_time, abs_tol=1e-6)


def test_the_best_of_all_layouts_is_proposed_beside_a_named_strategy() -> None:
    found, asked = optimized(BETA, products)
    assert simulated_seconds(found) != simulated_seconds(smaller())
    fast, slow = sorted((found, smaller()), key=simulated_seconds)
    chosen = decided(replace(slow, loop=None, beside=fast), asked, DEFAULTS, lambda phase: None)
    assert simulated_seconds(chosen) == simulated_seconds(fast)
    assert chosen.solution.bound <= slow.solution.bound
    assert chosen.decided


def test_the_search_is_let_go_once_it_is_decided() -> None:
    found, asked = optimized(BETA, products)
    assert found.loop is not None
    for best in (found, replace(found, beside=found)):
        chosen = decided(best, asked, DEFAULTS, lambda phase: None)
        assert chosen.loop is None
        assert chosen.beside is None
