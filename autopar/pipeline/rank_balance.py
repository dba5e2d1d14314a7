"""Cuts a program into stages that give pipeline ranks about equal work, where a rank may have several stages.

With w_r the work of rank r, the goal is a small max_r w_r. The search minimises sum_r w_r^8 instead, which also distinguishes
partitions of equal maximum. It takes one run of stages on different ranks at a time and chooses the cuts within it exactly, by
dynamic programming over (stage, regions), with the ends of the run and the other stages of its ranks fixed; it repeats this
over all runs until the sum stops decreasing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.stage_table import Cuts

_Floats = npt.NDArray[np.float64]


def balanced(before: Sequence[float], schedule: PipelineSchedule) -> Cuts:
    """The cuts between the stages of a schedule, as numbers of regions before them; every stage has at least one region.

    Args:
        before: prefix sums of the regions' work: the work before each region, and the total.
        schedule: the schedule that assigns stages to ranks.
    """
    work, count, rank_of = np.array(before), schedule.stages, schedule.rank_of
    runs = [_different(first, rank_of) for first in range(count)]
    cuts = _chosen(work, (0, len(before) - 1), [0.0] * count)  # stages of about equal work
    changed = count > len(schedule.ranks)
    while changed:
        changed = False
        for first, last in runs:
            seconds = np.diff(work[list(cuts)]).tolist()
            beside = [
                sum(seconds[other] for other in range(count) if rank_of[other] == rank_of[stage] and not first <= other < last)
                for stage in range(first, last)
            ]
            moved = (*cuts[:first], *_chosen(work, (cuts[first], cuts[last]), beside), *cuts[last + 1 :])
            if _uneven(work, moved, rank_of) < _uneven(work, cuts, rank_of):
                cuts, changed = moved, True
    return cuts


def _different(first: int, rank_of: dict[int, int]) -> tuple[int, int]:
    """The longest run of stages on different ranks that begins at a stage: its first stage, and its end, exclusive."""
    seen, last = set[int](), first
    while last < len(rank_of) and rank_of[last] not in seen:
        seen.add(rank_of[last])
        last += 1
    return first, last


def _chosen(work: _Floats, ends: tuple[int, int], beside: Sequence[float]) -> Cuts:
    """The best cuts of the regions between two ends into stages; `beside` is the other work of each stage's rank."""
    first, last = ends
    inside = work[first : last + 1]
    size = np.where(np.arange(len(inside))[:, None] < np.arange(len(inside)), inside - inside[:, None], np.inf)
    total, came = np.full(len(inside), np.inf), list[list[int]]()
    total[0] = 0.0
    for other in beside:
        sums = total[:, None] + _power(size + other)
        came.append(sums.argmin(axis=0).tolist())
        total = sums.min(axis=0)
    cuts = [len(inside) - 1]
    for back in reversed(came):
        cuts.append(back[cuts[-1]])
    return tuple(first + cut for cut in reversed(cuts))


def _uneven(work: _Floats, cuts: Cuts, rank_of: dict[int, int]) -> float:
    ranks: dict[int, float] = {}
    for stage, (start, stop) in enumerate(itertools.pairwise(cuts)):
        ranks[rank_of[stage]] = ranks.get(rank_of[stage], 0.0) + float(work[stop] - work[start])
    return float(_power(np.array(list(ranks.values()))).sum())


def _power(work: _Floats) -> _Floats:
    """The eighth power, by multiplication, which rounds the same on all machines."""
    squares = work * work
    fourth = squares * squares
    return fourth * fourth


__all__ = ["balanced"]
