"""The bound of a schedule over all cuts, against the exact clock for arbitrary stages; some reach it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from autopar.pipeline.clock import Clock, StageSeconds
from autopar.pipeline.named_schedules import named
from autopar.pipeline.schedule import PipelineSchedule, parse
from autopar.pipeline.weight_gradients import waits_filled
from autopar.planning import cut_bound
from autopar.planning.cut_bound import StageSums, least_of_cuts
from autopar.solver.highs import Meaning, load, run, values

SCHEDULES = [
    ("gpipe", 3, 1, 4, 0),
    ("1f1b", 2, 1, 2, 0),
    ("1f1b", 4, 1, 12, 0),
    ("1f1b", 4, 1, 9, 3),
    ("interleaved", 2, 3, 6, 0),
    ("interleaved", 4, 2, 8, 0),
    ("zb-h1", 4, 1, 8, 0),
    ("zb-h1", 4, 1, 10, 2),
    ("zb-v", 2, 2, 4, 0),
    ("zb-v", 4, 2, 12, 0),
]
MIXED = "0F0,0F1,0B0,0I1,0W1\n1F0,1I0,1F1,1W0,1B1"  # a backward in one piece beside one in halves
further = pytest.mark.thorough


def scheduled(name: str, ranks: int, chunks: int, runs: int, ahead: int) -> PipelineSchedule:
    return parse(MIXED) if name == "mixed" else named(name, ranks, runs, chunks=chunks, ahead=ahead)


def together(work: float, forward: float, once: float) -> StageSums:
    """Stages of which nothing is known of I alone."""
    return StageSums(work=work, forward=forward, inputs=0.0, once=once)


def random_stages(schedule: PipelineSchedule, draw: random.Random, message: float) -> Iterator[list[StageSeconds]]:
    """Stages of any proportions, and stages that are alike but for their size, some of them empty."""
    for alike in (False, True) * 6:
        sizes = [draw.choice((0.0, 1.0, draw.random(), 3 * draw.random())) for _ in range(schedule.stages)]
        parts = [draw.random() for _ in range(4)]
        yield [
            StageSeconds(
                forward=size * (parts if alike else [draw.random()])[0],
                backward_input=size * (parts[1] if alike else draw.choice((0.0, draw.random()))),
                backward_weight=size * (parts[2] if alike else draw.random()),
                once=size * (parts[3] if alike else 4 * draw.random()),
                activations=message + draw.choice((0.0, draw.random())),
                gradients=message + draw.choice((0.0, draw.random())),
            )
            for size in sizes
        ]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=further) for seed in range(1, 12))])
@pytest.mark.parametrize("named_so", [("mixed", 2, 1, 2, 0), *SCHEDULES], ids=str)
def test_no_stages_are_faster_than_the_bound_that_others_give(named_so: tuple[str, int, int, int, int], seed: int) -> None:
    """Each bound holds for all stages, not for those alone by whose sums it was made."""
    schedule, draw = scheduled(*named_so), random.Random(f"{named_so} {seed}")
    message = draw.choice((0.0, 0.1))
    cases = list(random_stages(schedule, draw, message))
    clock = Clock(schedule)
    bounds = [least_of_cuts(schedule, StageSums.of(stages), activations=message, gradients=message) for stages in cases]
    for stages in cases:
        seconds = clock.seconds(stages) if named_so[0] == "mixed" else waits_filled(schedule, stages)[1]
        own = StageSums.of(stages)
        for bound in bounds:
            assert min(bound.messages, bound.work, bound.forward, bound.inputs, bound.once) >= 0
            assert bound.seconds(own) <= seconds * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("named_so", SCHEDULES[:6], ids=str)
def test_some_stages_reach_the_bound(named_so: tuple[str, int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With all starts, and without a W that a rank could run in parts, those of the solution are, by the exact clock."""
    schedule, found = scheduled(*named_so), list[list[float]]()
    monkeypatch.setattr(cut_bound, "WINDOW", 1000)
    monkeypatch.setattr(cut_bound, "values", lambda solver: found.append(values(solver).tolist()) or np.array(found[-1]))
    for own in (together(3.0, 1.0, 0.0), together(3.0, 1.5, 8.0), together(1.0, 0.0, 0.1)):
        bound = least_of_cuts(schedule, own, activations=0.01, gradients=0.02).seconds(own)
        unit = (schedule.microbatches * own.work + own.once) / len(schedule.ranks)
        stages = [
            StageSeconds(
                forward=unit * forward, backward_input=unit * first, backward_weight=unit * second, once=unit * once,
                activations=0.01, gradients=0.02,
            )
            for forward, first, second, once in np.array(found[-1])[: 4 * schedule.stages].reshape(-1, 4).tolist()
        ]  # fmt: skip
        reached = StageSums.of(stages)
        assert min(reached.work - own.work, reached.forward - own.forward, reached.once - own.once) >= -1e-6
        assert 0.98 * Clock(schedule).seconds(stages) <= bound <= Clock(schedule).seconds(stages) * (1 + 1e-6)


