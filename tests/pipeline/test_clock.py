"""The clock: published formulas exactly, an event simulation in any order, bounds from both sides."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.pipeline.clock import Clock, StageSeconds, least_seconds
from autopar.pipeline.dependencies import made, needed
from autopar.pipeline.named_schedules import named
from autopar.pipeline.schedule import Action, PipelineSchedule, parse
from tests.pipeline.orders import any_schedule, any_seconds

SIZES = list(itertools.product(range(1, 9), (1, 2, 3, 4, 6, 8, 12, 16, 24)))


def equal(stages: int, forward: float, backward_input: float, backward_weight: float = 0.0) -> list[StageSeconds]:
    one = StageSeconds(forward=forward, backward_input=backward_input, backward_weight=backward_weight)
    return [one] * stages


def in_flight(schedule: PipelineSchedule, *, deferred: bool = False) -> list[int]:
    return [schedule.in_flight(rank, deferred=deferred) for rank in range(len(schedule.ranks))]


@pytest.mark.parametrize("p, m", SIZES)
def test_equal_stages_take_what_is_published(p: int, m: int) -> None:
    f, i, w = 1.0, 1.5, 0.5
    for name, held in {"gpipe": [m] * p, "1f1b": [min(m, p - r) for r in range(p)]}.items():
        schedule = named(name, p, m)
        timeline = Clock(schedule).run(equal(p, f, i, w))
        assert timeline.seconds == (m + p - 1) * (f + i + w)
        assert timeline.idle == ((p - 1) * (f + i + w),) * p
        assert timeline.bubble == (p - 1) / (m + p - 1)
        assert in_flight(schedule) == held


@pytest.mark.parametrize("p, m", [(p, m) for p, m in SIZES if m % p == 0])
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaving_by_v_chunks_divides_the_bubble_by_v(p: int, m: int, v: int) -> None:
    schedule, f, b = named("interleaved", p, m, chunks=v), 1.0, 2.0
    assert Clock(schedule).seconds(equal(p * v, f, b)) == m * v * (f + b) + (p - 1) * (f + b)
    assert in_flight(schedule) == [min(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in range(p)]


@pytest.mark.parametrize("p, m", [(p, m) for p, m in SIZES if m >= p])
@pytest.mark.parametrize("f, i, w", [(1, 1, 1), (2, 2, 1), (3, 2, 2), (1, 2, 1), (1, 2, 3)])
def test_zb_h1_fills_the_bubble_with_backwards_of_weights(p: int, m: int, f: float, i: float, w: float) -> None:
    schedule = named("zb-h1", p, m)
    seconds = Clock(schedule).seconds(equal(p, f, i, w))
    if w <= min(f, i):
        assert seconds == m * (f + i + w) + (p - 1) * (f + i - w)
    assert seconds <= (m + p - 1) * (f + i + w)
    assert in_flight(schedule) == [p - r for r in range(p)]
    assert max(in_flight(schedule, deferred=True)) <= p


@pytest.mark.parametrize("p, m", [(p, m) for p, m in SIZES if m >= 2 * p - 1])
@pytest.mark.parametrize("f, i, w", [(1, 1, 1), (2, 2, 1), (3, 2, 2), (1, 3, 1)])
def test_zb_h1_with_forwards_ahead_idles_as_h2_and_no_less_than_the_first_micro_batch_needs(
    p: int, m: int, f: float, i: float, w: float
) -> None:
    """H2 of Qi et al., 2024, idles for (p - 1) (f + i - 2 w), where ranks end their steps one after the other."""
    schedule = named("zb-h1", p, m, ahead=p - 1)
    assert Clock(schedule).seconds(equal(p, f, i, w)) == m * (f + i + w) + (p - 1) * max(f, f + i - 2 * w)
    assert in_flight(schedule, deferred=True) == [2 * p - 1] * p


@pytest.mark.parametrize("p, m", [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_zb_v_idles_for_one_forward_of_a_chunk_per_rank(p: int, m: int) -> None:
    schedule = named("zb-v", p, m, chunks=2)
    assert Clock(schedule).seconds(equal(2 * p, 1, 1, 1)) == 6 * m + p - 1
    assert max(in_flight(schedule, deferred=True)) <= 2 * p


def by_events(schedule: PipelineSchedule, stages: Sequence[StageSeconds]) -> float:
    """The step as a simulation of what happens next: ends of actions, and arrivals on links that hold a queue each."""
    todo = [deque(actions) for actions in schedule.ranks]
    rank_of, last = schedule.rank_of, schedule.stages - 1
    there: set[tuple[int, object]] = set()  # what is on which rank
    queues: dict[tuple[int, int], deque[tuple[Action, float]]] = {}
    busy, ended = [False] * len(todo), [0.0] * len(todo)
    events: list[tuple[float, int, str, int, Action]] = []
    count = itertools.count()

    def begin(now: float) -> None:
        for rank, actions in enumerate(todo):
            if actions and not busy[rank]:
                need = needed(actions[0], schedule.stages)
                if need is None or (rank, need) in there:
                    action = actions.popleft()
                    busy[rank] = True
                    heapq.heappush(events, (now + stages[action.stage].of(action.kind), next(count), "end", rank, action))

    def transmit(now: float, link: tuple[int, int]) -> None:
        action, seconds = queues[link][0]
        heapq.heappush(events, (now + seconds, next(count), "arrival", link[1], action))

    begin(0.0)
    while events:
        now, _, what, rank, action = heapq.heappop(events)
        there.add((rank, made(action)))
        source = rank_of[action.stage]
        if what == "arrival":
            queues[source, rank].popleft()
            if queues[source, rank]:
                transmit(now, (source, rank))
        else:
            busy[rank], ended[rank] = False, now
            to = {"F": action.stage + 1, "W": -1}.get(action.kind, action.stage - 1)
            if 0 <= to <= last and rank_of[to] != rank:
                one = stages[action.stage]
                queue = queues.setdefault((rank, rank_of[to]), deque())
                queue.append((action, one.activations if action.kind == "F" else one.gradients))
                if len(queue) == 1:
                    transmit(now, (rank, rank_of[to]))
        begin(now)
    assert not any(todo)
    once = [sum(one.once for s, one in enumerate(stages) if rank_of[s] == rank) for rank in range(len(todo))]
    return max(a + b for a, b in zip(ended, once, strict=True))


def test_any_order_takes_what_a_simulation_by_events_says() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        schedule = any_schedule(draw)
        stages = any_seconds(draw, schedule.stages)
        assert Clock(schedule).seconds(stages) == pytest.approx(by_events(schedule, stages), rel=1e-12)


def test_a_timeline_is_consistent() -> None:
    """Neither a rank nor a link does two things at once, and what is idle is the rest."""
    draw = random.Random(1)
    for _ in range(200):
        schedule = any_schedule(draw)
        stages = any_seconds(draw, schedule.stages)
        clock = Clock(schedule)
        timeline = clock.run(stages)
        assert timeline.seconds == clock.seconds(stages)
        for rank, computed in enumerate(timeline.computed):
            assert tuple(one.action for one in computed) == schedule.ranks[rank]
            assert all(a.stop <= b.start for a, b in itertools.pairwise(computed))
            once = sum(one.once for s, one in enumerate(stages) if schedule.rank_of[s] == rank)
            busy = once + sum(stages[one.action.stage].of(one.action.kind) for one in computed)
            assert timeline.idle[rank] == pytest.approx(timeline.seconds - busy)
            for to in range(len(schedule.ranks)):
                sent = [
                    one for one in timeline.sent[rank]
                    if schedule.rank_of[one.action.stage + (1 if one.action.kind == "SEND_F" else -1)] == to
                ]  # fmt: skip
                assert to != rank or not sent
                assert all(a.stop <= b.start for a, b in itertools.pairwise(sent))


def test_one_message_at_a_time_passes_a_link() -> None:
    """Two forwards of one second each, messages of three: the second waits for the first, 1 + 3 + 3, then 1 + 1 and back, 3."""
    stages = [StageSeconds(forward=1, backward_input=1, activations=3, gradients=3)] * 2
    timeline = Clock(parse("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1")).run(stages)
    assert [(str(one.action), one.start, one.stop) for one in timeline.sent[0]] == [("0SEND_F0", 1, 4), ("0SEND_F1", 4, 7)]
    assert [(str(one.action), one.start, one.stop) for one in timeline.sent[1]] == [("1SEND_B0", 9, 12), ("1SEND_B1", 12, 15)]
    assert timeline.seconds == 16


def test_forwards_ahead_hide_messages() -> None:
    """Eight ranks, 64 micro-batches, messages of a tenth of a forward: seven more in flight hide what is not at the ends."""
    stages = [StageSeconds(forward=1, backward_input=2, activations=0.1, gradients=0.1)] * 8
    plain, ahead = (Clock(named("1f1b", 8, 64, ahead=ahead)).seconds(stages) for ahead in (0, 7))
    assert ahead == pytest.approx(71 * 3 + 7 * 0.2)
    assert plain == pytest.approx(225.4)


def test_without_messages_1f1b_takes_at_most_what_alpa_says() -> None:
    """sum t + (m - 1) max t (Zheng et al., OSDI 2022), exact where stages are equal; at least the work behind every head."""
    draw, excess = random.Random(2), []
    for _ in range(500):
        p, m = draw.randint(1, 8), draw.choice((1, 2, 4, 8, 16, 32))
        stages = [replace(one, once=0.0) for one in any_seconds(draw, p, messages=False)]
        seconds, work = Clock(named("1f1b", p, m)).seconds(stages), [one.busy for one in stages]
        alpa = sum(work) + (m - 1) * max(work)
        assert max(sum(work[:s]) + m * work[s] for s in range(p)) <= seconds * (1 + 1e-12)
        assert seconds <= alpa * (1 + 1e-12)
        excess.append(alpa / seconds - 1)
    assert max(excess) > 0.1


def test_what_some_stages_take_is_a_bound_of_the_whole() -> None:
    draw, reached = random.Random(11), 0
    for _ in range(300):
        schedule = any_schedule(draw)
        seconds = any_seconds(draw, schedule.stages)
        known = [least_seconds(schedule, seconds[:count]) for count in range(1, schedule.stages + 1)]
        took = Clock(schedule).seconds(seconds)
        assert known == sorted(known)
        assert known[-1] <= took * (1 + 1e-12)
        reached += known[-1] >= 0.999 * took
    assert reached > 5  # where ranks never wait
    for name in ("gpipe", "1f1b"):
        schedule = named(name, 4, 8)
        assert least_seconds(schedule, equal(4, 1, 1, 1)) == Clock(schedule).seconds(equal(4, 1, 1, 1))
