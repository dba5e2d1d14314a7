"""Reduces a step to few enough intervals per stream to draw: if there are too many, neighbours in one module are merged."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.device import Bytes, Seconds
from autopar.pipeline.clock import PipelineTimeline
from autopar.plan.text import folded, wild
from autopar.simulator.schedule_trace import KINDS
from autopar.simulator.timeline import Timeline
from autopar.simulator.trace import COMPUTING

MOST = 1500  # intervals that are drawn
DEPTHS = (None, 8, 6, 5, 4, 3, 2, 1, 0)  # parts of a module's path by which neighbours are joined; at last by their kind alone
WAIT = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInterval:
    """An interval of a stream: `count` ops or messages of one kind, which are busy for `seconds` of it."""

    stream: str
    kind: str
    name: str
    start: Seconds
    stop: Seconds
    seconds: Seconds
    count: int = 1
    bytes: Bytes = 0
    exposed: Seconds = 0.0


def stream_intervals(timeline: Timeline, most: int = MOST) -> list[StreamInterval]:
    """What the streams of a device do: what it computes and waits for, then the messages of each channel."""
    found = [*_computed(timeline), *_sent(timeline)]
    for depth in DEPTHS:
        joined = [*_joined(found, depth)]
        if len(joined) <= most:
            break
    return joined


def _computed(timeline: Timeline) -> Iterator[StreamInterval]:
    for one in sorted((*timeline.computing, *timeline.waiting), key=lambda one: (one.start, one.stop)):
        kind = WAIT if one.kind == "wait" else one.kind
        yield StreamInterval(stream=COMPUTING, kind=kind, name=one.name, start=one.start, stop=one.stop, seconds=one.seconds)


def _sent(timeline: Timeline) -> Iterator[StreamInterval]:
    for one in sorted(timeline.sent, key=lambda one: (one.transfer.channel, one.start)):
        sent = one.transfer
        yield StreamInterval(
            stream=sent.channel, kind=sent.kind.replace("_", "-"), name=sent.name.removeprefix(f"{sent.kind} "),
            start=one.start, stop=one.stop, seconds=one.seconds, bytes=sent.bytes, exposed=one.exposed,
        )  # fmt: skip


def _joined(found: Iterable[StreamInterval], depth: int | None) -> Iterator[StreamInterval]:
    """Merge neighbours of one kind in one module, by so many parts of its path."""
    for (_, _, module), group in itertools.groupby(found, key=lambda one: (one.stream, one.kind, _module(one.name, depth))):
        yield _one(module, [*group])


def _module(name: str, depth: int | None) -> str:
    return name if depth is None else ".".join(name.partition(":")[0].split(".")[:depth])


def _one(module: str, group: Sequence[StreamInterval]) -> StreamInterval:
    if len(group) == 1:
        return group[0]
    names = dict.fromkeys(one.name for one in group)
    name = folded([*names]) if len({*map(wild, names)}) == 1 else module or "several modules"
    return StreamInterval(
        stream=group[0].stream, kind=group[0].kind, name=name, start=group[0].start, stop=group[-1].stop,
        seconds=sum(one.seconds for one in group), count=sum(one.count for one in group),
        bytes=sum(one.bytes for one in group), exposed=sum(one.exposed for one in group),
    )  # fmt: skip


def rank_intervals(timeline: PipelineTimeline, once: Sequence[Seconds], axis: str, most: int = MOST) -> list[StreamInterval]:
    """What the ranks of a pipeline do, by its clock; each ends with its work `once` per step: the optimizer, sums.

    With many ranks and micro-batches it has the first rank, the last, and evenly spaced ones between.
    """
    found = []
    for rank in _ranks(timeline, most):
        computed = timeline.computed[rank]
        stream = f"{axis}={rank}"
        for one in computed:
            name = f"stage {one.action.stage}, micro-batch {one.action.microbatch}"
            start, stop = one.start, one.stop
            kind = KINDS[one.action.kind]
            found.append(StreamInterval(stream=stream, kind=kind, name=name, start=start, stop=stop, seconds=stop - start))
        if once[rank]:
            end = max((one.stop for one in computed), default=0.0)
            kind, name = "once a step", "optimizer and sums of gradients"
            stop = end + once[rank]
            found.append(StreamInterval(stream=stream, kind=kind, name=name, start=end, stop=stop, seconds=once[rank]))
    return found


def _ranks(timeline: PipelineTimeline, most: int) -> list[int]:
    """Ranks with few enough intervals to draw, at least two."""
    last, each = len(timeline.computed) - 1, max(map(len, timeline.computed))
    shown = max(2, min(last + 1, most // (each + 1)))
    return sorted({round(place * last / (shown - 1)) for place in range(shown)})


__all__ = ["WAIT", "StreamInterval", "rank_intervals", "stream_intervals"]
