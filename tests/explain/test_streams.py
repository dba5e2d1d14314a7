"""Streams of a long step are drawn with few intervals, which stay in their stream and lose neither seconds nor bytes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from autopar.explain.html.streams import MOST, StreamInterval, rank_intervals, stream_intervals
from autopar.pipeline.clock import PipelineTimeline, TimedAction
from autopar.pipeline.schedule import Action, ActionKind
from autopar.simulator.timeline import Await, Computation, Instruction, Issue, Timeline, Transfer, simulate

LAYERS, OPS = 96, 40
RANKS, MICROBATCHES = 16, 400


def deep() -> Timeline:
    """A step of many layers, each of which gathers its weights before it computes."""
    program: list[Instruction] = []
    for layer in range(LAYERS):
        gather = Issue(transfer=Transfer(name=f"all_gather h.{layer}.w", kind="all_gather", channel="dp", bytes=7, seconds=0.5))
        program += [gather, Await(issue=gather)]
        program += [Computation(name=f"h.{layer}.mlp:relu#{op}", kind="forward", seconds=0.25) for op in range(OPS)]
    return simulate(program, 0.5)


def ranks() -> PipelineTimeline:
    """A step of many micro-batches on many ranks."""
    actions = [Action(stage=0, kind=ActionKind.FORWARD, microbatch=number) for number in range(MICROBATCHES)]
    computed = tuple(TimedAction(action=action, start=float(place), stop=place + 1.0) for place, action in enumerate(actions))
    idle = (0.0,) * RANKS
    return PipelineTimeline(seconds=MICROBATCHES + 1.0, computed=(computed,) * RANKS, sent=((),) * RANKS, idle=idle)


def totals(found: list[StreamInterval]) -> dict[str, Counter[str]]:
    kinds: dict[str, Counter[str]] = {}
    for one in found:
        kinds.setdefault(f"{one.stream} {one.kind}", Counter()).update(
            number=one.count, bytes=one.bytes, ms=round(one.seconds * 1e3)
        )
    return kinds


def test_many_intervals_are_joined_by_module_and_few_are_as_they_are() -> None:
    timeline = deep()
    few, all_of_them = stream_intervals(timeline), stream_intervals(timeline, most=10**6)
    assert len(all_of_them) == LAYERS * (OPS + 2)
    assert len(few) <= MOST < len(all_of_them)
    assert totals(few) == totals(all_of_them)
    assert {one.name for one in few if one.kind == "forward"} == {f"h.{layer}.mlp" for layer in range(LAYERS)}
    for stream in {one.stream for one in few}:
        rows = [one for one in few if one.stream == stream]
        assert all(before.stop <= after.start + 1e-9 for before, after in pairwise(rows))


def test_of_many_ranks_with_many_micro_batches_some_are_drawn_whole() -> None:
    found = rank_intervals(ranks(), [1.0] * RANKS, "pp")
    assert len(found) <= MOST
    drawn = Counter(one.stream for one in found)
    assert [*drawn] == ["pp=0", "pp=8", "pp=15"]
    assert set(drawn.values()) == {MICROBATCHES + 1}
    assert len(rank_intervals(ranks(), [0.0] * RANKS, "pp", most=10**6)) == RANKS * MICROBATCHES
