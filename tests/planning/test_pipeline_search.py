"""Pipelines as part of the search, against enumeration that forces every possible choice."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cost_models import catalog
from autopar.errors import AutoparError, BudgetError, ConstraintError, PlanError
from autopar.ir.device import Device
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.pipeline.clock import Clock, StageSeconds
from autopar.pipeline.named_schedules import named
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.planning import large_pipelines, pipeline_search, pipeline_trials
from autopar.planning.large_pipelines import LargePipelineSearch
from autopar.planning.pipeline_plan import guessed
from autopar.planning.pipeline_search import plan_pipeline
from autopar.planning.pipeline_space import Hope, PipelineAxis, climbed
from autopar.planning.pipeline_stages import Cut
from autopar.planning.pipeline_trials import PipelineTrials
from autopar.planning.plan_search import limited
from autopar.planning.planner import connected_mesh, plan_program, planned_mesh, read_program
from autopar.solver.settings import DEFAULTS, SearchSettings
from tests.support import models, planning
from tests.support.pipelines import SLOW

BATCH, LENGTH = 8, 16


FEW = {"pp": 4, "dp": 2}  # and what is asked for in four stages of which messages are a large part
IN_FOUR: dict[str, Any] = {"pipeline": "pp", "microbatches": 4, "stages": ["1", "2", "3"]}


class Squares(nn.Module):
    """The mean of squares."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def network(count: int = 4, width: int = 128, hidden: int = 1024) -> nn.Sequential:
    """Blocks of two layers with a loss behind them."""
    made = (nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(count))
    return nn.Sequential(*made, Squares())


@functools.cache
def blocks() -> Program:
    return read_program(network(), torch.randn(BATCH, LENGTH, 128)).program


def gpt2() -> Program:
    return models.captured("gpt2").program


def device(outer: str = "ethernet-25g", per_node: int = 1, rate: float = 1e12) -> Device:
    """A made-up device, in nodes that are connected so."""
    return replace(SLOW, flops={"float32": rate}, per_node=per_node, outer=outer)


def plan(program: Program, mesh: object, **options: Any) -> Plan:
    asked = Options(**{"microbatches": "auto", "device": device(), **options})
    connected = connected_mesh(mesh, asked)
    return plan_program(program, connected, asked) if asked.pipeline is None else plan_pipeline(program, connected, asked)


def forced(program: Program, mesh: Mesh, runs: tuple[int, ...], **options: Any) -> Iterator[Plan]:
    """Pipelines over a part of the outermost axis: all numbers of ranks and all schedules."""
    for ranks, number in itertools.product((2, 4), runs):
        one = [(name, ranks) for name in ("gpipe", "1f1b", "1f1b+1", "1f1b+3", "zb-h1", "zb-h1+1", "zb-h1+3")]
        for schedule, stages in [*one, ("interleaved", 2 * ranks), ("zb-v", 2 * ranks)]:
            if mesh.sizes[0] % ranks == 0:
                cut = mesh.cut(ranks)
                asked = {"microbatches": number, "schedule": schedule, "stages": stages, "pipeline": cut.axes[0]}
                try:
                    yield plan(program, cut, **options, **asked)
                except AutoparError:  # fewer regions than stages, or nothing that fits
                    continue


