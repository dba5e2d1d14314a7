"""Divides the memory of a pipeline rank among its stages.

The stages of a rank share its room by what their plans with one micro-batch in flight need: if all of them fit with what is in
flight, in proportion to that; else each has what it holds with one micro-batch in flight, and of the rest a part as large as
what it holds with all of them beyond that; where they do not fit even so, in proportion to what they hold with one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.device import Bytes
from autopar.pipeline.schedule import PipelineSchedule

NO_FLOORS: Mapping[int, Bytes] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The peak memory of a stage with one micro-batch in flight (`alone`), and with all of its schedule (`peak`)."""

    alone: Bytes
    peak: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """What a stage may hold at its peak, out of the `room` that a rank has for its stages; of every additional byte it gets the
    `part`.
    """

    bytes: Bytes
    part: float
    room: Bytes

    def budget(self, least: Bytes, limit: Bytes) -> Bytes:
        """The budget of a rank, now the limit, at which the stage may hold at least so many bytes."""
        return math.ceil(limit * (1 + (least - self.bytes) / self.part / self.room))


def memory_shares(
    schedule: PipelineSchedule, needs: Sequence[MemoryNeed], rooms: Sequence[Bytes], floors: Mapping[int, Bytes] = NO_FLOORS
) -> list[MemoryShare]:
    """Each stage's share of its rank's room; some have `floors`, and the others of a rank share the rest."""
    of_rank: dict[int, list[int]] = {}
    for stage in range(len(needs)):
        of_rank.setdefault(schedule.rank_of[stage], []).append(stage)
    shares: dict[int, MemoryShare] = {}
    for rank, stages in of_rank.items():
        room = rooms[rank]
        kept, parts = _divided([needs[stage] for stage in stages], room)
        for stage, least, part in zip(stages, kept, parts, strict=True):
            share = part / sum(parts)
            shares[stage] = MemoryShare(bytes=least + math.floor(share * (room - sum(kept))), part=share, room=room)
        if floors:
            shares |= _floored({stage: shares[stage] for stage in stages}, floors)
    return [shares[stage] for stage in range(len(needs))]


def _divided(needs: Sequence[MemoryNeed], room: Bytes) -> tuple[list[Bytes], list[Bytes]]:
    """What the stages of one rank keep, and the ratio in which they share the rest of its room."""
    alone, peaks = [need.alone for need in needs], [need.peak for need in needs]
    if sum(peaks) <= room:
        return peaks, peaks
    if sum(alone) <= room:
        return alone, [max(1, peak - least) for peak, least in zip(peaks, alone, strict=True)]
    return [0] * len(needs), alone


def _floored(shares: Mapping[int, MemoryShare], floors: Mapping[int, Bytes]) -> dict[int, MemoryShare]:
    """The shares of one rank's stages if some have floors, and the others share the rest in proportion."""
    low = {stage: floors[stage] for stage in shares if stage in floors}
    free = sum(share.bytes for stage, share in shares.items() if stage not in low)
    found = dict[int, MemoryShare]()
    for stage, share in shares.items():
        if stage in low:
            found[stage] = replace(share, bytes=low[stage])
        else:
            rest = share.room - sum(low.values())
            found[stage] = replace(share, bytes=max(1, math.floor(share.bytes * rest / free)), part=share.bytes / free)
    return found


__all__ = ["NO_FLOORS", "MemoryNeed", "MemoryShare", "memory_shares"]
