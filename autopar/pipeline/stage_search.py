"""Searches for the cut of a program into contiguous stages with the shortest step under a given schedule.

With f, i, w the seconds of a stage's forward and of the halves of its backward, d = i + w (d = i where the schedule has
halves), a and g its messages forward and backward, o its work once a step, and m micro-batches, every order of the ranks'
actions satisfies

    (path)  T >= sum_{q<s} (f_q + a_q + d_q + g_{q+1}) + m (f_s + d_s) + [w_0] + o_0        every stage s
    (own)   T >= sum_{q<s} (f_q + a_q) + m (f_s + i_s + w_s) + o_s                            every stage s

since the first micro-batch must reach a stage, the stage must process all of them, and the last must travel back. [w_0] applies
if the schedule has halves. For a rank with several stages both hold for the sum of their work, behind the head of the first
one. With n_q ranks whose first stage is behind stage q, the means of (path) and (own) over the p ranks are

    (mean) T >= 1/p sum_s [ m (f_s + d_s) + n_s (f_s + a_s + d_s + g_{s+1}) ] + [w_0] + o_0
    (work) T >= 1/p sum_s [ m (f_s + i_s + w_s) + o_s + n_s (f_s + a_s) ]

Each is a maximum or a sum over stages, so dynamic programming over (stage, regions left) gives its exact minimum over all
completions. The largest of these minima is the bound of a search node. The search visits partitions in the order of their
bounds and times them by the clock, until the next bound is no better than the best time, which is then proven optimal. If a
good partition is known, stages that alone take longer than its step, by (own), are left out.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.pipeline.clock import Clock, StageSeconds, clock_of
from autopar.pipeline.cut_moves import improved, paced
from autopar.pipeline.schedule import ActionKind, PipelineSchedule
from autopar.pipeline.stage_table import Cuts, StageArray, StageTable

NODES = 4000  # search nodes: as many as the clock can time in a few seconds
ROUNDING = 1e-9  # relative error of sums of seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePartition:
    """Stage s has the regions from cuts[s] to cuts[s + 1], exclusive; a step takes `seconds`.

    No partition takes less than `bound`; if this one is proven optimal, `bound` is `seconds`. `simulations` counts the
    partitions that were timed.
    """

    cuts: Cuts
    seconds: float
    bound: float
    simulations: int

    @property
    def proven(self) -> bool:
        """Whether no partition is faster."""
        return self.bound >= self.seconds


def partition(
    schedule: PipelineSchedule,
    tables: Sequence[StageTable],
    *,
    nodes: int = NODES,
    simulations: int = NODES,
    start: Cuts | None = None,
    more: int = 0,
) -> StagePartition | None:
    """The partition with the shortest step under a schedule; None if there is no feasible one.

    Args:
        schedule: a complete schedule, without messages.
        tables: the possible stages at each position; the memory of a rank with several stages is divided among them beforehand.
        nodes: the most search nodes; if they run out, the result is the best partition found, with the least open bound.
        simulations: the limit for improving a good start: see `cut_moves`.
        start: cuts that are known to be good.
        more: micro-batches that a step has beyond those of the schedule, in its steady state.
    """
    return _Search(schedule, tables, simulations, start, more).best(nodes)


@dataclass(frozen=True, slots=True, order=True)
class _Node:
    """The stages decided so far: their cuts, their share of each bound, and the largest lower bound that is certain."""

    bound: float
    missing: int  # undecided stages: of two nodes with equal bounds the more complete one comes first
    cuts: Cuts
    path: float = 0.0
    head: float = 0.0
    mean: float = 0.0
    work: float = 0.0
    most: float = 0.0
    tail: float = 0.0


DONE = (-math.inf, -math.inf, 0.0, 0.0)  # contribution of no stage to (path), (own), (mean) and (work)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Contributions of some stages to the bounds, in seconds."""

    back: StageArray  # delay of a micro-batch's gradient
    passed: StageArray  # until a micro-batch's activations reach the next stage
    returned: StageArray  # transfer of a gradient to the previous stage
    there: StageArray  # of all micro-batches, in (path)
    busy: StageArray  # of all micro-batches, in (own)
    once: StageArray  # once a step
    tail: StageArray  # at the end of a first stage
    share: StageArray  # in (mean)
    done: StageArray  # in (work)

    def least(self, rest: StageArray) -> StageArray:
        """The contributions of these stages and of those behind them, given the contributions `rest` of the latter."""
        path, own, mean, work = rest
        return np.stack(
            (
                self.returned + np.maximum(self.there, self.passed + self.back + path),
                np.maximum(self.busy + self.once, self.passed + own),
                self.share + mean,
                self.done + work,
            )
        )


