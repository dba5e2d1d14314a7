"""A pipeline's step as a trace in the format of `simulator.trace`: a process per rank, with what it computes and sends.

{"traceEvents": [{"ph": "X", "pid": 1, "tid": 0, "name": "1F0", "cat": "forward", "ts": 250.0, "dur": 280.0}, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from autopar.ir.device import Seconds
from autopar.pipeline.clock import PipelineTimeline, TimedAction
from autopar.pipeline.schedule import ActionKind
from autopar.simulator.trace import COMPUTING, Event, row_name, slice_of

KINDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward of inputs",
    ActionKind.BACKWARD_WEIGHT: "backward of weights",
    ActionKind.SEND_F: "activations",
    ActionKind.SEND_B: "gradients",
}


def schedule_trace(timeline: PipelineTimeline, once: Sequence[Seconds], axis: str) -> str:
    """The step of a pipeline as one JSON text.

    Args:
        timeline: from the clock.
        once: seconds that each rank takes once, at the end of a step: the optimizer, sums of gradients.
        axis: the mesh axis of the stages, which names the ranks.
    """
    events = [event for rank in range(len(timeline.computed)) for event in _rank(timeline, rank, once[rank], axis)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=False)


def _rank(timeline: PipelineTimeline, rank: int, once: Seconds, axis: str) -> Iterator[Event]:
    """What one rank does."""
    computed, sent = timeline.computed[rank], timeline.sent[rank]
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"{axis}={rank}"}}
    rows = [COMPUTING, "sends to the next stage", "sends to the stage before"]
    for row, text in enumerate(rows):
        yield from row_name(row, text, process=rank)
    for one in computed:
        yield _slice(0, one, rank)
    if once:
        ended = max((one.stop for one in computed), default=0.0)
        yield slice_of(0, "once a step", "once", ended, ended + once, {}, process=rank)
    for one in sent:
        yield _slice(1 if one.action.kind == ActionKind.SEND_F else 2, one, rank)


def _slice(row: int, one: TimedAction, rank: int) -> Event:
    said = {"stage": one.action.stage, "micro-batch": one.action.microbatch}
    return slice_of(row, str(one.action), KINDS[one.action.kind], one.start, one.stop, said, process=rank)


__all__ = ["schedule_trace"]
