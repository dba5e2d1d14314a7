"""The memory curve: what a device holds at each moment of the step, by purpose, by the memory model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.formulation.cost_breakdown import GRADIENTS, PURPOSES, TEMPORARY, Purposes, moment_text
from autopar.formulation.memory_model import MemoryModel
from autopar.ir.device import Bytes
from autopar.memory.schedule import LiveRange
from autopar.search_space.assignment import Assignment
from autopar.solver.problem import Floats, Ints

POINTS = 600  # moments that are kept of a step, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Bytes by purpose at moments of the step, described by `said`; the first `forward` of the `count` moments are the forward.

    A long step is thinned to the fullest of each few neighbours, which keeps the peak.
    """

    moments: tuple[int, ...]
    said: tuple[str, ...]
    purposes: Mapping[str, Floats]
    forward: int
    count: int

    @property
    def total(self) -> Floats:
        """All bytes at each of the moments."""
        found: Floats = np.sum([*self.purposes.values()], axis=0)
        return found


def memory_curve(model: MemoryModel, chosen: Assignment, points: int = POINTS) -> MemoryCurve:
    """The memory of one micro-batch's step under an assignment, plus what other micro-batches hold."""
    program, optimizer = model.formulated.analysis.program, model.formulated.prices.optimizer
    lives, whole = model.liveness.lives(chosen), model.liveness.walk(chosen)
    kept = _fullest(whole, points)
    times, of = model.liveness.fullest(chosen)[kept], Purposes(program, optimizer)
    parts: dict[str, list[tuple[LiveRange, Bytes]]] = {name: [] for name in PURPOSES}
    for life in lives:
        for purpose, size in of(life.kind, life.name, life.bytes):
            parts[purpose].append((life, size))
    purposes = {name: _alive(held, times) for name, held in parts.items() if any(size for _, size in held)}
    if TEMPORARY in purposes and GRADIENTS in purposes:  # as in `cost_breakdown`
        less = np.minimum(purposes[TEMPORARY], 0.0)
        purposes |= {TEMPORARY: purposes[TEMPORARY] - less, GRADIENTS: purposes[GRADIENTS] + less}
    return MemoryCurve(
        moments=tuple(map(int, kept)),
        said=tuple(moment_text(program, int(moment)) for moment in kept),
        purposes=purposes,
        forward=len(program.ops),
        count=len(whole),
    )


def _fullest(whole: Floats, points: int) -> Ints:
    """The fullest moment of each of so many parts of the step."""
    parts = np.array_split(np.arange(len(whole)), min(points, len(whole)))
    found: Ints = np.array([part[whole[part].argmax()] for part in parts])
    return found


def _alive(held: list[tuple[LiveRange, Bytes]], times: Ints) -> Floats:
    """Bytes alive at some times: those that have begun by then, minus those that have ended."""
    sizes = np.array([size for _, size in held], dtype=np.float64)

    def before(ends: Ints, side: str) -> Floats:
        order = np.argsort(ends, kind="stable")
        sums = np.concatenate([[0.0], np.cumsum(sizes[order])])
        found: Floats = sums[np.searchsorted(ends[order], times, side=side)]  # type: ignore[call-overload]
        return found

    starts, stops = (np.array([getattr(life, end) for life, _ in held]) for end in ("start", "stop"))
    return before(starts, "right") - before(stops, "left")


__all__ = ["MemoryCurve", "memory_curve"]