@pytest.mark.parametrize("ranks, runs, most", [(1, 5, 1.0), (2, 2, 1.0), (2, 9, 1.05), (3, 4, 1.16), (4, 16, 1.09)])
def test_the_bound_of_1f1b_is_about_that_of_an_ideal_pipeline_of_unequal_stages(ranks: int, runs: int, most: float) -> None:
    """With c = 1 - 1/m, stage s of c^s times the work of the first makes all of (path) in `pipeline.stage_search` equal: of the
    work t of all, T = t / (1 - c^p) by any order of work. That of the schedule takes longer."""
    ideal = 1 / (1 - (1 - 1 / runs) ** ranks)
    own = together(1.0, 0.0, 0.0)
    bound = least_of_cuts(scheduled("1f1b", ranks, 1, runs, 0), own).seconds(own)
    assert (1 - 1e-3) * ideal <= bound <= most * ideal * (1 + 1e-9)


def test_a_message_counts_as_often_as_the_first_micro_batch_crosses() -> None:
    """Of three ranks by gpipe: two crossings there, two back."""
    own = together(3.0, 1.0, 0.0)
    bound = least_of_cuts(scheduled("gpipe", 3, 1, 1, 0), own, activations=0.5, gradients=0.25)
    assert bound.seconds(own) == pytest.approx(3.0 + 2 * 0.5 + 2 * 0.25)


@pytest.mark.parametrize("named_so", [("1f1b", 4, 1, 48, 0), ("interleaved", 4, 2, 32, 0), ("zb-v", 4, 2, 40, 0)], ids=str)
def test_a_steady_state_hardly_needs_starts(named_so: tuple[str, int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, own = scheduled(*named_so), StageSums(work=3.0, forward=1.1, inputs=2.1, once=4.0)
    few = least_of_cuts(schedule, own).seconds(own)
    monkeypatch.setattr(cut_bound, "WINDOW", 1000)
    assert few == pytest.approx(least_of_cuts(schedule, own).seconds(own), rel=1e-3)


@pytest.mark.parametrize("runs, ahead, share", [(8, 0, 0.93), (16, 0, 0.96), (16, 3, 0.96)])
def test_halves_of_backwards_have_a_bound_near_equal_stages(runs: int, ahead: int, share: float) -> None:
    """Of F, I and W that take equally long: were nothing known of F and I together, most of a backward might be W."""
    schedule = scheduled("zb-h1", 4, 1, runs, ahead)
    stages = [StageSeconds(forward=1.0, backward_input=1.0, backward_weight=1.0)] * 4
    own, seconds = StageSums.of(stages), waits_filled(schedule, stages)[1]
    bounds = [least_of_cuts(schedule, known).seconds(known) for known in (replace(own, inputs=0.0), own)]
    assert bounds[0] < bounds[1]
    assert share * seconds <= bounds[1] <= seconds


@pytest.mark.parametrize("named_so", [("zb-h1", 4, 1, 8, 0), ("zb-h1", 4, 1, 10, 2), ("zb-v", 4, 2, 12, 0)], ids=str)
def test_stages_that_are_given_take_what_the_clock_says_with_w_where_ranks_wait(
    named_so: tuple[str, int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A W that was free to come at any time, whatever its rank holds then, would make the bound of some 4% less."""
    monkeypatch.setattr(cut_bound, "WINDOW", 1000)
    schedule, draw, shares = scheduled(*named_so), random.Random(str(named_so)), list[float]()
    for _ in range(12):
        parts = np.array([[draw.uniform(0.8, 1.2), 1.3 * draw.uniform(0.8, 1.2), 0.6, 2.0] for _ in range(schedule.stages)])
        matrix = cut_bound._Starts(schedule, 0.02, 0.02).matrix
        for place, part in enumerate(parts.ravel().tolist()):
            matrix.add_row(np.array([place]), np.ones(1), part, part)
        solver = load(matrix.block(np.concatenate(matrix.costs)))
        assert run(solver) is Meaning.SOLVED
        stages = [
            StageSeconds(
                forward=f, backward_input=i, backward_weight=w, once=once, activations=0.02, gradients=0.02,
            )
            for f, i, w, once in parts.tolist()
        ]  # fmt: skip
        shares.append(float(values(solver)[4 * schedule.stages]) / waits_filled(schedule, stages)[1])
    assert max(shares) <= 1 + 1e-9
    assert min(shares) > 0.97


def test_what_takes_no_time_is_bounded_by_none() -> None:
    assert least_of_cuts(scheduled("1f1b", 2, 1, 2, 0), none := together(0.0, 0.0, 0.0)).seconds(none) == 0.0