def of_length(length: int) -> Program:
    return read_program(network(), torch.randn(BATCH, length, 128)).program


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    "length, schedule", [(64, "1f1b"), pytest.param(96, "zb-h1", marks=pytest.mark.thorough), (160, "1f1b")]
)
def test_no_named_strategy_is_faster_in_the_same_stages(
    length: int, schedule: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage is cheapest in layouts that are dear for all that follow: a step was 32% longer so than by ddp."""
    program = of_length(length)
    if large:
        monkeypatch.setattr(pipeline_search, "LARGE", 0)
    found = plan(program, FEW, schedule=schedule, **IN_FOUR).step_time
    named = [plan(program, FEW, schedule=schedule, strategy=name, **IN_FOUR).step_time for name in ("ddp", "megatron")]
    assert found <= min(named) * (1 + 1e-9)


def test_what_is_done_once_counts_less_where_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of messages of activations in every micro-batch ranks wait for seven times as many as there are messages of weights, of
    which there are four: a step was 32% longer than by ddp that counted the four."""
    monkeypatch.setattr(PipelineTrials, "_as_uncut", lambda *_: None)
    program = of_length(128)
    ddp = plan(program, FEW, schedule="1f1b", strategy="ddp", **IN_FOUR)
    assert plan(program, FEW, schedule="1f1b", **IN_FOUR).step_time <= ddp.step_time * (1 + 1e-9)


@pytest.mark.parametrize("ranks, runs", [(2, 4), (4, 8), (8, 8), (8, 32)])
def test_micro_batches_for_which_ranks_wait(ranks: int, runs: int) -> None:
    """By the closed formulas of bubbles (Narayanan et al., SC'21), to an eighth of the micro-batches."""
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
        schedule = named(name, ranks, runs, chunks=chunks)
        cut = Cut(starts=(), modules=(), name=name, schedule=schedule)
        assert abs(cut.repeats - (runs + (ranks - 1) / chunks)) <= runs / 16 + 1


@pytest.mark.parametrize(
    "mesh, runs, options, stages",
    [
        pytest.param((4,), (4,), {}, True, id="four nodes", marks=pytest.mark.thorough),
        pytest.param((2, 2), (1, 2, 4, 8), {"strategy": "fsdp"}, True, id="by fsdp"),
        pytest.param((2,), (4, 8), {"budget": "12MiB"}, True, id="in little memory"),
        pytest.param(
            (2,),
            (8,),
            {"device": device("nvlink4", per_node=8, rate=2e10)},
            False,
            id="fast links",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_no_pipeline_that_can_be_forced_is_faster(
    mesh: tuple[int, ...], runs: tuple[int, ...], options: dict[str, Any], stages: bool
) -> None:
    found = plan(blocks(), mesh, pipeline="auto", **options)
    others = [one.step_time for one in forced(blocks(), Mesh.of(mesh), runs, **options)]
    others.append(plan(blocks(), mesh, **options).step_time)
    assert found.step_time <= min(others) * (1 + 1e-9)
    assert (found.pipeline is not None) == stages
    assert "pipelines planned" in found.searched
    if found.microbatches in runs:
        assert found.step_time == pytest.approx(min(others), rel=1e-9)
    assert planned_mesh(found, Mesh.of(mesh)).sizes == found.sizes
    with pytest.raises(PlanError, match="made for another mesh"):
        planned_mesh(found, Mesh.of((2, *mesh)))


@pytest.mark.parametrize(
    "mesh, options",
    [
        ((2,), {"budget": "12MiB"}),
        pytest.param((2, 2), {"strategy": "fsdp", "microbatches": 4}, marks=pytest.mark.thorough),
    ],
)
def test_a_large_program_is_not_searched_to_the_end_and_has_the_same_plan(
    monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, ...], options: dict[str, Any]
) -> None:
    whole, found = searched(monkeypatch, mesh, options)
    assert found.step_time == pytest.approx(whole.step_time, rel=1e-9)
    assert (found.microbatches, found.sizes, found.pipeline) == (whole.microbatches, whole.sizes, whole.pipeline)
    assert "slower as guessed from a first stage" in found.searched


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_data_parallelism_splits_samples_in_every_stage(strategy: str) -> None:
    """A later stage may not gather what it receives and compute with all samples, though that is faster over slow links."""
    asked = {"strategy": strategy, "microbatches": 2, "stages": 4, "schedule": "interleaved"}
    made = plan(blocks(), (2, 2), pipeline="axis0", **asked)
    layouts = [stage.layouts for stage in made.stages]
    assert {found[name] for found in layouts for name in found if "linear#" in name or "gelu#" in name} == {"S(0)"}


@pytest.mark.thorough
@pytest.mark.parametrize("mesh, options", [((4,), {}), ((2, 2), {"strategy": "fsdp"})])
def test_a_large_program_has_about_that_plan_where_guesses_miss(
    monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Of four blocks, guessed from the first one, three numbers of micro-batches in four ranks promise more than any in two: of
    these, not all schedules are tried. By fsdp, in two of (2, 2), another plan is 6% slower as well."""
    whole, found = searched(monkeypatch, mesh, options)
    assert whole.step_time < found.step_time < 1.1 * whole.step_time


def searched(monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, ...], options: dict[str, Any]) -> tuple[Plan, Plan]:
    """The plan searched to the end, and that of the search for large programs."""
    whole = plan(blocks(), mesh, pipeline="auto", **options)
    monkeypatch.setattr(pipeline_search, "LARGE", 0)
    return whole, plan(blocks(), mesh, pipeline="auto", **options)


def test_at_the_time_limit_a_large_program_has_a_plan_after_the_first_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    guesses = list[object]()

    def counted(*asked: Any, **more: Any) -> list[StageSeconds]:
        guesses.append(asked)
        return guessed(*asked, **more)

    monkeypatch.setattr(pipeline_search, "LARGE", 0)
    monkeypatch.setattr(large_pipelines, "guessed", counted)
    found = plan(blocks(), (4,), pipeline="auto", time_limit=1e-9)
    assert len(guesses) == 1
    assert "until the time_limit of 1e-09 s" in found.searched
    assert found.step_time >= plan(blocks(), (4,), pipeline="auto").step_time * (1 - 1e-9)
    assert len(guesses) > 2


def test_at_the_time_limit_the_last_that_is_hoped_for_is_planned_where_another_one_was_refused() -> None:
    asked = Options(microbatches=4, device=device(), pipeline="pp", time_limit=1e-9)
    search = LargePipelineSearch(blocks(), asked, limited(DEFAULTS, asked))
    search.over(connected_mesh({"pp": 2}, asked), "pp")
    search.refused.append(BudgetError("no plan fits"))
    search.finish()
    assert search.found is not None


def test_what_falls_and_then_rises_is_climbed_to_its_least() -> None:
    """From anywhere; what is infinite at first does not fit."""
    draw, asked, numbers = random.Random(1), 0, [2**n for n in range(10)]
    for _ in range(200):
        least, short = draw.randrange(10), draw.randrange(3)
        times = {number: (1.0 + abs(n - least) if n >= short else math.inf) for n, number in enumerate(numbers)}
        seen: list[int] = []

        def seconds(number: int, times: dict[int, float] = times, seen: list[int] = seen) -> float:
            seen.append(number)
            return times[number]

        best, found, left = climbed(numbers, draw.choice(numbers), seconds, lambda: True)
        assert (best, found) == min((time, number) for number, time in times.items())
        assert len(seen) == len(set(seen))
        assert left <= len(numbers) - len(seen)
        asked += len(seen)
    assert asked < 0.7 * 200 * len(numbers)


@pytest.mark.parametrize(
    "known, times, planned",
    [
        (10.5, {1: 9.1, 2: 11.2}, [1, 2]),
        (9.0, {1: 9.1, 2: 11.2}, [1, 2]),
        (8.0, {}, []),
        (math.inf, {8: 12.0}, [1, 2, 4, 8]),
    ],
)
def test_of_numbers_without_stages_the_least_bound_comes_first_until_one_is_slower(
    monkeypatch: pytest.MonkeyPatch, known: float, times: dict[int, float], planned: list[int]
) -> None:
    """A number that is slower than stages that are known does not say that fewer micro-batches are; its bound does. Where none
    of those that are bounded fits, more do, which are smaller."""
    bounds, asked_for = {1: 8.5, 2: 8.9, 4: 9.4, 8: 9.9}, list[int]()

    def variant(
        program: Program, mesh: Mesh, options: Options, stop: Callable[[str], None], settings: SearchSettings
    ) -> SimpleNamespace:
        assert isinstance(options.microbatches, int)
        asked_for.append(options.microbatches)
        if options.microbatches not in times:
            raise BudgetError("no plan fits")
        return SimpleNamespace(memory_model=None, solution=times[options.microbatches])

    monkeypatch.setattr(large_pipelines, "least_price", lambda analysis, *_: bounds[analysis.step.microbatches])
    monkeypatch.setattr(pipeline_trials, "best_variant", variant)
    monkeypatch.setattr(pipeline_trials, "solution_time", lambda memory_model, solution: solution)
    asked = Options(microbatches="auto", pipeline="auto", device=device())
    search = LargePipelineSearch(blocks(), asked, DEFAULTS)
    monkeypatch.setattr(search, "ways_to_cut", lambda mesh: [])
    search.seconds = known
    search.both(connected_mesh((4,), asked))
    search.finish()
    assert search.seconds == min([known, *times.values()])
    assert asked_for == planned


def test_what_promises_most_with_what_it_makes_again_comes_first_and_what_promises_too_little_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What lacks memory waits for what does not, but is left out only if it promises no less with a part made again."""
    asked = Options(microbatches="auto", device=device(), pipeline="pp")
    over = PipelineAxis.of(connected_mesh({"pp": 2}, asked), "pp", asked, DEFAULTS)
    search, worked_out = LargePipelineSearch(blocks(), asked, DEFAULTS), list[int]()
    stage = StageSeconds(forward=1.0, backward_input=1.0, backward_weight=1.0)
    promised = {1: 3.5, 2: 8.0, 3: 9.5, 4: 13.0}  # by the number of micro-batches, of which each takes three seconds
    dropped = {1: 1.0, 2: 0.0, 3: 1.0, 4: 0.0}

    def hoped(one: Hope, way: object) -> float:
        worked_out.append(one.runs)
        return promised[one.runs]

    monkeypatch.setattr(search, "_hoped_by", hoped)
    search._hoped = [Hope(over=over, runs=n, stages=[stage] * 2, dropped=dropped[n]) for n in promised]
    assert [one.made_again() for one in search._hoped] == [1.0, 0.0, 3.0, 0.0]
    order = list[int]()
    for known in (math.inf, 9.0, 9.4):
        search.seconds = known
        best = search._most_promising()
        if best:
            search._hoped.remove(best)
            order.append(best.runs)
    assert order == [1, 2]
    assert set(worked_out) == {1, 2}  # without idle ranks 3 and 4 take 9 and 12 seconds
    search.seconds = 10.3
    assert (last := search._most_promising()) is not None
    assert last.runs == 3


def test_stages_are_planned_by_messages_that_hide_only_where_a_step_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Options(microbatches=4, device=SLOW, pipeline="pp")
    search = LargePipelineSearch(blocks(), asked, DEFAULTS)
    search.over(connected_mesh({"pp": 2, "dp": 2}, asked), "pp")
    search._settle()
    again = list[object]()
    monkeypatch.setattr(search, "_again", lambda *made: again.append(made))
    search.hide()
    assert again
    assert search.found is not None
    made, over, options = search.found
    still = tuple(stage.without_messages for stage in made.stage_seconds)
    search.found = replace(made, stage_seconds=still, seconds=Clock(made.cut.schedule).seconds(still)), over, options
    again.clear()
    search.hide()
    assert not again


@pytest.mark.parametrize("seed", range(10))
def test_no_schedule_is_faster_than_ranks_that_are_never_idle_and_equal_stages_take_what_the_clock_says(seed: int) -> None:
    draw, asked = random.Random(seed), Options(microbatches="auto", device=device(), pipeline="pp")
    ranks, runs = draw.choice((2, 4)), draw.choice((4, 8))
    over = PipelineAxis.of(connected_mesh({"pp": ranks}, asked), "pp", asked, DEFAULTS)
    seconds = dict.fromkeys(("forward", "backward_input", "backward_weight", "once"), 0.0)
    stages = [StageSeconds(**{name: draw.uniform(0.5, 1.5) for name in seconds}) for _ in range(ranks)]
    hope = Hope(over=over, runs=runs, stages=stages)
    for name in ("gpipe", "1f1b", "zb-h1"):
        assert hope.busy() <= Clock(named(name, ranks, runs)).seconds(stages) * (1 + 1e-9)
    equal, shares = replace(hope, stages=stages[:1] * ranks), [0.5 / ranks] * 2 * ranks
    for name in ("interleaved", "zb-v"):
        cut = Cut(starts=(), modules=(), name=name, schedule=named(name, ranks, runs, chunks=2))
        run, seconds = cut.waits_filled([stages[0].times(0.5)] * 2 * ranks)
        assert equal.busy() * (1 - 1e-9) <= equal.by(cut, shares) == pytest.approx(seconds, rel=1e-9)
        assert run.schedule == cut.schedule or seconds < Clock(cut.schedule).seconds([stages[0].times(0.5)] * 2 * ranks)


def test_forwards_ahead_are_of_1f1b_and_hold_more() -> None:
    first = [
        plan(blocks(), {"pp": 4}, pipeline="pp", microbatches=8, schedule=schedule).stages[0].peak_memory
        for schedule in ("1f1b", "1f1b+2", "gpipe")
    ]
    assert first == sorted(set(first))
    with pytest.raises(ConstraintError, match="'gpipe\\+2' is not a pipeline schedule"):
        plan(blocks(), {"pp": 4}, pipeline="pp", microbatches=8, schedule="gpipe+2")


def test_gpt2_on_one_node_has_no_stages_and_a_large_one_over_slow_links_has() -> None:
    fast = plan(planning.gpt2(16, 1024, 768, depth=2).program, (8,), device="h100", pipeline="auto", microbatches=2)
    assert fast.pipeline is None
    assert "under this cost model, among plans without stages" in " ".join(str(fast).split())
    slow, wide = replace(catalog.device("h100"), outer="ethernet-25g"), planning.gpt2(64, 2048, 5120, depth=2).program
    found = plan(wide, (8, 8), device=slow, pipeline="auto", microbatches=16)  # two of the blocks of GPT-3 13B
    assert found.pipeline is not None
    assert found.step_time < 0.8 * plan(wide, (8, 8), device=slow, microbatches=16).step_time


@pytest.mark.usefixtures("free_copies")
@pytest.mark.parametrize("strategy, layout, route", [("auto", "S(1)", None), ("megatron", "S(2)", ("S(2) -> I",))])
def test_what_crosses_a_slow_link_is_split_over_a_fast_one(strategy: str, layout: str, route: tuple[str, ...] | None) -> None:
    """Sequence parallelism passes on its part of the sequence as it is (Li et al., 2021). What tensor parallelism has whole it
    scatters, sends and gathers on the other side (Narayanan et al., 2021)."""
    program = planning.gpt2(8, 1024, 2048, depth=2).program
    asked: dict[str, Any] = {"pipeline": "pp", "microbatches": 4, "schedule": "1f1b", "strategy": strategy}
    found = plan(program, {"pp": 2, "tp": 8}, device=replace(catalog.device("h100"), outer="ethernet-25g"), **asked)
    assert found.pipeline is not None
    (crossing,) = found.pipeline.crossings
    assert crossing.layout == layout
    assert crossing.bytes == program.values[crossing.value].bytes / 4 / 8
    assert found.stages[1].routes.get(crossing.value) == route


def test_gradients_of_weights_are_deferred_where_the_clock_says_that_it_is_faster() -> None:
    """Not where one rank has nothing to wait for; where messages take longer than what is deferred, forwards run ahead."""
    asked: dict[str, Any] = {"pipeline": "pp", "microbatches": 8}
    found = plan(blocks(), {"pp": 4}, **asked, device=device(rate=1e10))
    assert found.pipeline is not None
    assert found.pipeline.order.deferred
    names = ("1f1b", "gpipe", "1f1b+3")
    others = [plan(blocks(), {"pp": 4}, **asked, device=device(rate=1e10), schedule=name) for name in names]
    assert found.step_time < min(other.step_time for other in others)
    for mesh, expected in (({"pp": 1}, "1f1b"), ({"pp": 4}, "zb-h1+3")):
        pipeline = plan(blocks(), mesh, **asked).pipeline
        assert pipeline is not None
        assert pipeline.schedule == expected


def test_stages_are_no_slower_than_a_strategy_makes_them_where_messages_hide() -> None:
    """What is sent split is gathered again, on the same slow links: with forwards ahead, sending all of it costs less."""
    program = planning.gpt2(8, 1024, 2048, depth=4).program
    slow = replace(catalog.device("h100"), per_node=1, outer="ethernet-25g")
    asked: dict[str, Any] = {"pipeline": "pp", "microbatches": 8, "schedule": "1f1b+1", "device": slow}
    found = plan(program, {"pp": 2, "dp": 2}, **asked)
    assert found.pipeline is not None
    assert [crossing.layout for crossing in found.pipeline.crossings] == ["I"]
    assert found.step_time <= plan(program, {"pp": 2, "dp": 2}, strategy="replicate", **asked).step_time * (1 + DEFAULTS.gap)
