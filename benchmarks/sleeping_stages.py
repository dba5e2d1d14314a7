"""Stages that sleep for known times, run by every schedule as models are: what `pipeline_step.py` holds beside the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.pipeline.clock import Clock, StageSeconds
from autopar.pipeline.named_schedules import CHUNKS, named
from autopar.pipeline.transfers import with_messages
from autopar.runtime.deferred_products import DeferredProducts
from autopar.runtime.gradient_accumulation import GradientAccumulator
from autopar.runtime.pipeline import CrossingPart, PipelineRank, PipelineStep, StageRun
from autopar.runtime.rank_failures import StepFailures

RANKS, MICROBATCHES = 4, 8
UNIT = 0.15  # seconds of a forward of an equal stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleeping:
    """A schedule and the seconds of its stages, which are equal or not."""

    name: str
    kind: str

    @property
    def chunks(self) -> int:
        return 2 if self.name == "interleaved" else CHUNKS[self.name.partition("+")[0]]

    @property
    def stages(self) -> list[StageSeconds]:
        """Forward, I and W of each stage; unequal ones take 0.6 to 1.4 times as long."""
        share = [1.0 if self.kind == "equal" else 0.6 + 0.8 * (place * 5 % 7) / 6 for place in range(RANKS * self.chunks)]
        unit = [UNIT * one / self.chunks for one in share]
        return [StageSeconds(forward=one, backward_input=1.2 * one, backward_weight=0.8 * one) for one in unit]


CASES = [
    Sleeping(name=name, kind=kind)
    for name in ("gpipe", "1f1b", "1f1b+2", "interleaved", "zb-h1", "zb-h1+2", "zb-v")
    for kind in ("equal", "unequal")
]


class _Sleep(torch.autograd.Function):
    """The input, after a sleep; so its gradient, and after another one the weight's, at once or deferred."""

    @staticmethod
    def forward(ctx, x, w, seconds, deferred):  # type: ignore[no-untyped-def]
        ctx.given = seconds, deferred, w
        time.sleep(seconds.forward)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        seconds, deferred, w = ctx.given
        time.sleep(seconds.backward_input)
        deferred.add(torch.autograd.graph.get_gradient_edge(w), lambda: (time.sleep(seconds.backward_weight), w.new_ones(1))[1])
        return dy.clone(), None, None, None


def measured(case: Sleeping) -> dict[str, float]:
    """Seconds of a step by the clock, and on the slowest rank: the shortest of three."""
    base, _, ahead = case.name.partition("+")
    order = named(base, RANKS, MICROBATCHES, chunks=case.chunks, ahead=int(ahead or 0))
    lowered = with_messages(order, case.stages)
    rank, last = dist.get_rank(), order.stages - 1
    part = CrossingPart(name="x", shape=(1,), dtype=torch.float32, gradient=True)

    def stage(number: int) -> StageRun:
        weight, deferred = torch.ones(1, requires_grad=True), DeferredProducts()

        def forward(k: int, received: list[torch.Tensor]) -> list[torch.Tensor]:
            x = received[0] if received else torch.ones(1, requires_grad=True)
            return [_Sleep.apply(x, weight, case.stages[number], deferred).sum(0, keepdim=number != last)]

        ends = [part] if number else [], [part] if number < last else []
        return StageRun(
            forward=forward, received=tuple(ends[0]), sent=tuple(ends[1]), accumulator=GradientAccumulator(), deferred=deferred
        )

    stages = {number: stage(number) for number, at in order.rank_of.items() if at == rank}
    alone = PipelineRank(index=rank, group=dist.group.WORLD, device=torch.device("cpu"), failures=StepFailures(""))
    seconds = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        PipelineStep(lowered, stages, alone, lambda outputs: outputs[0]).run()
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(float(took))
    return {"clock": Clock(order).seconds(case.stages), "measured": min(seconds)}