class _Search:
    """`fits` says for each stage which ranges of regions it may have, so that all other stages can have some; `rest` has, by
    stage and first region, the least contribution of it and all later stages to the four bounds."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        tables: Sequence[StageTable],
        simulations: int,
        start: Cuts | None,
        more: int,
    ) -> None:
        self.schedule, self.clock, self.simulations = schedule, clock_of(schedule), simulations
        self.count, self.m, self.more = schedule.stages, schedule.microbatches + more, more
        self.halves = any(row.action.kind == ActionKind.BACKWARD_INPUT for row in self.clock.rows)
        self.tables, regions = tables, len(tables[0].fits)
        places = [[stage for stage, on in sorted(schedule.rank_of.items()) if on == r] for r in range(len(schedule.ranks))]
        self.firsts = {stages[0]: stages for stages in places}  # first stage of a rank -> all its stages
        self.behind = [sum(first > stage for first in self.firsts) / len(places) for stage in range(self.count)]
        apart = [schedule.rank_of[stage] != schedule.rank_of[stage + 1] for stage in range(self.count - 1)]
        self.sends_on, self.sends_back = [*apart, False], [False, *apart]
        self.timed: dict[Cuts, float] = {}
        self.descended = 0  # cuts timed to improve a start
        self.known: dict[tuple[int, int, int], StageSeconds] = {}
        self.ways: dict[tuple[int, int], tuple[list[int], _Parts, StageArray]] = {}
        self.fits = [table.fits & ~np.tri(regions, regions + 1, dtype=bool) for table in tables]
        self.start, longest = self._start(start)
        self.rest = np.full((self.count + 1, 4, regions + 1), math.inf)
        self.rest[self.count] = np.array(DONE)[:, None]
        able = np.arange(regions + 1) == regions  # regions at which the later stages may begin
        for stage in reversed(range(self.count)):
            parts = self._parts(stage, tables[stage].seconds)
            self.fits[stage] &= able & (parts.busy + parts.once <= longest)
            least = np.where(self.fits[stage], parts.least(self.rest[stage + 1][:, None]), math.inf)
            self.rest[stage, :, :regions] = least.min(axis=2)
            able = np.append(self.fits[stage].any(axis=1), False)

    def _start(self, cuts: Cuts | None) -> tuple[Cuts | None, float]:
        """The known cuts, if all their stages fit, and the seconds of their step: a stage that takes longer is useless."""
        if not cuts or not self._feasible(cuts):
            return None, math.inf
        return cuts, self._time(cuts) * (1 + ROUNDING)

    def _parts(self, stage: int, seconds: StageArray) -> _Parts:
        """The contributions to the bounds of stages with these seconds, at a position of the pipeline."""
        forward, first, second, activations, gradients, once = seconds
        back = first if self.halves else first + second
        passed = forward + activations if self.sends_on[stage] else forward
        returned = gradients if self.sends_back[stage] else np.zeros_like(gradients)
        there, busy = self.m * (forward + back), self.m * (forward + first + second)
        ranks, before, behind = len(self.schedule.ranks), self.behind[stage - 1] if stage else 0.0, self.behind[stage]
        return _Parts(
            back=back,
            passed=passed,
            returned=returned,
            there=there,
            busy=busy,
            once=once,
            tail=once + second if self.halves else once,
            share=there / ranks + before * returned + behind * (passed + back),
            done=(busy + once) / ranks + behind * passed,
        )

    def _ways(self, stage: int, start: int) -> tuple[list[int], _Parts, StageArray]:
        """Where a stage that begins at a region may stop, with each choice's contributions, alone and with all later stages."""
        if (stage, start) not in self.ways:
            stops = np.flatnonzero(self.fits[stage][start])
            parts = self._parts(stage, self.tables[stage].seconds[:, start, stops])
            self.ways[stage, start] = stops.tolist(), parts, parts.least(self.rest[stage + 1][:, stops])
        return self.ways[stage, start]

    def best(self, nodes: int) -> StagePartition | None:
        if not self.fits[0][0].any():
            return None
        heap = [_Node(0.0, self.count, (0,))]
        best: tuple[float, Cuts] = self._descend(self.start) if self.start else (math.inf, ())
        while heap and nodes and heap[0].bound < best[0]:
            node, nodes = heapq.heappop(heap), nodes - 1
            if node.missing:
                for child in self._children(node):
                    heapq.heappush(heap, child)
            elif math.isinf(best[0]):
                best = self._descend(node.cuts)
            else:
                best = min(best, (self._time(node.cuts), node.cuts))
        if math.isinf(best[0]):
            best = self._descend(self._first(heap[0]))
        bound = min([best[0], *(node.bound for node in heap[:1])])
        return StagePartition(cuts=best[1], seconds=best[0], bound=bound, simulations=len(self.timed) + self.descended)

    def _children(self, node: _Node) -> list[_Node]:
        """The nodes with one more stage decided."""
        stage = self.count - node.missing
        stops, parts, (least_path, least_own, least_mean, least_work) = self._ways(stage, node.cuts[-1])
        tail = node.tail if stage else parts.tail
        path = node.path + parts.returned
        most = np.maximum(np.maximum(node.most, path + parts.there + tail), node.head + parts.busy + parts.once)
        bounds = [
            np.maximum(node.bound, most),
            node.path + least_path + tail,
            node.head + least_own,
            node.mean + least_mean + tail,
            node.work + least_work,
        ]
        columns = np.stack(
            [
                functools.reduce(np.maximum, bounds),
                path + parts.passed + parts.back,
                node.head + parts.passed,
                node.mean + parts.share,
                node.work + parts.done,
                most,
                np.broadcast_to(tail, most.shape),
            ]
        )
        found = []
        for stop, (bound, *added) in zip(stops, columns.T.tolist(), strict=True):
            cuts = (*node.cuts, stop)
            if node.missing == 1:
                bound = max(bound, self._ranks(cuts))
            found.append(_Node(bound, node.missing - 1, cuts, *added))
        return found

    def _back(self, one: StageSeconds) -> float:
        return one.backward_input if self.halves else one.backward_input + one.backward_weight

    def _passed(self, stage: int, one: StageSeconds) -> float:
        return one.forward + one.activations if self.sends_on[stage] else one.forward

    def _returned(self, stage: int, one: StageSeconds) -> float:
        return one.gradients if self.sends_back[stage] else 0.0

    def _stages(self, cuts: Cuts) -> list[StageSeconds]:
        ends = enumerate(itertools.pairwise(cuts))
        return [self.known.get((stage, *at)) or self._stage(stage, *at) for stage, at in ends]

    def _stage(self, stage: int, start: int, stop: int) -> StageSeconds:
        self.known[stage, start, stop] = found = self.tables[stage].stage(start, stop)
        return found

    def _ranks(self, cuts: Cuts) -> float:
        """The bounds (path) and (own) of ranks, each with all its stages."""
        stages = self._stages(cuts)
        head, path, most = 0.0, 0.0, 0.0
        tail = stages[0].backward_weight if self.halves else 0.0
        once = sum(stages[place].once for place in self.firsts[0])
        for stage, one in enumerate(stages):
            path += self._returned(stage, one)
            if stage in self.firsts:
                mine = [stages[place] for place in self.firsts[stage]]
                work = self.m * sum(other.forward + self._back(other) for other in mine)
                whole = sum(self.m * other.busy + other.once for other in mine)
                most = max(most, path + work + tail + once, head + whole)
            head += self._passed(stage, one)
            path += self._passed(stage, one) + self._back(one)
        return most

    def _time(self, cuts: Cuts) -> float:
        if cuts not in self.timed:
            self.timed[cuts] = seconds_with(self.clock, self._stages(cuts), self.more)
        return self.timed[cuts]

    def _descend(self, cuts: Cuts) -> tuple[float, Cuts]:
        """Improve cuts by local moves, for a good start."""
        tables = [table._replace(fits=fits) for table, fits in zip(self.tables, self.fits, strict=True)]
        seconds, found, timed = improved(self.clock, tables, cuts, more=self.more, simulations=self.simulations)
        self.descended += timed
        return seconds, found

    def _feasible(self, cuts: Cuts) -> bool:
        ends = [*itertools.pairwise(cuts)]
        return all(start < stop for start, stop in ends) and all(self.fits[s][ends] for s, ends in enumerate(ends))

    def _first(self, node: _Node) -> Cuts:
        """Complete a node greedily: the child with the least bound, stage by stage."""
        while node.missing:
            node = min(self._children(node))
        return node.cuts


def seconds_with(clock: Clock, stages: Sequence[StageSeconds], more: int) -> float:
    """Seconds of a step with `more` micro-batches than its schedule has; the busiest rank sets the pace of the extra ones."""
    return clock.seconds(stages) + more * paced(clock, stages)[0]


__all__ = ["NODES", "StagePartition", "partition", "seconds_with"]
