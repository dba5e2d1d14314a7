"""Cuts that give ranks about equal work, against all cuts of small programs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from autopar.pipeline.named_schedules import named
from autopar.pipeline.rank_balance import balanced
from autopar.pipeline.schedule import PipelineSchedule


def works(before: Sequence[float], cuts: tuple[int, ...], schedule: PipelineSchedule) -> list[float]:
    found = [0.0] * len(schedule.ranks)
    for stage, (start, stop) in enumerate(itertools.pairwise(cuts)):
        found[schedule.rank_of[stage]] += before[stop] - before[start]
    return found


def drawn(draw: random.Random) -> list[float]:
    """Blocks in two parts each, between an embedding and a head: the work before each region, and of all."""
    block = [draw.uniform(0.5, 1.5), draw.uniform(1.0, 2.0)]
    return [0.0, *itertools.accumulate([draw.uniform(0, 1), *block * draw.randint(3, 5), draw.uniform(0, 4)])]


@pytest.mark.parametrize("name, ranks, chunks", [("1f1b", 3, 1), ("zb-v", 2, 2), ("interleaved", 2, 2), ("zb-v", 3, 2)])
def test_no_cut_makes_the_ranks_much_more_equal(name: str, ranks: int, chunks: int) -> None:
    draw, schedule, exact = random.Random(3), named(name, ranks, 2 * ranks, chunks=chunks), 0
    for _ in range(40):
        before = drawn(draw)
        found = balanced(before, schedule)
        every = [
            sum(work**8 for work in works(before, (0, *inner, len(before) - 1), schedule))
            for inner in itertools.combinations(range(1, len(before) - 1), schedule.stages - 1)
        ]
        own = sum(work**8 for work in works(before, found, schedule))
        assert found[0] == 0
        assert found[-1] == len(before) - 1
        assert all(start < stop for start, stop in itertools.pairwise(found))
        assert own <= min(every) * 1.1**8
        exact += own <= min(every) * (1 + 1e-9)
    assert exact == 40 if chunks == 1 else exact > 20


def test_as_many_stages_as_regions_have_one_each() -> None:
    assert balanced([0.0, 0.0, 0.0, 0.0, 0.0], named("zb-v", 2, 2, chunks=2)) == (0, 1, 2, 3, 4)
