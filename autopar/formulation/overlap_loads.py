"""Loads that candidates, conversions and messages of a planning problem put on its regions, by the law of `overlap`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from autopar.formulation.overlap import Overlap
from autopar.formulation.prices import ArcSeconds
from autopar.ir.conversion import CARRIED, WAYS
from autopar.search_space.buckets import TOGETHER
from autopar.solver.overlap import Load, OverlapRegion
from autopar.solver.problem import Bools, Floats, Ints

GRADIENT, REGATHER = 0, 1  # places in `Edge.conditional_costs`: gradients on their way back, what is repeated in any case
BUSY = -1  # in the place of a link: the device itself
GATHERED, REDUCED = (  # of every kind of conversion, whether it, or its gradient, travels with those of other weights
    np.array([ways[phase] in TOGETHER[phase] for ways in WAYS.values()]) for phase in (0, 1)
)
FORWARD_CARRIED, BACKWARD_CARRIED = (np.array([ways[phase] in CARRIED for ways in WAYS.values()]) for phase in (0, 1))
STILL = np.array([forward == "identity" for forward, _ in WAYS.values()])


Put = Callable[[Load, Floats], None]
K = TypeVar("K")


class OverlapLoads:
    """Collects the loads of one problem. Asynchronous messages are returned at beta times their seconds, which is their
    price.
    """

    def __init__(self, overlap: Overlap) -> None:
        self.overlap = overlap
        # By axis and link: whether messages over that axis go over that link.
        self._links = np.array([[link in links for link in range(overlap.count)] for links in overlap.links], dtype=np.bool_)
        self._loads: dict[tuple[int, int], Load] = {}
        self._ahead: dict[int, Load] = {}

    def regions(self) -> tuple[OverlapRegion, ...]:
        """The regions of the problem: the places of the overlap."""
        overlap = self.overlap

        def load(place: int, link: int) -> Load:
            return self._loads.get((place, link), Load())

        return tuple(
            OverlapRegion(
                name=name, busy=load(place, BUSY), links=tuple(load(place, link) for link in range(overlap.count)),
                parts=overlap.parts[place], share=overlap.share(place), ahead=self._ahead.get(place, Load()),
            )
            for place, name in enumerate(overlap.names)
        )  # fmt: skip

    def op(
        self,
        number: int,
        name: str,
        computed: Mapping[bool, Floats],
        sent: Mapping[tuple[bool, int], Floats],
        rerun: Floats | None,
    ) -> None:
        """Add an op class: by (whether in the backward), the computing of its candidates, and their messages over each axis.

        `rerun` is the computing of its forward if it is recomputed.
        """
        for backward, seconds in computed.items():
            place = self.overlap.op(name, backward=backward)
            waits = sum((s for (where, _), s in sent.items() if where == backward), seconds)
            _add(self._of(place, BUSY).choices, number, waits)
        for (backward, axis), seconds in sent.items():
            for link in self.overlap.links[axis]:
                _add(self._of(self.overlap.op(name, backward=backward), link).choices, number, seconds)
        if rerun is not None:
            place, again = self.overlap.op(name, backward=True), [(axis, s) for (where, axis), s in sent.items() if not where]
            _add(self._of(place, BUSY).reruns, number, sum((s for _, s in again), rerun))
            for axis, seconds in again:
                for link in self.overlap.links[axis]:
                    _add(self._of(place, link).reruns, number, seconds)

    def edge(
        self, number: int, members: Sequence[str], pair: Ints, axis: Ints, prices: ArcSeconds, *, bucketed: bool
    ) -> ArcSeconds:
        """Add an edge with these members, whose arcs make these conversions on these axes; returns its seconds with the
        overlap.
        """
        name, stays = members[0], STILL[pair]
        gathers, reduces = GATHERED[pair] & bucketed, REDUCED[pair] & bucketed
        carried = FORWARD_CARRIED[pair], BACKWARD_CARRIED[pair]
        here = [self.overlap.value(name, backward=back) for back in (False, True)]
        hidden = self.overlap.shares

        def arc(found: Load, seconds: Floats) -> None:
            _add(found.arcs, number, seconds)

        def gradient(found: Load, seconds: Floats) -> None:
            _add(found.conditional, (number, GRADIENT), seconds)

        def regather(found: Load, seconds: Floats) -> None:
            _add(found.conditional, (number, REGATHER), seconds)

        def reconvert(found: Load, seconds: Floats) -> None:
            _add(found.reconverts, number, seconds)

        def waits(put: Put, seconds: Floats, only: Bools, place: int | None, sent: Bools) -> Floats:
            """Synchronous seconds of some arcs, of which some are sent."""
            return self._spread(put, np.where(only, seconds, 0.0), {place: 1.0}, self._links[axis], sent, slow=1.0)

        def ahead(put: Put, seconds: Floats, only: Bools, shares: Mapping[int | None, float]) -> Floats:
            """Asynchronous seconds of some arcs."""
            return self._spread(put, np.where(only, seconds, 0.0), shares, self._links[axis], only, slow=self.overlap.beta)

        everything = np.full(len(pair), True)
        first, again = (hidden(members, sent) if gathers.any() else {} for sent in ("gather", "regather"))

        def forward(put: Put, seconds: Floats, place: int | None, shares: Mapping[int | None, float]) -> Floats:
            """Add a conversion made in one place, or gathered in others."""
            unpacking = np.minimum(prices.unpacking, seconds)
            message = seconds - unpacking
            device = waits(put, unpacking, everything, place, ~everything)
            return device + waits(put, message, ~gathers, place, carried[0]) + ahead(put, message, gathers, shares)

        there, message = forward(arc, prices.there, here[0], first), prices.back - prices.packing
        back = waits(gradient, prices.packing, everything, here[1], ~everything)
        back += waits(gradient, message, ~reduces, here[1], carried[1])
        for moved, some in ((True, reduces & ~stays), (False, reduces & stays)):
            back += ahead(gradient, message, some, hidden(members, "reduce", moved=moved) if some.any() else {})
        rerun, recompute = forward(regather, prices.rerun, here[1], again), prices.recompute
        if recompute is not None:
            finite = np.where(np.isfinite(recompute), recompute, 0.0)
            some = forward(reconvert, finite, here[1], again)
            recompute = np.where(np.isfinite(recompute), some, np.inf)
        return replace(prices, there=there, back=back, rerun=rerun, recompute=recompute)

    def charge(self, number: int, seconds: float, axis: int, shares: Mapping[int | None, float]) -> float:
        """Add the latency of messages over an axis; returns its price with the overlap."""
        for place, share in shares.items():
            if place is not None:
                carried = [self._sent(place), *(self._of(place, link) for link in self.overlap.links[axis])]
                for load, slow in [(self._of(place, BUSY), self.overlap.beta), *((load, 1.0) for load in carried)]:
                    load.charges[number] = load.charges.get(number, 0.0) + slow * share * seconds
        bare = shares.get(None, 0.0)
        return seconds * (bare + self.overlap.beta * (1.0 - bare))

    def _spread(
        self, put: Put, seconds: Floats, shares: Mapping[int | None, float], links: Bools, sent: Bools, *, slow: float
    ) -> Floats:
        """Spread seconds per arc over places: the device is busy for the fraction `slow`, the `links` of each arc carry `sent`;
        returns their price.
        """
        for place, share in shares.items() if seconds.any() else ():
            if place is not None:
                put(self._of(place, BUSY), slow * share * seconds)
                if slow < 1:
                    put(self._sent(place), share * seconds)
                for number in np.flatnonzero(links[sent].any(axis=0)).tolist():
                    put(self._of(place, number), np.where(sent & links[:, number], share * seconds, 0.0))
        bare = shares.get(None, 0.0)
        return seconds * (bare + slow * (1.0 - bare))

    def _of(self, place: int, link: int) -> Load:
        return self._loads.setdefault((place, link), Load())

    def _sent(self, place: int) -> Load:
        """Messages sent ahead."""
        return self._ahead.setdefault(place, Load())


def _add(found: dict[K, Floats], key: K, seconds: Floats) -> None:
    found[key] = found[key] + seconds if key in found else np.array(seconds, dtype=np.float64)


__all__ = ["GRADIENT", "REGATHER", "OverlapLoads"]
