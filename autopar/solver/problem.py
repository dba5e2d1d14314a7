"""The planning problem, free of tensors: choices to make, wires that carry values between them, rows that bound memory.

A `Choice` is an op (or a given tensor, or an output) with its candidates; a `Wire` is a value with its layout graph. Costs are
seconds for all members of a class together. The solver sees nothing else, so that small problems can be written by hand and
checked by enumeration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Choice:
    """Pick one candidate; candidate c costs `seconds[c]`. Among solutions of equal price that of the least `tie` wins."""

    name: str
    seconds: Floats
    tie: Floats


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Consumer:
    """Reads a wire: candidate c of `choice` wants layout `wants[c]`."""

    choice: int
    wants: Ints


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Surcharge:
    """Seconds per arc, paid once if the arc leads to any of these consumers (places in `Wire.consumers`)."""

    seconds: Floats
    consumers: frozenset[int]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Wire:
    """A value on its way from its producer to its consumers through its layout graph.

    Candidate c of the producer leaves the value in layout `produced[c]`; arc a turns layout `source[a]` into `target[a]` for
    `seconds[a]`, paid once however many consumers use it. What only some consumers cause is a surcharge: the gradient's way
    back from those that have one, the second gather of a weight for those that save it.
    """

    name: str
    producer: int
    produced: Ints
    consumers: tuple[Consumer, ...]
    nodes: int
    source: Ints
    target: Ints
    seconds: Floats
    surcharges: tuple[Surcharge, ...]
    free: npt.NDArray[np.bool_]  # arcs that leave the value where it is in memory


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Way:
    """These arcs of a wire, where they lead to any of these consumers (places in `Wire.consumers`)."""

    wire: int
    consumers: frozenset[int]
    arcs: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Toll:
    """Seconds paid once if any of the ways is gone: the latency of a message in which several values travel."""

    name: str
    seconds: float
    ways: tuple[Way, ...]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Row:
    """Bytes alive at one moment: `constant + sum picks[choice][c] + sum uses[wire][a] + sum kept <= limit`."""

    name: str
    limit: float
    picks: Mapping[int, Floats]
    uses: Mapping[int, Floats]
    kept: tuple[Kept, ...]
    constant: float = 0.0


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Kept:
    """`bytes[l]` for each layout l of a wire that at least one of its keepers wants; PRODUCER wants what it produced."""

    wire: int
    keepers: tuple[int, ...]
    bytes: Floats


PRODUCER = -1


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Problem:
    """Every choice once; every wire connects choices by their place in `choices`."""

    choices: tuple[Choice, ...]
    wires: tuple[Wire, ...]
    tolls: tuple[Toll, ...] = ()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Solution:
    """A candidate per choice and the arcs used per wire; `seconds` is their price, `bound` a proven lower bound."""

    picks: tuple[int, ...]
    arcs: tuple[tuple[int, ...], ...]
    seconds: float
    bound: float
    status: str  # "optimal", "feasible"

    @property
    def gap(self) -> float:
        """Relative distance of the price from the proven bound."""
        return max(0.0, self.seconds - self.bound) / self.seconds if self.seconds else 0.0


def price(problem: Problem, picks: tuple[int, ...], arcs: tuple[tuple[int, ...], ...]) -> float:
    """Seconds of a solution: its candidates, each used arc once with what is due on it, and the tolls."""
    total = sum(float(c.seconds[p]) for c, p in zip(problem.choices, picks, strict=True))
    total += sum(toll.seconds for toll in problem.tolls if paid(problem, toll, picks, arcs))
    return total + sum(route_price(wire, picks, used) for wire, used in zip(problem.wires, arcs, strict=True))


def paid(problem: Problem, toll: Toll, picks: tuple[int, ...], arcs: tuple[tuple[int, ...], ...]) -> bool:
    """Whether a solution goes any of a toll's ways."""
    return any(gone(problem, way, picks, arcs) for way in toll.ways)


def gone(problem: Problem, way: Way, picks: tuple[int, ...], arcs: tuple[tuple[int, ...], ...]) -> bool:
    """Whether a solution goes this way."""
    used = arcs[way.wire]
    if not way.arcs[list(used)].any():
        return False
    return bool(way.arcs[list(leading_to(problem.wires[way.wire], way.consumers, picks, used))].any())


def route_price(wire: Wire, picks: tuple[int, ...], used: tuple[int, ...]) -> float:
    """Seconds of the used arcs of one wire, which form a tree."""
    total = float(wire.seconds[list(used)].sum())
    for surcharge in wire.surcharges:
        total += float(surcharge.seconds[list(leading_to(wire, surcharge.consumers, picks, used))].sum())
    return total


def leading_to(wire: Wire, consumers: frozenset[int], picks: tuple[int, ...], used: tuple[int, ...]) -> tuple[int, ...]:
    """The used arcs behind which one of these consumers lies."""
    into = {int(wire.target[a]): a for a in used}
    found: dict[int, None] = {}
    for consumer in sorted(consumers):
        reader = wire.consumers[consumer]
        node = int(reader.wants[picks[reader.choice]])
        while node in into and into[node] not in found:
            found[into[node]] = None
            node = int(wire.source[into[node]])
    return tuple(found)


def row_bytes(problem: Problem, row: Row, picks: tuple[int, ...], arcs: tuple[tuple[int, ...], ...]) -> float:
    """The left side of a row for a solution."""
    total = row.constant + sum(float(bytes_of[picks[choice]]) for choice, bytes_of in row.picks.items())
    total += sum(float(bytes_of[list(arcs[wire])].sum()) for wire, bytes_of in row.uses.items())
    for kept in row.kept:
        nodes = {end_node(problem.wires[kept.wire], keeper, picks) for keeper in kept.keepers}
        total += sum(float(kept.bytes[node]) for node in nodes)
    return total


def end_node(wire: Wire, keeper: int, picks: tuple[int, ...]) -> int:
    """The layout at one end of a wire: as PRODUCER leaves it, or as a consumer wants it."""
    if keeper == PRODUCER:
        return int(wire.produced[picks[wire.producer]])
    consumer = wire.consumers[keeper]
    return int(consumer.wants[picks[consumer.choice]])
