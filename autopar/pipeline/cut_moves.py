"""Improves the cuts of a program into stages by local moves, each bounded before it is timed.

The critical path of a step has a number of forwards, backwards and messages of each stage. For other cuts it is a path through
the same actions, though perhaps not the longest: with the paths k of all timed cuts, and t the seconds of stages,

    T(cuts) >= max_k sum_s counts[k, s] . t[start_s, stop_s]

which is Kelley's cutting-plane model of a convex function ("The cutting-plane method for solving convex programs", 1960).

    run     neighbouring cuts are moved by as many regions: one stage hands them to another, past those in between
    pair    two runs, neither of which changes a stage that the other one does; of the `PAIRED` runs of the least bounds

The move of least bound is timed, a pair only if no run has a bound below the best time. If the step is shorter the cuts are
moved, else there is one more path; until no move has a bound below the best time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.pipeline.clock import Clock, Counts, StageSeconds
from autopar.pipeline.stage_table import Cuts, StageTable

PAIRED = 256
PATHS = 256  # the last ones, by which moves are bounded
ROUNDING = 1e-9  # relative, of sums of seconds

_Floats = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moves:
    """The change in each stage's seconds if it ends, begins, or does both, so many regions further on.

    `more` is `[3, shifts, stages, fields]`, and `fits` tells which of them may be stages.
    """

    more: _Floats
    fits: _Bools


def improved(
    clock: Clock, tables: Sequence[StageTable], cuts: Cuts, *, more: int = 0, simulations: int = 1000
) -> tuple[float, Cuts, int]:
    """Improve cuts until no move makes the step shorter; returns its seconds, the cuts, and how many were timed.

    Args:
        clock: of the schedule.
        tables: what each stage may be.
        cuts: the initial cuts: where stages begin, and where the last one ends.
        more: micro-batches of a step beyond those of the schedule, in its steady state.
        simulations: the number of simulations after which the search stops.
    """
    return _Descent(clock, tables, more).run(cuts, simulations)


class _Descent:
    def __init__(self, clock: Clock, tables: Sequence[StageTable], more: int) -> None:
        self.clock, self.tables, self.more = clock, tables, more
        stages, regions = len(tables), len(tables[0].fits)
        steps = np.arange(1, -(-regions // stages) + 1)
        self.shifts = np.stack([steps, -steps], axis=1).ravel()  # by less first
        self.first, self.last = np.triu_indices(stages)  # the stages before and behind the cuts of a run
        apart = self.first < self.last
        self.first, self.last = self.first[apart], self.last[apart]
        self.rank_of = np.array([clock.schedule.rank_of[stage] for stage in range(stages)])
        self.paths: list[Counts] = []

    def run(self, cuts: Cuts, simulations: int) -> tuple[float, Cuts, int]:
        best, timed = self._time(cuts), 1
        while timed < simulations and (moved := self._least(cuts, best * (1 - ROUNDING))):
            seconds, timed = self._time(moved), timed + 1
            if seconds < best:
                best, cuts = seconds, moved
        return best, cuts, timed

    def _time(self, cuts: Cuts) -> float:
        """The seconds of a step; records its critical path."""
        stages = [table.stage(*ends) for table, ends in zip(self.tables, itertools.pairwise(cuts), strict=True)]
        seconds, counts = self.clock.critical(stages)
        pace, rank = paced(self.clock, stages)
        counts[self.rank_of == rank, :3] += self.more
        self.paths = [*self.paths[1 - PATHS :], counts]
        return seconds + self.more * pace

    def _least(self, cuts: Cuts, below: float) -> Cuts | None:
        """The cuts of the move with the least bound, if that is below the best known."""
        if not len(self.first):
            return None
        lengths, added, fits = self._bounds(cuts)
        bounds = np.where(fits, (lengths[:, None, None] + added).max(axis=0), np.inf)
        least = bounds.argmin()
        if bounds.flat[least] < below:
            return self._moved(cuts, [int(least)])
        order = np.argsort(bounds, axis=None, kind="stable")[:PAIRED]
        order = order[np.isfinite(bounds.flat[order])]
        if not len(order):
            return None
        runs = order % len(self.first)
        apart = self.last[runs][:, None] < self.first[runs]
        both = np.full(apart.shape, -np.inf)
        for length, more in zip(lengths, added.reshape(len(lengths), -1)[:, order], strict=True):
            np.maximum(both, length + more[:, None] + more, out=both)
        both[~apart] = np.inf
        one, other = np.unravel_index(both.argmin(), both.shape)
        return self._moved(cuts, [int(order[one]), int(order[other])]) if both[one, other] < below else None

    def _moved(self, cuts: Cuts, moves: Sequence[int]) -> Cuts:
        """The cuts after moves, each an index among the shifts of all runs."""
        found = np.array(cuts)
        for move in moves:
            shift, run = divmod(move, len(self.first))
            found[self.first[run] + 1 : self.last[run] + 1] += self.shifts[shift]
        return tuple(found.tolist())

    def _bounds(self, cuts: Cuts) -> tuple[_Floats, _Floats, _Bools]:
        """The length of each path; what each run adds to it, `[paths, shifts, runs]`; and which runs there are."""
        now = np.array(
            [table.seconds[:, start, stop] for table, (start, stop) in zip(self.tables, itertools.pairwise(cuts), strict=True)]
        )
        paths = np.stack(self.paths)
        lengths = _weighed(paths, now).cumsum(axis=1)[:, -1]
        moves = self._moves(cuts, now)
        ends, begins, inner = _weighed(paths[:, None, None], moves.more).swapaxes(0, 1)
        within = np.concatenate([np.zeros_like(inner[..., :1]), inner.cumsum(axis=2)], axis=2)
        wrong = np.concatenate([np.zeros_like(moves.fits[2, :, :1], dtype=np.int64), (~moves.fits[2]).cumsum(axis=1)], axis=1)
        first, last = self.first, self.last
        added = ends[..., first] + begins[..., last] + (within[..., last] - within[..., first + 1])
        fits = moves.fits[0][:, first] & moves.fits[1][:, last] & (wrong[:, last] == wrong[:, first + 1])
        return lengths, added, fits

    def _moves(self, cuts: Cuts, now: _Floats) -> _Moves:
        regions, shifts = len(self.tables[0].fits), self.shifts
        more, fits = np.zeros((3, len(shifts), len(now), now.shape[1])), np.zeros((3, len(shifts), len(now)), dtype=bool)
        for stage, (table, (start, stop)) in enumerate(zip(self.tables, itertools.pairwise(cuts), strict=True)):
            for way, (begins, ends) in enumerate(((0, 1), (1, 0), (1, 1))):
                starts, stops = start + begins * shifts, stop + ends * shifts
                there = (starts >= 0) & (starts < stops) & (stops <= regions)
                starts, stops = np.where(there, starts, 0), np.where(there, stops, regions)
                fits[way, :, stage] = there & table.fits[starts, stops]
                more[way, :, stage] = table.seconds[:, starts, stops].T - now[stage]
        return _Moves(more=more, fits=fits)


def _weighed(counts: _Floats, seconds: _Floats) -> _Floats:
    """The sum over fields of counts times seconds, rounded alike on all machines."""
    return sum((counts[..., one] * seconds[..., one] for one in range(counts.shape[-1])), start=np.zeros(()))


def paced(clock: Clock, stages: Sequence[StageSeconds]) -> tuple[float, int]:
    """The rank with the most work per micro-batch, which sets the pace of the steady state: its seconds, and its index."""
    busy = [0.0] * len(clock.schedule.ranks)
    for stage, one in enumerate(stages):
        busy[clock.schedule.rank_of[stage]] += one.busy
    return max(busy), busy.index(max(busy))


__all__ = ["improved", "paced"]
