"""Cuts improved by moves: against the enumeration of all cuts; critical paths agree with the clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from autopar.pipeline.clock import Clock, StageSeconds
from autopar.pipeline.cut_moves import improved
from autopar.pipeline.named_schedules import named
from autopar.pipeline.stage_search import seconds_with
from autopar.pipeline.stage_table import FIELDS, Cuts, StageTable
from tests.pipeline.orders import any_schedule, any_seconds
from tests.pipeline.test_stage_search import drawn, enumerated, tables

HALF, BLOCKS = 3, 13  # regions of half a block, and blocks, of a program of which few bytes pass between halves alone


def fields(stages: list[StageSeconds]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array([[getattr(one, field) for field in FIELDS] for one in stages])


def fitting(known: Sequence[StageTable], cuts: Cuts) -> bool:
    return all(table.fits[ends] for table, ends in zip(known, itertools.pairwise(cuts), strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_a_critical_path_is_as_long_as_the_step_and_no_longer_than_that_of_other_stages(seed: int) -> None:
    draw = random.Random(seed)
    schedule = any_schedule(draw)
    clock, stages, others = Clock(schedule), any_seconds(draw, schedule.stages), any_seconds(draw, schedule.stages)
    seconds, counts = clock.critical(stages)
    assert seconds == clock.seconds(stages)
    assert (counts * fields(stages)).sum() == pytest.approx(seconds, rel=1e-12)
    assert (counts * fields(others)).sum() <= clock.seconds(others) * (1 + 1e-12)


def test_moves_make_no_step_longer_and_most_of_them_the_shortest() -> None:
    draw, best, tried = random.Random(8), 0, 0
    for _ in range(150):
        schedule, regions, price = drawn(draw)
        more = draw.choice((0, 3))
        known, clock = tables(price, schedule, regions), Clock(schedule)
        every = [(0, *inner, regions) for inner in itertools.combinations(range(1, regions), schedule.stages - 1)]
        ways = [cuts for cuts in every if fitting(known, cuts)]
        expected = enumerated(schedule, regions, price, more)
        if not ways or expected is None:
            continue
        start = draw.choice(ways)
        seconds, cuts, _ = improved(clock, known, start, more=more)
        before, after = (
            seconds_with(clock, [t.stage(*ends) for t, ends in zip(known, itertools.pairwise(one), strict=True)], more)
            for one in (start, cuts)
        )
        assert expected[0] * (1 - 1e-9) <= seconds == after <= before
        tried, best = tried + 1, best + (seconds <= expected[0] * (1 + 1e-9))
    assert tried > 80
    assert best > 0.8 * tried


def test_regions_are_handed_over_that_are_of_no_use_one_by_one() -> None:
    """Half a block, where more bytes pass within: from the last stage to the one that has the shortest path."""
    regions = 2 * HALF * BLOCKS
    starts, stops = np.meshgrid(np.arange(regions), np.arange(regions + 1), indexing="ij")
    work = np.maximum(stops - starts, 0) / HALF
    message = np.where(np.arange(regions + 1) % HALF == 0, 0.1, 4.0)
    there, back = np.broadcast_to(message, work.shape), np.broadcast_to(message[:-1, None], work.shape)
    table = StageTable(seconds=np.stack([work, work, work, there, back, 0 * work]), fits=work > 0)
    schedule = named("interleaved", 4, 8, chunks=3)
    start = (0, *(2 * HALF * stage for stage in range(1, 12)), regions)
    clock = Clock(schedule)
    seconds, cuts, timed = improved(clock, [table] * 12, start)
    assert seconds < 0.98 * clock.seconds([table.stage(*ends) for ends in itertools.pairwise(start)])
    assert all(cut % HALF == 0 for cut in cuts)
    assert timed < 60


def test_no_more_cuts_are_timed_than_asked_for() -> None:
    draw, tried = random.Random(3), 0
    for _ in range(20):
        schedule, regions, price = drawn(draw)
        known, start = tables(price, schedule, regions), (*range(schedule.stages), regions)
        if fitting(known, start):
            assert improved(Clock(schedule), known, start, simulations=1)[1:] == (start, 1)
            tried += 1
    assert tried > 3
