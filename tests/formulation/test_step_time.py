"""The step's seconds agree in the objective, the events of the schedule, the plan's total and its breakdown."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from autopar.analysis.deferrable import deferrable
from autopar.formulation.read_solution import assignment
from autopar.formulation.step_time import step_events, step_time
from autopar.memory.schedule import Schedule
from autopar.passes.microbatches import microbatches
from autopar.plan.options import Options
from autopar.planning.optimize import Optimized, analysed, solved
from autopar.planning.planner import connected_mesh, read_program, to_plan
from autopar.solver.problem import price
from tests.capture.models import MODELS
from tests.support.prices import latencies

MESH = (2, 2)


@functools.cache
def optimized(name: str, strategy: str, runs: int = 1) -> tuple[Optimized, Options]:
    torch.manual_seed(0)
    options = Options(device="h100", strategy=strategy)
    mesh = connected_mesh(MESH, options)
    step = microbatches(read_program(*MODELS[name]()).program, runs)
    return solved(analysed(step, mesh, options), mesh, options), options


CASES = [
    ("gpt2", "auto", 1),
    ("gpt2", "fsdp", 1),
    ("gpt2", "megatron", 1),
    ("t5", "zero1", 1),
    ("vit", "ddp", 1),
    ("gpt2", "auto", 2),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name, strategy, runs", CASES)
def test_the_events_of_the_schedule_the_plan_and_its_breakdown_have_one_total(name: str, strategy: str, runs: int) -> None:
    found, options = optimized(name, strategy, runs)
    formulated = found.formulated
    chosen = assignment(formulated, found.solution)
    seconds = step_time(Schedule(formulated.program, chosen), formulated.step_prices)
    plan = to_plan(found, options)
    assert plan.step_time == seconds
    total = plan.breakdown.local + sum(c.seconds for c in plan.collectives) - plan.breakdown.hidden
    assert total == pytest.approx(seconds, rel=1e-9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name, strategy, runs", CASES)
def test_the_objective_is_a_bound_on_the_step_that_misses_latencies_only(name: str, strategy: str, runs: int) -> None:
    found, _ = optimized(name, strategy, runs)
    formulated, solution = found.formulated, found.solution
    chosen = assignment(formulated, solution)
    schedule = Schedule(formulated.program, chosen)
    events, seconds = step_events(schedule, formulated.step_prices), step_time(schedule, formulated.step_prices)
    objective = price(formulated.problem, solution.picks, solution.arcs, solution.recompute)
    assert objective == pytest.approx(solution.seconds, rel=1e-6)
    assert -1e-9 * seconds <= seconds - objective <= latencies(formulated.prices, events) + 1e-9 * seconds


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name, strategy, runs", CASES)
def test_events_are_in_the_order_of_the_schedule_and_the_optimizer_steps_last(name: str, strategy: str, runs: int) -> None:
    found, _ = optimized(name, strategy, runs)
    schedule = Schedule(found.formulated.program, assignment(found.formulated, found.solution))
    events = step_events(schedule, found.formulated.step_prices)
    assert [event.time for event in events] == sorted(event.time for event in events)
    half = schedule.end / 2
    assert all(event.time < half for event in events if event.kind == "forward")
    assert all(event.time > half for event in events if event.kind in ("backward", "recompute"))
    assert [event.kind for event in events if event.time == schedule.end][-1] == "optimizer"


def test_the_gradient_of_a_weight_does_not_pay_for_adding_up_those_of_the_activation() -> None:
    found, _ = optimized("llama", "ddp")
    prices, program = found.formulated.step_prices, found.formulated.program
    chosen = assignment(found.formulated, found.solution)
    added = 0
    for name, (x, w) in deferrable(program).items():
        op = program.op[name]
        added += op.operands.index(x) in op.summed
        alone = replace(op, summed=())
        assert prices.weight(op, chosen.ops[name], w) == prices.weight(alone, chosen.ops[name], w)
    assert added == 2 * 3, "of three projections, and of gate and up, all but the last, in two blocks"
