"""Which regions each stage has: contiguous parts of the program, so that the step by a given schedule is shortest.

With f, i, w the seconds of a stage's forward and the halves of its backward, d = i + w (i where the schedule has halves), a and
g its messages forward and backward, o what it does once, m micro-batches, and whatever order each rank works in,

    (path)  T >= sum_{q<s} (f_q + a_q + d_q + g_{q+1}) + m (f_s + d_s) + [w_0] + o_0        every stage s
    (own)   T >= sum_{q<s} (f_q + a_q) + m (f_s + i_s + w_s) + o_s                            every stage s

since the first micro-batch must come to a stage, the stage has all of them to do, and the last must go back. [w_0] stands
where there are halves. Of a rank with several stages both hold for the sum of their work, behind the head of the first; with
n_q ranks whose first stage is behind stage q, the means of (path) and of (own) over the p ranks are

    (mean) T >= 1/p sum_s [ m (f_s + d_s) + n_s (f_s + a_s + d_s + g_{s+1}) ] + [w_0] + o_0
    (work) T >= 1/p sum_s [ m (f_s + i_s + w_s) + o_s + n_s (f_s + a_s) ]

Each is a maximum or a sum over stages, so that dynamic programming over (stage, regions left) gives its exact minimum over all
ways to go on: together the bound of a node of the search. Partitions are met in the order of this bound and timed by the clock,
until the next bound is no better than the best time, which is then proven to be the least. Where a good partition is known, no
stage is considered that alone takes longer than its step, by (own).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.pipeline.clock import Clock, StageSeconds
from autopar.pipeline.schedule import ActionKind, PipelineSchedule

Price = Callable[[int, int, int], StageSeconds | None]
Cuts = tuple[int, ...]
NODES = 4000  # of the search, as many as the clock takes a few seconds for
ROUNDING = 1e-9  # relative, of sums of seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePartition:
    """Stage s has the regions from cuts[s] to cuts[s + 1], exclusive; a step takes `seconds`.

    No partition takes less than `bound`; if it is proven, `bound` is `seconds`. `simulations` is how many were timed.
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
    regions: int,
    price: Price,
    *,
    nodes: int = NODES,
    simulations: int = NODES,
    start: Cuts | None = None,
    more: int = 0,
) -> StagePartition | None:
    """The parts by which a step of the schedule is shortest; None if there are none.

    Args:
        schedule: a complete one, without messages.
        regions: how many regions are to be cut into stages of at least one each.
        price: seconds of a stage made of the regions from `start` to `stop`, exclusive, by (stage, start, stop), no less
            of more regions; None if no plan of it fits into the memory. The memory of a rank with several stages is to be
            shared among them beforehand.
        nodes: of the search, at most; where they do not suffice, the best that was found, with the least bound that is open.
        simulations: after which the best so far is not improved any more by moving single regions.
        start: cuts that are known to be good.
        more: micro-batches that a step has beyond those of the schedule, in its steady state.
    """
    return _Search(schedule, regions, price, simulations, start, more).best(nodes)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Node:
    """Stages that are decided: the cuts so far, what they add to each bound, and the most that is certain."""

    bound: float
    missing: int  # stages that are not: of two nodes of one bound the more complete one comes first
    cuts: Cuts
    path: float = 0.0
    head: float = 0.0
    mean: float = 0.0
    work: float = 0.0
    most: float = 0.0
    tail: float = 0.0


class _Bounds(NamedTuple):
    """What stages add to each of the bounds."""

    path: float
    own: float
    mean: float
    work: float


DONE = _Bounds(path=-math.inf, own=-math.inf, mean=0.0, work=0.0)  # what no stage adds


