"""A plan's step as the simulator runs it: exactly what is priced, and bounds on its time."""

from __future__ import annotations

import functools
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from autopar.cost_models import catalog
from autopar.formulation.read_solution import assignment
from autopar.formulation.step_collectives import messages
from autopar.formulation.step_time import StepPrices, step_events, step_time
from autopar.ir.device import Link
from autopar.ir.layout import numbered_axes
from autopar.passes.microbatches import microbatches
from autopar.plan.options import Options
from autopar.planning.optimize import Optimized, analysed, solved
from autopar.planning.planner import connected_mesh, read_program
from autopar.search_space.assignment import Assignment
from autopar.simulator.instructions import HOST, instructions, simulated
from autopar.simulator.timeline import Computation, Issue, Timeline, simulate
from autopar.verify.testing import random_again
from tests.capture.models import MODELS

BETA = 0.45
HOST_LINK = Link(name="host", latency=1e-5, bandwidth=25e9, source="made up")


@functools.cache
def optimized(name: str, strategy: str, runs: int = 1, seed: int | None = None) -> tuple[Optimized, Assignment]:
    """A plan on four devices, two for micro-batches of two rows; with a seed it recomputes and offloads at random."""
    device = replace(catalog.device("h100", processes=4), host=HOST_LINK, interference=1.0)
    options = Options(device=device, strategy=strategy)
    mesh = connected_mesh((2, 2) if runs == 1 else (2,), options)
    program = microbatches(read_program(*MODELS[name]()).program, runs)
    found = solved(analysed(program, mesh, options), mesh, options)
    chosen = assignment(found.formulated, found.solution)
    if seed is not None:
        chosen = replace(chosen, recompute=random_again(found.formulated.analysis, chosen, random.Random(seed)))
    return found, chosen


CASES = [
    ("gpt2", "fsdp", 1, None),
    ("gpt2", "fsdp", 1, 0),
    ("llama", "megatron", 1, 1),
    ("vit", "ddp", 1, None),
    ("gpt2", "zero1", 2, None),
    ("gpt2", "fsdp", 2, None),
    ("gpt2", "fsdp", 2, 2),
    ("bert", "ddp", 2, None),
]
cases = pytest.mark.parametrize("name, strategy, runs, seed", CASES, ids=["-".join(map(str, case)) for case in CASES])


def run(found: Optimized, chosen: Assignment, beta: float) -> Timeline:
    return simulate(instructions(found.memory_model.liveness, found.formulated.step_prices, chosen), beta)


@pytest.mark.one_in(4)
@cases
def test_a_device_that_gains_nothing_by_overlap_takes_the_step_time(
    name: str, strategy: str, runs: int, seed: int | None
) -> None:
    found, chosen = optimized(name, strategy, runs, seed)
    schedule = found.memory_model.liveness.schedule(chosen)
    assert run(found, chosen, 1.0).seconds == pytest.approx(step_time(schedule, found.formulated.step_prices), rel=1e-9)


@pytest.mark.one_in(2)
@cases
def test_the_messages_and_the_work_are_those_of_the_plan(name: str, strategy: str, runs: int, seed: int | None) -> None:
    found, chosen = optimized(name, strategy, runs, seed)
    formulated, mesh = found.formulated, found.formulated.mesh
    axes = [mesh.name_of(places) for places in numbered_axes(len(mesh.sizes))]
    timeline = run(found, chosen, BETA)
    sent = Counter((s.transfer.kind, s.transfer.channel, s.transfer.bytes) for s in timeline.sent if s.transfer.channel != HOST)
    planned = messages(formulated.analysis, chosen, formulated.prices)
    assert sent == Counter((message.kind, axes[message.axis], message.bytes) for message in planned)
    events = step_events(found.memory_model.liveness.schedule(chosen), formulated.step_prices)
    computing = sum(event.seconds for event in events if event.kind not in ("collective", "offload"))
    assert timeline.work == pytest.approx(computing, rel=1e-9)
    copies = sum(s.transfer.seconds for s in timeline.sent if s.transfer.channel == HOST)
    assert copies == pytest.approx(sum(event.seconds for event in events if event.kind == "offload"), rel=1e-9)


@pytest.mark.one_in(2)
@cases
def test_a_step_lies_between_its_busiest_stream_and_the_sum(name: str, strategy: str, runs: int, seed: int | None) -> None:
    found, chosen = optimized(name, strategy, runs, seed)
    loads: dict[str, float] = defaultdict(float)
    for one in instructions(found.memory_model.liveness, found.formulated.step_prices, chosen):
        if isinstance(one, Computation):
            loads["computing"] += one.seconds
        elif isinstance(one, Issue):
            loads[one.transfer.channel] += one.transfer.seconds
    for beta in (0.0, BETA, 0.9):
        seconds = run(found, chosen, beta).seconds
        assert max(loads.values()) <= seconds * (1 + 1e-9)
        assert seconds <= sum(loads.values()) * (1 + 1e-9)


def test_the_simulation_takes_the_interference_of_the_device() -> None:
    found, chosen = optimized("gpt2", "fsdp")
    prices = found.formulated.prices
    device = replace(prices.device, interference=BETA)
    overlapping = StepPrices(found.formulated.analysis, replace(prices, mesh=replace(prices.mesh, device=device)))
    timeline = simulated(found.memory_model.liveness, overlapping, chosen)
    assert timeline == run(found, chosen, BETA)
    assert timeline.seconds < run(found, chosen, 1.0).seconds


def test_a_plan_without_messages_has_none() -> None:
    found, chosen = optimized("gpt2", "replicate")
    assert run(found, chosen, BETA).sent == ()


@pytest.mark.thorough
def test_some_of_these_plans_recompute_and_copy_to_the_host() -> None:
    chosen = [optimized(*case)[1].recompute for case in CASES]
    assert any(found.ops for found in chosen)
    assert any(found.steps for found in chosen)
    assert any(found.offload for found in chosen)


def test_gathers_of_weights_and_their_gradients_run_beside_computing() -> None:
    found, chosen = optimized("llama", "fsdp")
    weights = found.formulated.analysis.weights
    hidden = [sent.transfer for sent in run(found, chosen, 0.0).sent if sent.hidden > 1e-9]
    assert {transfer.kind for transfer in hidden} == {"all_gather", "reduce_scatter"}
    assert {transfer.name.rpartition(" ")[2] for transfer in hidden} <= set(weights)


def test_messages_of_activations_are_exposed() -> None:
    found, chosen = optimized("llama", "megatron")
    weights = found.formulated.analysis.weights
    activations = [s for s in run(found, chosen, 0.0).sent if s.transfer.name.rpartition(" ")[2] not in weights]
    assert activations
    assert all(sent.exposed == pytest.approx(sent.seconds) for sent in activations)
