"""Overlap: the integer program and the step of its solution obey one law, whose extremes have closed forms."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from autopar.analysis.step_regions import step_regions
from autopar.cost_models.catalog import DEVICES
from autopar.errors import MeshError
from autopar.formulation.overlap import Overlap
from autopar.formulation.read_solution import assignment
from autopar.formulation.step_time import StepEvent, StepPrices, hidden_time, parts_of_step, step_events, step_time
from autopar.memory.schedule import Schedule
from autopar.passes.microbatches import microbatches
from autopar.plan.options import Options
from autopar.planning.optimize import Optimized, analysed, solved
from autopar.planning.planner import connected_mesh, read_program, to_plan
from autopar.solver.problem import price
from tests.capture.models import MODELS
from tests.support.prices import latencies


def options(strategy: str, beta: float) -> Options:
    """A device whose links are slow beside its cores, and all of one kind."""
    return Options(device=replace(DEVICES["l4"], interference=beta), strategy=strategy)


@functools.cache
def optimized(name: str, strategy: str, runs: int, beta: float) -> Optimized:
    torch.manual_seed(0)
    asked = options(strategy, beta)
    mesh = connected_mesh((2, 2) if runs == 1 else (2,), asked)
    program = microbatches(read_program(*MODELS[name]()).program, runs)
    return solved(analysed(program, mesh, asked), mesh, asked)


def events_of(found: Optimized) -> list[StepEvent]:
    return step_events(_schedule(found), found.formulated.step_prices)


def _schedule(found: Optimized) -> Schedule:
    return Schedule(found.formulated.program, assignment(found.formulated, found.solution))


def at(found: Optimized, beta: float) -> float:
    """Seconds of a solution's step on a device of another interference."""
    formulated = found.formulated
    device = replace(formulated.prices.device, interference=beta)
    prices = replace(formulated.prices, mesh=replace(formulated.mesh, device=device))
    return step_time(_schedule(found), StepPrices(formulated.analysis, prices))