class _Search:
    """`ways` holds, by stage and first region, the stops and seconds of what fits, and `rest` what the stages from there on add
    to the bounds at least."""

    def __init__(
        self, schedule: PipelineSchedule, regions: int, price: Price, simulations: int, start: Cuts | None, more: int
    ) -> None:
        self.schedule, self.regions, self.clock, self.simulations = schedule, regions, Clock(schedule), simulations
        self.count, self.m, self.more = schedule.stages, schedule.microbatches + more, more
        self.halves = any(row.action.kind == ActionKind.BACKWARD_INPUT for row in self.clock.rows)
        self.ways: dict[tuple[int, int], dict[int, StageSeconds]] = {}
        self.rest: dict[tuple[int, int], _Bounds] = {}
        firsts = [min(s for s, rank in schedule.rank_of.items() if rank == r) for r in range(len(schedule.ranks))]
        self.behind = [sum(first > stage for first in firsts) / len(firsts) for stage in range(self.count)]
        apart = [schedule.rank_of[stage] != schedule.rank_of[stage + 1] for stage in range(self.count - 1)]
        self.sends_on, self.sends_back = [*apart, False], [False, *apart]
        self.timed: dict[Cuts, float] = {}
        self.start, self.longest = self._known(start, price)
        for stage in reversed(range(self.count)):
            for first in range(stage, regions - self.count + stage + 1) if stage else (0,):
                self._complete(stage, first, price)

    def _known(self, cuts: Cuts | None, price: Price) -> tuple[Cuts | None, float]:
        """Cuts whose stages all fit, and the seconds of their step, above which no stage is of use."""
        stages = [price(stage, *ends) for stage, ends in enumerate(itertools.pairwise(cuts or ()))]
        fitting = [one for one in stages if one is not None]
        if not cuts or len(fitting) < len(stages):
            return None, math.inf
        self.timed[cuts] = seconds_with(self.clock, fitting, self.more)
        return cuts, self.timed[cuts] * (1 + ROUNDING)

    def _complete(self, stage: int, start: int, price: Price) -> None:
        """Price the ways of a stage that begins at a region, and bound what it and those after it add."""
        last = stage == self.count - 1
        stops = (self.regions,) if last else range(start + 1, self.regions - self.count + stage + 2)
        found = {}
        for stop in stops:
            seconds = price(stage, start, stop) if start < stop and (last or (stage + 1, stop) in self.ways) else None
            if seconds is not None and self.m * seconds.busy + seconds.once > self.longest:
                break  # and so do those of more regions
            if seconds is not None:
                found[stop] = seconds
        if found:
            self.ways[stage, start] = found
            added = (self._added(stage, stop, one) for stop, one in found.items())
            self.rest[stage, start] = _Bounds(*map(min, zip(*added, strict=True)))

    def _added(self, stage: int, stop: int, one: StageSeconds) -> _Bounds:
        """What the stages from one on, which ends at a region, add to the bounds at least."""
        later, back, passed = self.rest.get((stage + 1, stop), DONE), self._back(one), self._passed(stage, one)
        work = self.m * (one.forward + back)
        return _Bounds(
            path=self._returned(stage, one) + max(work, passed + back + later.path),
            own=max(self.m * one.busy + one.once, passed + later.own),
            mean=self._share(stage, one) + later.mean,
            work=self._done(stage, one) + later.work,
        )

    def _done(self, stage: int, one: StageSeconds) -> float:
        """What (work) adds for a stage."""
        return (self.m * one.busy + one.once) / len(self.schedule.ranks) + self.behind[stage] * self._passed(stage, one)

    def _share(self, stage: int, one: StageSeconds) -> float:
        """What (mean) adds for a stage."""
        back = self._back(one)
        work = self.m * (one.forward + back) / len(self.schedule.ranks)
        returned = self.behind[stage - 1] * self._returned(stage, one) if stage else 0.0
        return work + returned + self.behind[stage] * (self._passed(stage, one) + back)

    def _back(self, one: StageSeconds) -> float:
        """Seconds by which a stage holds up the gradient of a micro-batch."""
        return one.backward_input if self.halves else one.backward_input + one.backward_weight

    def _passed(self, stage: int, one: StageSeconds) -> float:
        """Seconds until a micro-batch has come from a stage's forward to the next stage."""
        return one.forward + one.activations if self.sends_on[stage] else one.forward

    def _returned(self, stage: int, one: StageSeconds) -> float:
        """Seconds for which a gradient is under way from a stage to the previous one."""
        return one.gradients if self.sends_back[stage] else 0.0

    def best(self, nodes: int) -> StagePartition | None:
        if (0, 0) not in self.ways:
            return None
        heap = [_Node(bound=0.0, missing=self.count, cuts=(0,))]
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
        return StagePartition(cuts=best[1], seconds=best[0], bound=bound, simulations=len(self.timed))

    def _children(self, node: _Node) -> list[_Node]:
        """The ways to decide one stage more."""
        stage, found = self.count - node.missing, []
        for stop, one in self.ways[stage, node.cuts[-1]].items():
            tail = node.tail if stage else one.once + (one.backward_weight if self.halves else 0.0)
            path = node.path + self._returned(stage, one)
            work = path + self.m * (one.forward + self._back(one)) + tail
            most = max(node.most, work, node.head + self.m * one.busy + one.once)
            cuts = (*node.cuts, stop)
            added = self._added(stage, stop, one)
            bound = max(
                most,
                node.path + added.path + tail,
                node.head + added.own,
                node.mean + added.mean + tail,
                node.work + added.work,
            )
            if node.missing == 1:
                bound = max(bound, self._ranks(cuts))
            passed = self._passed(stage, one)
            found.append(
                _Node(
                    bound=max(bound, node.bound),
                    missing=node.missing - 1,
                    cuts=cuts,
                    path=path + passed + self._back(one),
                    head=node.head + passed,
                    mean=node.mean + self._share(stage, one),
                    work=node.work + self._done(stage, one),
                    most=most,
                    tail=tail,
                )
            )
        return found

    def _stages(self, cuts: Cuts) -> list[StageSeconds]:
        return [self.ways[stage, cuts[stage]][cuts[stage + 1]] for stage in range(self.count)]

    def _ranks(self, cuts: Cuts) -> float:
        """(path) and (own) of ranks, with all stages of each."""
        stages, rank_of = self._stages(cuts), self.schedule.rank_of
        head, path, most = 0.0, 0.0, 0.0
        tail = stages[0].backward_weight if self.halves else 0.0
        once = sum(one.once for stage, one in enumerate(stages) if rank_of[stage] == rank_of[0])
        seen: set[int] = set()
        for stage, one in enumerate(stages):
            path += self._returned(stage, one)
            if rank_of[stage] not in seen:
                seen.add(rank_of[stage])
                mine = [other for place, other in enumerate(stages) if rank_of[place] == rank_of[stage]]
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
        """Hand one region from one stage to another, past those in between, as long as the step gets shorter: a good start."""
        best = (self._time(cuts), cuts)
        moves = [(first, last, step) for first, last in _pairs(self.count) for step in (-1, 1)]
        tried = 0
        while tried < len(moves) and len(self.timed) < self.simulations:
            first, last, step = moves[0]
            moves, tried = [*moves[1:], moves[0]], tried + 1
            moved = (*best[1][:first], *(cut + step for cut in best[1][first:last]), *best[1][last:])
            if self._feasible(moved) and self._ranks(moved) < best[0] and (near := (self._time(moved), moved)) < best:
                best, tried = near, 0
        return best

    def _feasible(self, cuts: Cuts) -> bool:
        return all(cuts[s + 1] in self.ways.get((s, cuts[s]), ()) for s in range(self.count))

    def _first(self, node: _Node) -> Cuts:
        """The completion of a node that follows the least bound, stage by stage."""
        while node.missing:
            node = min(self._children(node))
        return node.cuts


def seconds_with(clock: Clock, stages: Sequence[StageSeconds], more: int) -> float:
    """Seconds of a step with so many micro-batches more than its schedule has: the rank with most to do sets their pace."""
    busy = dict.fromkeys(range(len(clock.schedule.ranks)), 0.0)
    for stage, one in enumerate(stages):
        busy[clock.schedule.rank_of[stage]] += one.busy
    return clock.seconds(stages) + more * max(busy.values())


def _pairs(stages: int) -> list[tuple[int, int]]:
    """The runs of cuts between two stages, as first and last, exclusive; the shortest first."""
    return [(first, first + length) for length in range(1, stages) for first in range(1, stages - length + 1)]


__all__ = ["NODES", "Cuts", "Price", "StagePartition", "partition", "seconds_with"]
