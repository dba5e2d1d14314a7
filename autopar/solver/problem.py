"""The planning problem, free of tensors: choices to make, wires that carry values between them, rows that bound memory.

A `Choice` is an op (or a given tensor, or an output) with its candidates; a `Edge` is a value with its layout graph. Costs are
seconds for all members of a class together. The solver sees nothing else, so that small problems can be written by hand and
checked by enumeration.

What the backward needs is kept from the forward, or made again: the first k members of a choice run once more, the first k
members of a wire are converted once more. Or it comes back from the host: so do the members after these. Since both are always
the *first* members, the members of which a value is needed but not there again are as many as one number is larger than the
other, so that shares of members say it all:

    needed   |========|        made again   |=====|        kept   0.8 - 0.5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Picks = tuple[int, ...]  # a candidate per choice
Arcs = tuple[tuple[int, ...], ...]  # the arcs used per wire


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Choice:
    """Pick one candidate; candidate c costs `seconds[c]`. Among solutions of equal price that of the least `tie` wins.

    To run all `count` members again costs `recompute[c]` seconds; None if they must not.
    """

    name: str
    seconds: Floats
    tie: Floats
    count: int = 1
    recompute: Floats | None = None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Consumer:
    """Reads a wire: candidate c of `choice` wants layout `wants[c]`."""

    choice: int
    wants: Ints


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ConditionalCost:
    """Seconds per arc, paid once if the arc leads to any of these consumers (places in `Edge.consumers`)."""

    seconds: Floats
    consumers: frozenset[int]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Edge:
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
    conditional_costs: tuple[ConditionalCost, ...]
    free: Bools  # arcs that leave the value where it is in memory
    count: int = 1
    recompute: Floats | None = None  # seconds per arc to convert all `count` members once more, inf where they must not
    offload: Floats | None = None  # seconds per layout to move all members to the host and back, inf where they must not


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ChargeTrigger:
    """These arcs of a wire, where they lead to any of these consumers (places in `Edge.consumers`); None: where they are gone
    again."""

    edge: int
    consumers: frozenset[int] | None
    arcs: Bools


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class FixedCharge:
    """Seconds paid once if any of the ways is gone: the latency of a message in which several values travel.

    Of messages that are sent again, as many are paid as the largest share of members that goes any of the ways.
    """

    name: str
    seconds: float
    ways: tuple[ChargeTrigger, ...]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Row:
    """Bytes alive at one moment:

    constant + sum picks[choice][c] + sum uses[wire][a] + sum again[choice][c] (share run again) + sum kept + sum least <= limit

    Of rows of one name the last counts; they differ in nothing but the constant.
    """

    name: str
    limit: float
    picks: Mapping[int, Floats]
    uses: Mapping[int, Floats]
    kept: tuple[RetainedTerm, ...]
    least: tuple[InFlightTerm, ...] = ()
    recompute: Mapping[int, Floats] = field(default_factory=dict)
    constant: float = 0.0


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RetainedTerm:
    """`bytes[l]` for each layout l of a wire that something needs; PRODUCER needs what it produced.

    `there` and `keepers` need it in any case, `reruns` (consumers too) for as many members as run again, and a conversion done
    again needs its source. Those need no member that is made again itself, by the producer run again or by a conversion, or
    that comes back from the host; nor do the `keepers` while it is `gone`. What is `given` is there anyway in the layout in
    which it is produced. Layout l lies in the memory of layout `homes[l]`. It is said of the first members, a `part` of all.
    """

    edge: int
    keepers: tuple[int, ...]
    bytes: Floats
    there: tuple[int, ...] = ()
    reruns: tuple[int, ...] = ()
    gone: bool = False
    given: bool = False
    homes: Ints | None = None
    part: float = 1.0

    def home(self, nodes: Ints) -> Ints:
        """Where layouts lie."""
        return nodes if self.homes is None else self.homes[nodes]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class InFlightTerm:
    """A wire in the layout that takes least, of `bytes[l]` for each layout l, among that produced and all that are wanted."""

    edge: int
    bytes: Floats


PRODUCER = -1


@dataclass(frozen=True, slots=True)
class RecomputeCounts:
    """How many members of a choice run again, of a wire are converted again by an arc, and come back from the host in a layout;
    none where nothing is said."""

    choices: Mapping[int, int] = field(default_factory=dict)
    arcs: Mapping[tuple[int, int], int] = field(default_factory=dict)
    offload: Mapping[tuple[int, int], int] = field(default_factory=dict)


NOTHING = RecomputeCounts()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Problem:
    """Every choice once; every wire connects choices by their place in `choices`."""

    choices: tuple[Choice, ...]
    edges: tuple[Edge, ...]
    fixed_charges: tuple[FixedCharge, ...] = ()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Solution:
    """A candidate per choice and the arcs used per wire; `seconds` is their price, `bound` a proven lower bound."""

    picks: tuple[int, ...]
    arcs: tuple[tuple[int, ...], ...]
    seconds: float
    bound: float
    status: str  # "optimal", "feasible"
    recompute: RecomputeCounts = NOTHING

    @property
    def gap(self) -> float:
        """Relative distance of the price from the proven bound."""
        return max(0.0, self.seconds - self.bound) / self.seconds if self.seconds else 0.0

    def bounded(self, bound: float, equal: float) -> Solution:
        """This solution with a proven lower bound in seconds; it is optimal if the two differ by at most `equal`, relative."""
        bound = min(self.seconds, bound)
        return replace(self, bound=bound, status="optimal" if self.seconds - bound <= equal * self.seconds else "feasible")


def price(problem: Problem, picks: Picks, arcs: Arcs, recompute: RecomputeCounts = NOTHING) -> float:
    """Seconds of a solution: its candidates, each used arc once with what is due on it, what is done again, and the tolls."""
    total = local_price(problem, picks, recompute)
    total += sum(
        fixed_charge.seconds * paid(problem, fixed_charge, picks, arcs, recompute) for fixed_charge in problem.fixed_charges
    )
    total += sum(route_price(edge, picks, used) for edge, used in zip(problem.edges, arcs, strict=True))
    for (edge, arc), members in recompute.arcs.items():
        seconds = problem.edges[edge].recompute
        total += 0.0 if seconds is None else float(seconds[arc]) * members / problem.edges[edge].count
    return total + away_price(problem, recompute)


def away_price(problem: Problem, recompute: RecomputeCounts) -> float:
    """Seconds of what comes back from the host."""
    total = 0.0
    for (w, node), members in recompute.offload.items():
        seconds = problem.edges[w].offload
        total += 0.0 if seconds is None else float(seconds[node]) * members / problem.edges[w].count
    return total


def local_price(problem: Problem, picks: Picks, recompute: RecomputeCounts) -> float:
    """What the candidates take of it, and those that run again."""
    total = sum(float(c.seconds[p]) for c, p in zip(problem.choices, picks, strict=True))
    for choice, members in recompute.choices.items():
        seconds = problem.choices[choice].recompute
        total += 0.0 if seconds is None else float(seconds[picks[choice]]) * members / problem.choices[choice].count
    return total


def paid(problem: Problem, fixed_charge: FixedCharge, picks: Picks, arcs: Arcs, recompute: RecomputeCounts = NOTHING) -> float:
    """The share of a toll that a solution pays: all or nothing of what is sent once."""
    return max((gone(problem, way, picks, arcs, recompute) for way in fixed_charge.ways), default=0.0)


def gone(problem: Problem, way: ChargeTrigger, picks: Picks, arcs: Arcs, recompute: RecomputeCounts = NOTHING) -> float:
    """Whether a solution goes this way, 1 or 0; if it is one that is gone again, the share of members that do."""
    edge = problem.edges[way.edge]
    if way.consumers is None:
        return sum(k / edge.count for (w, arc), k in recompute.arcs.items() if w == way.edge and way.arcs[arc])
    used = arcs[way.edge]
    if not way.arcs[list(used)].any():
        return 0.0
    return float(way.arcs[list(leading_to(edge, way.consumers, picks, used))].any())


def route_price(edge: Edge, picks: Picks, used: tuple[int, ...]) -> float:
    """Seconds of the used arcs of one wire, which form a tree."""
    total = float(edge.seconds[list(used)].sum())
    for surcharge in edge.conditional_costs:
        total += float(surcharge.seconds[list(leading_to(edge, surcharge.consumers, picks, used))].sum())
    return total


def leading_to(edge: Edge, consumers: frozenset[int], picks: Picks, used: tuple[int, ...]) -> tuple[int, ...]:
    """The used arcs behind which one of these consumers lies."""
    into = {int(edge.target[a]): a for a in used}
    found: dict[int, None] = {}
    for consumer in sorted(consumers):
        reader = edge.consumers[consumer]
        node = int(reader.wants[picks[reader.choice]])
        while node in into and into[node] not in found:
            found[into[node]] = None
            node = int(edge.source[into[node]])
    return tuple(found)


def row_bytes(problem: Problem, row: Row, picks: Picks, arcs: Arcs, recompute: RecomputeCounts = NOTHING) -> float:
    """The left side of a row for a solution."""
    total = row.constant + sum(float(bytes_of[picks[choice]]) for choice, bytes_of in row.picks.items())
    total += sum(float(bytes_of[list(arcs[edge])].sum()) for edge, bytes_of in row.uses.items())
    total += sum(float(b[picks[choice]]) * share(problem, choice, recompute) for choice, b in row.recompute.items())
    total += sum(least_bytes(problem, least, picks) for least in row.least)
    return total + sum(kept_bytes(problem, kept, picks, arcs, recompute) for kept in row.kept)


def share(problem: Problem, choice: int, recompute: RecomputeCounts) -> float:
    """The share of a choice's members that run again."""
    return recompute.choices.get(choice, 0) / problem.choices[choice].count


