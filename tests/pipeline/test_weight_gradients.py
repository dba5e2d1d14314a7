"""Weight gradients placed where ranks would wait, against every order of them and against the named schedule."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from statistics import mean

import pytest

from autopar.pipeline.clock import Clock
from autopar.pipeline.dependencies import check
from autopar.pipeline.named_schedules import named
from autopar.pipeline.schedule import Action, ActionKind, PipelineSchedule
from autopar.pipeline.weight_gradients import waits_filled
from tests.pipeline.orders import any_seconds

W = ActionKind.BACKWARD_WEIGHT


def rest(schedule: PipelineSchedule) -> list[list[Action]]:
    return [[action for action in actions if action.kind != W] for actions in schedule.ranks]


def most(schedule: PipelineSchedule) -> list[int]:
    return [schedule.in_flight(rank, deferred=True) for rank in range(len(schedule.ranks))]


def orders(todo: list[Action], due: list[Action], left: int) -> Iterator[tuple[Action, ...]]:
    """Every order of a rank in which each W follows its I and those before it, with room for so many micro-batches."""
    if not todo:
        yield tuple(due)
        return
    first, *others = todo
    if first.kind != ActionKind.FORWARD or left:
        more = [Action(stage=first.stage, kind=W, microbatch=first.microbatch)] * (first.kind == ActionKind.BACKWARD_INPUT)
        for order in orders(others, [*due, *more], left - (first.kind == ActionKind.FORWARD)):
            yield (first, *order)
    if due:
        for order in orders(todo, due[1:], left + 1):
            yield (due[0], *order)


@pytest.mark.parametrize(
    "name, ranks, runs, chunks",
    [
        ("zb-h1", 2, 4, 1),
        pytest.param("zb-h1", 3, 4, 1, marks=pytest.mark.thorough),
        ("zb-v", 2, 3, 2),
        pytest.param("zb-v", 2, 4, 2, marks=pytest.mark.thorough),
    ],
)
def test_hardly_any_order_of_them_is_faster(name: str, ranks: int, runs: int, chunks: int) -> None:
    draw, schedule = random.Random(5), named(name, ranks, runs, chunks=chunks)
    ways = [list(orders(todo, [], room)) for todo, room in zip(rest(schedule), most(schedule), strict=True)]
    every = [Clock(PipelineSchedule(ranks=one)) for one in itertools.product(*ways)]
    ours, as_named = list[float](), list[float]()
    for _ in range(20):
        stages = any_seconds(draw, schedule.stages)
        best = min(clock.seconds(stages) for clock in every)
        ours.append(waits_filled(schedule, stages)[1] / best)
        as_named.append(Clock(schedule).seconds(stages) / best)
    assert 1 - 1e-9 <= min(ours) <= max(ours) < 1.05
    assert mean(ours) < 1.01 < 1.015 < mean(as_named)


@pytest.mark.parametrize("seed", range(60))
def test_a_step_is_no_slower_and_holds_no_more(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(1, 6)
    name, chunks = draw.choice([("zb-h1", 1), ("zb-v", 2)])
    ahead = draw.randint(0, ranks) if name == "zb-h1" else 0
    schedule = named(name, ranks, draw.randint(1, 20), chunks=chunks, ahead=ahead)
    stages = any_seconds(draw, schedule.stages)
    found, seconds = waits_filled(schedule, stages)
    check(found)
    assert seconds == Clock(found).seconds(stages) <= Clock(schedule).seconds(stages)
    assert rest(found) == rest(schedule)
    assert all(held <= most_held for held, most_held in zip(most(found), most(schedule), strict=True))
