"""Overlap: which messages travel while the device computes, and how long a step then takes.

The law, for every region r of the program (`analysis.step_regions`) in the forward and in the backward, with what is recomputed
there:

    seconds[r] >= compute[r] + sum_a sync[r,a] + beta sum_a async[r,a]      overlapping messages slow down computing
    seconds[r] >= sync[r,a] + async[r,a]                                    a link carries one message at a time
    step       =  sum_r seconds[r] + bare messages + optimizer

`beta` is `Device.interference`; with 1, nothing is gained by overlap, and a step is the sum of everything. Mesh axes of one
link share its row; a message over several axes at once is in the rows of all their links. A message is *asynchronous* if the
emitted code issues it ahead of its use (`memory.prefetch`, `runtime.bucketed_collectives`), and hidden by another region than
the one that uses it:

    gather of a bucket in the forward        the member before the first that uses it, while which it is prefetched
    gathered again in the backward           the member after it, which runs its backward before; on several axes the emitted
                                             code waits for all but the last, which only the simulator sees
    reduced gradients of moved weights       the member before it, which runs its backward next
    reduced gradients alone                  the rest of the last micro-batch's backward
    weights gathered once for the step       the first micro-batch's forward; their gradients are reduced after everything

Messages that nothing hides are bare: the first gather of a pass, the last reduction of the step. All others are synchronous.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.analysis.analysis import Analysis
from autopar.analysis.step_regions import StepRegions, step_regions
from autopar.ir.device import Seconds
from autopar.ir.layout import numbered_axes
from autopar.ir.mesh import Mesh
from autopar.solver.overlap import outlasting

Sent = Literal["gather", "regather", "reduce"]  # what a bucket sends: for the forward, again for the backward, its gradients
StepPart = Literal["forward", "backward", "once"]  # of every micro-batch, or once a step


@dataclass(frozen=True, eq=False, kw_only=True)
class Overlap:
    """Where the messages of a program are hidden.

    A *place* is a region in a pass: the forward of region r is place r, its backward `len(regions) + r`; the two after these
    are the whole forward and the whole backward of one micro-batch.
    """

    regions: StepRegions
    beta: float
    links: tuple[tuple[int, ...], ...]  # by axis, then by flattened one: the numbers of its links, which axes may share
    runs: int
    once: bool

    @staticmethod
    def of(analysis: Analysis, mesh: Mesh, *, once: bool) -> Overlap | None:
        """The overlap on a mesh; None if it gains nothing. `once`: weights are gathered once for the step."""
        assert mesh.device is not None, "a mesh is priced with its device"
        beta = mesh.device.interference
        if beta >= 1:
            return None
        names = list(dict.fromkeys(link.name for link in mesh.links))
        numbers = [names.index(link.name) for link in mesh.links]
        links = tuple(tuple(sorted({numbers[axis] for axis in axes})) for axes in numbered_axes(len(numbers)))
        return Overlap(regions=step_regions(analysis), beta=beta, links=links, runs=analysis.step.microbatches, once=once)

    @property
    def count(self) -> int:
        """The number of links."""
        return 1 + max(itertools.chain(*self.links))

    @functools.cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The places inside each place."""
        number = len(self.regions.names)
        return (*[()] * (2 * number), tuple(range(number)), tuple(range(number, 2 * number)))

    @property
    def names(self) -> list[str]:
        """The names of all places."""
        passes = [f"{name}, {where}" for where in ("forward", "backward") for name in self.regions.names]
        return [*passes, "forward", "backward"]

    def share(self, place: int) -> float:
        """The share of a place in its parts: one micro-batch's."""
        return 1.0 / self.runs if self.parts[place] else 1.0

    def op(self, name: str, *, backward: bool) -> int:
        """The place of an op."""
        return self._place(self.regions.of_op(name), backward=backward)

    def value(self, name: str, *, backward: bool) -> int | None:
        """The place where a value is converted; None if no op makes or reads it."""
        region = self.regions.of_value(name)
        return None if region is None else self._place(region, backward=backward)

    def hidden(self, weight: str, sent: Sent, *, moved: bool = True) -> int | None:
        """The place that hides the messages of a weight's bucket; None if they are bare. `moved`: the weight itself travels."""
        number = len(self.regions.names)
        region = self.regions.after(weight) if sent == "regather" else self.regions.before(weight, moved=moved)
        if region is None or (sent == "reduce" and self.once and self.runs > 1):
            return None
        if sent != "regather" and (self.once or not moved):
            return 2 * number + (sent == "reduce")
        return self._place(region, backward=sent != "gather")

    def shares(self, weights: Sequence[str], sent: Sent, *, moved: bool = True) -> dict[int | None, float]:
        """Where the messages of buckets are hidden: the share of each place, None for bare ones."""
        found = Counter(self.hidden(weight, sent, moved=moved) for weight in weights)
        return {place: number / len(weights) for place, number in found.items()}

    def _place(self, region: int, *, backward: bool) -> int:
        return region + len(self.regions.names) * backward

    def part(self, place: int) -> StepPart:
        """The part of a step that grows with a place; whole passes hide messages sent once."""
        if self.parts[place]:
            return "once"
        return "backward" if place >= len(self.regions.names) else "forward"

    def excess(self, busy: Mapping[int, Seconds], links: Mapping[tuple[int, int], Seconds]) -> list[Seconds]:
        """How much longer than their busy seconds places last, given these and the load of each link by (place, link)."""
        places = range(len(self.parts))
        own = [(busy.get(place, 0.0), [links.get((place, a), 0.0) for a in range(self.count)]) for place in places]
        return outlasting(own, [(self.parts[place], self.share(place)) for place in places])


__all__ = ["Overlap", "Sent", "StepPart"]
