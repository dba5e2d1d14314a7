"""The pipeline sections of a printed plan: its stages, and a picture of the schedule.

rank 0  000111222333...aaaaaa...bbbbbb      forwards of micro-batches as digits, their backwards as letters; . is idle
rank 1  ...000aaaaaa111bbbbbb......
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.pipeline.clock import TimedAction
from autopar.pipeline.schedule import ActionKind
from autopar.plan.pipeline import Pipeline
from autopar.plan.text import Part, by_block, folded, grid, milliseconds, size_text

if TYPE_CHECKING:
    from autopar.plan.plan import Plan

WIDTH = 72  # columns of the picture
RANKS = 8  # whose memory is told
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def pipeline_tables(plan: Plan, pipeline: Pipeline) -> Iterator[Part]:
    """The stages of a plan, what crosses between them, and the timeline of the schedule."""
    yield from _stages(plan, pipeline)
    yield ""
    yield from picture(pipeline)


def summary(plan: Plan, pipeline: Pipeline) -> str:
    """A pipeline in a line."""
    found = f"{len(plan.stages)} stages over {pipeline.axis}, {pipeline.schedule}, {plan.microbatches} micro-batches"
    return f"{found}; ranks are idle for {pipeline.timeline.bubble:.1%} of the step"


def _stages(plan: Plan, pipeline: Pipeline) -> Iterator[Part]:
    names = "stage", "rank", "from module", "forward", "backward", "once", "in flight", "memory", "sends", "bytes"
    table = grid(*names, right=(3, 4, 5, 6, 7, 9))
    for stage, (module, seconds) in enumerate(zip(pipeline.modules, pipeline.seconds, strict=True)):
        sent = [crossing for crossing in pipeline.crossings if crossing.stage == stage]
        layouts = dict.fromkeys(crossing.layout for crossing in sent)
        table.add_row(
            str(stage),
            str(pipeline.order.rank_of[stage]),
            module or "the model",
            milliseconds(seconds.forward),
            milliseconds(seconds.backward_input + seconds.backward_weight),
            milliseconds(seconds.once),
            str(pipeline.in_flight(stage)),
            size_text(plan.stages[stage].peak_memory),
            f"{', '.join(map(folded, by_block(crossing.value for crossing in sent)))} as {'; '.join(layouts)}" if sent else "",
            size_text(sum(crossing.bytes for crossing in sent)) if sent else "",
        )
    yield table
    yield "forward, backward and bytes: of one micro-batch; once: the optimizer and sums of gradients; in ms"
    if len(plan.stages) > len(pipeline.ranks):
        held = map(size_text, pipeline.memory if len(pipeline.ranks) <= RANKS else [plan.peak_memory])
        yield f"memory: of a stage at its own peak; a rank holds at most {', '.join(held)} with all of its stages"
    for name, stages in pipeline.tied.items():
        yield f"{name} is stored by stages {', '.join(map(str, stages))}; its gradients are added up once a step"


def picture(pipeline: Pipeline) -> Iterator[str]:
    """One line per rank: what it computes from the beginning of the step to its end."""
    timeline = pipeline.timeline
    for rank, computed in enumerate(timeline.computed):
        line = ["."] * WIDTH
        for timed in computed:
            start, stop = (round(WIDTH * when / (timeline.seconds or 1.0)) for when in (timed.start, timed.stop))
            line[start:stop] = _sign(timed) * (stop - start)
        yield f"rank {rank}  {''.join(line)}"
    yield "digits: forwards of micro-batches, letters: their backwards, dots: idle, or what is done once"


def _sign(timed: TimedAction) -> str:
    number = timed.action.microbatch
    return str(number % 10) if timed.action.kind == ActionKind.FORWARD else LETTERS[number % len(LETTERS)]


__all__ = ["picture", "pipeline_tables", "summary"]
