"""A timeline as a trace that https://ui.perfetto.dev and chrome://tracing draw, in the JSON format of Chrome's trace events.

    {"traceEvents": [{"ph": "X", "pid": 0, "tid": 0, "name": "mlp:linear#0", "cat": "forward", "ts": 1.5, "dur": 0.25}, ...]}

A row (`tid`) for what is computed and waited for, and one for each channel; times are in microseconds. Boundaries are rounded
to nanoseconds, so that slices of a row do not overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from autopar.ir.device import Seconds
from autopar.simulator.timeline import Interval, Timeline

COMPUTING = "computing"
Event = Mapping[str, object]


def trace(timeline: Timeline, name: str = "rank") -> str:
    """The timeline of a rank as one JSON text; `name` is shown above its rows."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": [*_events(timeline, name)]}, allow_nan=False)


def _events(timeline: Timeline, name: str) -> Iterator[Event]:
    channels = dict.fromkeys(sent.transfer.channel for sent in timeline.sent)
    rows = {channel: number for number, channel in enumerate(channels, start=1)}
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}
    for row, text in enumerate((COMPUTING, *(f"messages over {channel}" for channel in channels))):
        yield from row_name(row, text)
    computing: Sequence[Interval] = sorted((*timeline.computing, *timeline.waiting), key=lambda one: (one.start, one.stop))
    for one in computing:
        yield slice_of(0, one.name, one.kind, one.start, one.stop, {})
    for sent in timeline.sent:
        transfer = sent.transfer
        said = {
            "bytes": transfer.bytes,
            "issued us": _microseconds(sent.issued),
            "exposed us": _microseconds(sent.exposed),
            "hidden us": _microseconds(sent.hidden),
        }
        yield slice_of(rows[transfer.channel], transfer.name, transfer.kind, sent.start, sent.stop, said)


def row_name(row: int, text: str, *, process: int = 0) -> Iterator[Event]:
    """The name of a row, and its place among those of its process."""
    yield {"ph": "M", "pid": process, "tid": row, "name": "thread_name", "args": {"name": text}}
    yield {"ph": "M", "pid": process, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}}


def slice_of(row: int, name: str, kind: str, start: Seconds, stop: Seconds, said: Event, *, process: int = 0) -> Event:
    """What a row does between two times."""
    begun, ended = (round(time * 1e9) for time in (start, stop))
    found = {
        "ph": "X",
        "pid": process,
        "tid": row,
        "name": name,
        "cat": kind,
        "ts": begun / 1000,
        "dur": (ended - begun) / 1000,
    }
    return found | ({"args": said} if said else {})


def _microseconds(time: Seconds) -> float:
    return round(time * 1e9) / 1000


__all__ = ["COMPUTING", "Event", "row_name", "slice_of", "trace"]
