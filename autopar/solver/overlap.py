"""Regions: parts of a step in which messages overlap with computing.

A region keeps the device `busy` (computing, waiting for messages, and the slowdown by overlapping ones) and puts seconds on
each link. It lasts as long as the longest of these:

    seconds of a region = max(busy, links[0], links[1], ...) = busy + excess,    excess = max(0, links[a] - busy for each a)

Busy time is already in the prices of candidates, arcs and charges, so a problem adds only the excess:

    price = sum of prices + sum over regions of their excess

A region may hold others: a share of each of its `parts`, which lasts `busy + excess` and puts the part's seconds on the links.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Load:
    """Seconds that a problem's candidates, arcs and charges put on something, in the form of their prices; filled in place.

    Attributes:
        choices: by choice, per candidate.
        reruns: by choice, per candidate, if all members run again.
        arcs: by edge, per arc.
        conditional: by edge and place in `Edge.conditional_costs`, per arc.
        reconverts: by edge, per arc, if all members are converted again.
        charges: by place in `Problem.fixed_charges`.
    """

    choices: dict[int, Floats] = field(default_factory=dict)
    reruns: dict[int, Floats] = field(default_factory=dict)
    arcs: dict[int, Floats] = field(default_factory=dict)
    conditional: dict[tuple[int, int], Floats] = field(default_factory=dict)
    reconverts: dict[int, Floats] = field(default_factory=dict)
    charges: dict[int, float] = field(default_factory=dict)

    def within(self, picks: Sequence[Ints], arcs: Sequence[Ints] | None = None) -> Load:
        """The load restricted to these candidates and arcs; by default all arcs."""
        found = replace(
            self,
            choices={o: seconds[picks[o]] for o, seconds in self.choices.items()},
            reruns={o: seconds[picks[o]] for o, seconds in self.reruns.items()},
        )
        if arcs is None:
            return found
        return replace(
            found,
            arcs={w: seconds[arcs[w]] for w, seconds in self.arcs.items()},
            conditional={(w, place): seconds[arcs[w]] for (w, place), seconds in self.conditional.items()},
            reconverts={w: seconds[arcs[w]] for w, seconds in self.reconverts.items()},
        )

    def of(self, choices: Collection[int], edges: Collection[int], charges: Collection[int]) -> Load:
        """The part of the load that is of these."""
        return Load(
            choices={o: seconds for o, seconds in self.choices.items() if o in choices},
            reruns={o: seconds for o, seconds in self.reruns.items() if o in choices},
            arcs={w: seconds for w, seconds in self.arcs.items() if w in edges},
            conditional={key: seconds for key, seconds in self.conditional.items() if key[0] in edges},
            reconverts={w: seconds for w, seconds in self.reconverts.items() if w in edges},
            charges={t: seconds for t, seconds in self.charges.items() if t in charges},
        )

    def seconds(self, activity: Activity) -> float:
        """The load of a solution."""
        total = sum(float(seconds[activity.picks[o]]) for o, seconds in self.choices.items())
        total += sum(float(self.reruns[o][activity.picks[o]]) * part for o, part in activity.reruns.items() if o in self.reruns)
        total += sum(float(seconds[list(activity.arcs[w])].sum()) for w, seconds in self.arcs.items())
        total += sum(float(seconds[list(activity.due(*key))].sum()) for key, seconds in self.conditional.items())
        sent = activity.reconverts.items()
        total += sum(float(self.reconverts[w][arc]) * part for (w, arc), part in sent if w in self.reconverts)
        return total + sum(seconds * activity.charges[t] for t, seconds in self.charges.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """How much a solution uses of everything that has a price.

    Attributes:
        picks: the candidate of each choice.
        arcs: the arcs used of each edge.
        due: the arcs of an edge on which a conditional cost is due.
        reruns: the share of members of a choice that run again.
        reconverts: the share of members of an edge that are converted again over an arc.
        charges: the share of each fixed charge that is paid.
    """

    picks: Sequence[int]
    arcs: Sequence[tuple[int, ...]]
    due: Callable[[int, int], tuple[int, ...]]
    reruns: Mapping[int, float]
    reconverts: Mapping[tuple[int, int], float]
    charges: Sequence[float]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class OverlapRegion:
    """A part of the step that lasts as long as the longest of its loads.

    `parts` are places of earlier regions, of which this one holds a `share`; `ahead` is what is sent while the device
    computes, once for each message, however many links it goes over.
    """

    name: str
    busy: Load
    links: tuple[Load, ...]
    parts: tuple[int, ...] = ()
    share: float = 1.0
    ahead: Load = field(default_factory=Load)

    @property
    def loads(self) -> tuple[Load, ...]:
        """The loads of the device and of each link."""
        return self.busy, *self.links

    def mapped(self, change: Callable[[Load], Load]) -> OverlapRegion:
        """The region with every load changed."""
        return replace(self, busy=change(self.busy), links=tuple(map(change, self.links)), ahead=change(self.ahead))


Own = list[tuple[float, list[float]]]  # by region: seconds that it is busy, and on each link, without its parts


def own_seconds(regions: Sequence[OverlapRegion], activity: Activity) -> Own:
    """A solution's load on the device and the links in each region, without the region's parts."""
    return [(region.busy.seconds(activity), [link.seconds(activity) for link in region.links]) for region in regions]


def excess(regions: Sequence[OverlapRegion], own: Own) -> float:
    """Total seconds by which regions last longer than they are busy."""
    return sum(outlasting(own, [(region.parts, region.share) for region in regions]))


def outlasting(own: Sequence[tuple[float, Sequence[float]]], parts: Sequence[tuple[Sequence[int], float]]) -> list[float]:
    """Seconds by which each region lasts longer than it is busy.

    Args:
        own: what each region is busy with and what it puts on each link, without its parts.
        parts: the parts of each region, and the share of them that it has.
    """
    busy: list[float] = []
    links: list[list[float]] = []
    over: list[float] = []
    for (seconds, sent), (inside, share) in zip(own, parts, strict=True):
        busy.append(seconds + share * sum(busy[part] + over[part] for part in inside))
        links.append([one + share * sum(links[part][a] for part in inside) for a, one in enumerate(sent)])
        over.append(max(0.0, max(links[-1], default=0.0) - busy[-1]))
    return over


__all__ = ["Activity", "Load", "OverlapRegion", "Own", "excess", "outlasting", "own_seconds"]