CASES = [
    ("gpt2", "fsdp", 1),
    ("gpt2", "auto", 1),
    ("gpt2", "fsdp", 2),
    ("t5", "zero1", 1),
    ("gpt2", "zero1", 2),
    ("vit", "ddp", 1),
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("beta", [0.0, 0.45])
@pytest.mark.parametrize("name, strategy, runs", CASES)
def test_the_objective_is_the_step_s_law_but_for_latencies(name: str, strategy: str, runs: int, beta: float) -> None:
    found = optimized(name, strategy, runs, beta)
    problem, solution, events = found.formulated.problem, found.solution, events_of(found)
    objective = price(problem, solution.picks, solution.arcs, solution.recompute)
    assert objective == pytest.approx(solution.seconds, rel=1e-6)
    seconds, latency = at(found, beta), latencies(found.formulated.prices, events)
    assert -1e-9 * seconds <= seconds - objective <= latency + 1e-9 * seconds


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name, strategy, runs", CASES)
def test_computing_takes_what_it_takes_in_every_pass_whatever_hides_beside_it(name: str, strategy: str, runs: int) -> None:
    found = optimized(name, strategy, runs, 0.45)
    events, prices, once = events_of(found), found.formulated.step_prices, found.formulated.once
    parts = parts_of_step(events, prices, once=once)
    assert sum(parts.values()) == pytest.approx(step_time(_schedule(found), prices), rel=1e-12)
    hidden = sum(event.seconds for event in events) - sum(parts.values())
    for part, phases in (("forward", {"forward"}), ("backward", {"backward", "recompute"})):
        own = [one for one in events if one.phase in phases and one.kind != "optimizer"]
        computing = sum(one.seconds for one in own if one.message is None)
        repeated = sum(one.seconds for one in own if one.message is None or not one.message.once)
        assert max(computing, repeated - hidden) * (1 - 1e-9) <= parts[part] <= repeated * (1 + 1e-9)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name, strategy, runs", CASES)
def test_a_step_grows_with_interference_between_the_longest_part_and_the_sum(name: str, strategy: str, runs: int) -> None:
    found = optimized(name, strategy, runs, 0.45)
    events, steps = events_of(found), [at(found, beta) for beta in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert steps == pytest.approx(sorted(steps), rel=1e-9)
    assert steps[-1] == pytest.approx(sum(event.seconds for event in events))
    sent = sum(event.seconds for event in events if event.message is not None)
    assert steps[0] >= max(sent, steps[-1] - sent) * (1 - 1e-9)  # one link here: what it sends, and what is computed


def test_a_region_takes_the_longer_of_what_it_computes_and_what_is_sent_beside_it() -> None:
    """FSDP by hand: the gathers of block 1 travel during block 0, those of the head during block 1, and back."""
    found, beta = optimized("gpt2", "fsdp", 1, 0.45), 0.45
    regions, formulated = step_regions(found.formulated.analysis), found.formulated
    assert regions.sequence == (0, 1, 1, 2)
    own, sent, bare = defaultdict[tuple[int, bool], float](float), defaultdict[tuple[int, bool], float](float), 0.0
    for event in events_of(found):
        back = event.phase != "forward"
        weight = not isinstance(event.of, str) and event.of[0] in formulated.analysis.bucketed
        if event.kind == "optimizer" or (isinstance(event.of, str) and event.of not in formulated.program.op):
            bare += event.seconds
        elif event.message is None or not weight:
            region = regions.of_op(event.of) if isinstance(event.of, str) else regions.of_value(event.of[0])
            assert region is not None
            own[region, back] += event.seconds
        else:
            member = next(regions.member[op.name] for op in formulated.analysis.readers[event.of[0]])
            member += 1 if event.phase == "recompute" else -1
            if 0 <= member < len(regions.sequence):
                sent[regions.sequence[member], back] += event.seconds
            else:
                bare += event.seconds
    expected = bare + sum(max(own[r, b] + beta * sent[r, b], sent[r, b] + _waits(found, r, b)) for r, b in own)
    assert at(found, beta) == pytest.approx(expected, rel=1e-9)
    assert expected < at(found, 1.0)


def _waits(found: Optimized, region: int, back: bool) -> float:
    """Seconds of messages that a region waits for."""
    regions, formulated = step_regions(found.formulated.analysis), found.formulated
    seconds = 0.0
    for event in events_of(found):
        if event.message is not None and (event.phase != "forward") == back:
            name = event.of if isinstance(event.of, str) else event.of[0]
            if name in formulated.program.op and regions.of_op(name) == region:
                seconds += event.seconds
            elif name in formulated.program.values and name not in formulated.analysis.bucketed:
                seconds += event.seconds * (regions.of_value(name) == region)
    return seconds


def test_gradients_that_alone_travel_may_take_until_the_end_of_the_last_backward() -> None:
    """All but those of the first region, which are bare: they are there when the backward ends."""
    found = optimized("gpt2", "fsdp", 1, 0.45)
    once = Overlap.of(found.formulated.analysis, found.formulated.mesh, once=False)
    assert once is not None
    whole_backward = len(once.parts) - 1
    last = found.formulated.program.parameters[-1].value.name
    assert once.hidden(last, "reduce", moved=True) == len(once.regions.names) + once.regions.sequence[-2]
    assert once.parts[whole_backward] == tuple(range(len(once.regions.names), 2 * len(once.regions.names)))
    assert once.hidden(last, "reduce", moved=False) in (whole_backward, None)  # small weights of all blocks are one bucket


@pytest.mark.parametrize(
    "busy, links, expected",
    [
        ({4: 3.0, 5: 1.0, 7: 0.2}, {(7, 0): 5.0}, 0.8),  # 5 s of gradients behind 4.2 s of backward
        ({4: 3.0, 5: 1.0}, {(4, 0): 3.5, (7, 0): 1.0}, 0.5),  # a part that outlasts its computing; the whole has room
        (
            {4: 3.0, 5: 1.0},
            {(4, 0): 3.5, (7, 0): 2.0},
            1.5,
        ),  # both: 5.5 s on the link, 4.5 s of backward
        ({0: 1.0, 6: 0.1}, {(0, 0): 0.5, (6, 0): 0.4}, 0.0),
    ],
)
def test_the_whole_pass_outlasts_its_parts(
    busy: dict[int, float], links: dict[tuple[int, int], float], expected: float
) -> None:
    found = optimized("gpt2", "fsdp", 1, 0.45).formulated
    overlap = Overlap.of(found.analysis, found.mesh, once=False)
    assert overlap is not None
    assert len(overlap.parts) == 8
    assert sum(overlap.excess(busy, links)) == pytest.approx(expected)


def test_without_a_gain_there_are_no_regions_and_nothing_is_hidden() -> None:
    found = optimized("gpt2", "fsdp", 1, 1.0)
    assert found.formulated.problem.regions == ()
    events = events_of(found)
    assert hidden_time(events, found.formulated.step_prices, once=False) == 0.0
    assert at(found, 1.0) == sum(event.seconds for event in events)


def test_a_plan_says_what_is_hidden() -> None:
    plan = to_plan(optimized("gpt2", "fsdp", 1, 0.45), options("fsdp", 0.45))
    assert plan.breakdown.hidden > 0
    sent = sum(collective.seconds for collective in plan.collectives)
    assert plan.step_time == pytest.approx(plan.breakdown.local + sent - plan.breakdown.hidden)
    assert "hidden behind compute" in str(plan)
    assert type(plan).from_json(plan.to_json()) == plan


@pytest.mark.parametrize("beta", [-0.1, math.nan])
def test_an_interference_that_is_no_share_is_refused(beta: float) -> None:
    with pytest.raises(MeshError, match=r"interference is .*, not a nonnegative finite number"):
        optimized("gpt2", "fsdp", 1, beta)