def kept_bytes(problem: Problem, kept: RetainedTerm, picks: Picks, arcs: Arcs, recompute: RecomputeCounts) -> float:
    """Bytes of what is kept of one wire."""
    edge = problem.edges[kept.edge]
    homes = kept.home(np.arange(edge.nodes)).tolist()
    made: dict[int, float] = {homes[end_node(edge, PRODUCER, picks)]: share(problem, edge.producer, recompute)}
    for (w, node), members in recompute.offload.items():
        if w == kept.edge:
            made[homes[node]] = made.get(homes[node], 0.0) + members / edge.count
    rerun: dict[int, float] = {}
    for reader in kept.reruns:
        node = homes[end_node(edge, reader, picks)]
        rerun[node] = max(rerun.get(node, 0.0), share(problem, edge.consumers[reader].choice, recompute))
    sent: dict[int, float] = {}
    for arc in arcs[kept.edge]:
        if not edge.free[arc]:
            source, target = homes[int(edge.source[arc])], homes[int(edge.target[arc])]
            part = recompute.arcs.get((kept.edge, arc), 0) / edge.count
            made[target] = made.get(target, 0.0) + part
            sent[source] = sent.get(source, 0.0) + part
    rerun = {node: max(rerun.get(node, 0.0), sent.get(node, 0.0)) for node in (*rerun, *sent)}
    left = {node: max(0.0, part - made.get(node, 0.0) / kept.part) for node, part in rerun.items()}
    for keeper in kept.keepers:
        node = homes[end_node(edge, keeper, picks)]
        left[node] = max(left.get(node, 0.0), 1.0 - kept.gone * made.get(node, 0.0) / kept.part)
    left |= {homes[end_node(edge, keeper, picks)]: 1.0 for keeper in kept.there}
    if kept.given:
        left.pop(homes[end_node(edge, PRODUCER, picks)], None)
    return sum(float(kept.bytes[node]) * part for node, part in left.items())


def least_bytes(problem: Problem, least: InFlightTerm, picks: Picks) -> float:
    """Bytes of what is somewhere on its way."""
    edge = problem.edges[least.edge]
    return min(float(least.bytes[end_node(edge, end, picks)]) for end in range(PRODUCER, len(edge.consumers)))


def homes(edge: Edge) -> Ints:
    """For each layout the first one in whose memory it may lie."""
    found = np.arange(edge.nodes)
    for source, target in zip(edge.source[edge.free].tolist(), edge.target[edge.free].tolist(), strict=True):
        found[found == found[target]] = found[source]
    return found


def end_node(edge: Edge, keeper: int, picks: Picks) -> int:
    """The layout at one end of a wire: as PRODUCER leaves it, or as a consumer wants it."""
    if keeper == PRODUCER:
        return int(edge.produced[picks[edge.producer]])
    consumer = edge.consumers[keeper]
    return int(consumer.wants[picks[consumer.choice]])
