"""The planning problem, free of tensors: choices to make, edges that carry values between them, rows that bound memory.

A `Choice` is an operator (or a given tensor, or an output) with its candidates; an `Edge` is a value with its layout graph.
Costs are seconds for all members of a class of repeated blocks. The solver sees nothing else, so that small problems can be
written by hand and checked by enumeration.

What the backward needs is retained from the forward or recomputed: the first k members of a choice run again, the first k
members of an edge are converted again. Or it is offloaded to the host and comes back: the members after these. Since both are
always the *first* members, the members of which a value is needed and not recomputed are as many as one number is larger than
the other, so that it is enough to know shares of members:

    needed   |========|        recomputed   |=====|        retained   0.8 - 0.5
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from autopar.solver.overlap import Activity, OverlapRegion, excess, own_seconds
from autopar.solver.overlap import Floats as Floats
from autopar.solver.overlap import Ints as Ints

Bools = npt.NDArray[np.bool_]
Picks = tuple[int, ...]  # a candidate per choice
Arcs = tuple[tuple[int, ...], ...]  # the arcs used per edge


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Choice:
    """Pick one candidate; candidate c costs `seconds[c]`. Among solutions of equal price the one of the least `tie` wins.

    To run all `count` members again costs `recompute[c]` seconds; None if they must not run again.
    """

    name: str
    seconds: Floats
    tie: Floats
    count: int = 1
    recompute: Floats | None = None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Consumer:
    """Reads an edge: candidate c of `choice` wants layout `wants[c]`."""

    choice: int
    wants: Ints


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ConditionalCost:
    """Seconds per arc, paid once if the arc leads to any of these consumers (places in `Edge.consumers`)."""

    seconds: Floats
    consumers: frozenset[int]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Edge:
    """A value from its producer to its consumers, through its layout graph.

    Candidate c of the producer leaves the value in layout `produced[c]`; arc a turns layout `source[a]` into `target[a]` for
    `seconds[a]`, paid once for any number of consumers. Costs caused by only some consumers are conditional costs: the
    gradient's conversion back from those that have one, the second gather of a weight for those that save it.
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
    free: Bools  # arcs whose target aliases the storage of their source
    count: int = 1
    recompute: Floats | None = None  # seconds per arc to convert all `count` members once more, inf where they must not
    offload: Floats | None = None  # seconds per layout to move all members to the host and back, inf where they must not


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ChargeTrigger:
    """These arcs of an edge, if they lead to any of these consumers (indices in `Edge.consumers`); None: if their conversion is
    recomputed.
    """

    edge: int
    consumers: frozenset[int] | None
    arcs: Bools


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class FixedCharge:
    """The latency of one message in which several values travel: seconds paid once if any trigger's arcs are used.

    For recomputed conversions, the largest share of members of any trigger is paid.
    """

    name: str
    seconds: float
    triggers: tuple[ChargeTrigger, ...]

    @property
    def recomputed(self) -> bool:
        """Whether it is for recomputed conversions."""
        return any(trigger.consumers is None for trigger in self.triggers)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Row:
    """Bytes alive at one moment:

    constant + sum picks[choice][c] + sum uses[edge][a] + sum recompute[choice][c] (share of members that run again)
        + sum retained + sum in_flight <= limit

    Of several rows with one name, which differ only in the constant, the last counts. The limit of a `fixed` row, which is for
    another memory, holds even when the peak of the others is minimised.
    """

    name: str
    limit: float
    picks: Mapping[int, Floats]
    uses: Mapping[int, Floats]
    retained: tuple[RetainedTerm, ...]
    in_flight: tuple[InFlightTerm, ...] = ()
    recompute: Mapping[int, Floats] = field(default_factory=dict)
    constant: float = 0.0
    fixed: bool = False


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RetainedTerm:
    """`bytes[l]` for each layout l of an edge that something needs. Ends are consumers, or PRODUCER for the produced layout.

    Attributes:
        edge: the edge.
        saved_by: ends whose backward needs their layout; recomputation replaces it while it is `droppable`.
        bytes: bytes of all members by layout.
        read_by: ends that read it at this moment: they need it in any case.
        rerun_by: ends that need it for as many members as they rerun; a conversion that is recomputed needs its source, too.
        droppable: whether the moment lies before the recomputation, so that what is recomputed later is not there.
        free_as_produced: the produced layout takes no memory of its own.
        storages: `storages[l]` is the layout whose storage layout l lies in; None: each layout has its own.
        first_share: the term is about the first members, this share of all.
    """

    edge: int
    saved_by: tuple[int, ...]
    bytes: Floats
    read_by: tuple[int, ...] = ()
    rerun_by: tuple[int, ...] = ()
    droppable: bool = False
    free_as_produced: bool = False
    storages: Ints | None = None
    first_share: float = 1.0

    def storage(self, nodes: Ints) -> Ints:
        """The layouts in whose storage layouts lie."""
        return nodes if self.storages is None else self.storages[nodes]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class InFlightTerm:
    """An edge in flight: the least `bytes[l]` over the produced layout and all wanted layouts."""

    edge: int
    bytes: Floats


PRODUCER = -1


@dataclass(frozen=True, slots=True)
class RecomputeCounts:
    """How many members of a choice are recomputed, of an edge converted again over an arc, and fetched from the host in a
    layout; 0 if there is no entry.
    """

    choices: Mapping[int, int] = field(default_factory=dict)
    arcs: Mapping[tuple[int, int], int] = field(default_factory=dict)
    offload: Mapping[tuple[int, int], int] = field(default_factory=dict)


NOTHING = RecomputeCounts()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Problem:
    """Every choice once; every edge connects choices by their place in `choices`.

    In the `regions` messages overlap with computing: their excess adds to the prices (`overlap`).
    """

    choices: tuple[Choice, ...]
    edges: tuple[Edge, ...]
    fixed_charges: tuple[FixedCharge, ...] = ()
    regions: tuple[OverlapRegion, ...] = ()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Solution:
    """A candidate per choice and the arcs used per edge; `seconds` is their price, `bound` a proven lower bound."""

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
    """Seconds of a solution: candidates, used arcs with conditional costs, recomputation, offload, fixed charges, and the
    excess of messages over the computing that hides them.
    """
    total = local_price(problem, picks, recompute)
    paid = [charge_share(problem, fixed_charge, picks, arcs, recompute) for fixed_charge in problem.fixed_charges]
    total += sum(fixed_charge.seconds * share for fixed_charge, share in zip(problem.fixed_charges, paid, strict=True))
    if problem.regions:
        total += excess(problem.regions, own_seconds(problem.regions, activity_of(problem, picks, arcs, recompute, paid)))
    total += sum(route_price(edge, picks, used) for edge, used in zip(problem.edges, arcs, strict=True))
    for (edge, arc), members in recompute.arcs.items():
        seconds = problem.edges[edge].recompute
        total += 0.0 if seconds is None else float(seconds[arc]) * members / problem.edges[edge].count
    return total + offload_price(problem, recompute)


def activity_of(problem: Problem, picks: Picks, arcs: Arcs, recompute: RecomputeCounts, paid: Sequence[float]) -> Activity:
    """How much a solution uses of everything that has a price; `paid` are the shares of fixed charges."""

    @functools.cache
    def due(edge: int, place: int) -> tuple[int, ...]:
        found = problem.edges[edge]
        return leading_to(found, found.conditional_costs[place].consumers, picks, arcs[edge])

    return Activity(
        picks=picks,
        arcs=arcs,
        due=due,
        reruns={choice: rerun_share(problem, choice, recompute) for choice in recompute.choices},
        reconverts={(w, arc): members / problem.edges[w].count for (w, arc), members in recompute.arcs.items()},
        charges=paid,
    )


def offload_price(problem: Problem, recompute: RecomputeCounts) -> float:
    """Seconds of moving what is offloaded to the host and back."""
    total = 0.0
    for (w, node), members in recompute.offload.items():
        seconds = problem.edges[w].offload
        total += 0.0 if seconds is None else float(seconds[node]) * members / problem.edges[w].count
    return total


def local_price(problem: Problem, picks: Picks, recompute: RecomputeCounts) -> float:
    """Seconds of the candidates, and of the members that run again."""
    total = sum(float(c.seconds[p]) for c, p in zip(problem.choices, picks, strict=True))
    for choice, members in recompute.choices.items():
        seconds = problem.choices[choice].recompute
        total += 0.0 if seconds is None else float(seconds[picks[choice]]) * members / problem.choices[choice].count
    return total


def charge_share(
    problem: Problem, fixed_charge: FixedCharge, picks: Picks, arcs: Arcs, recompute: RecomputeCounts = NOTHING
) -> float:
    """The share of a fixed charge that a solution pays: 0 or 1 for a message that is sent once."""
    return max((trigger_share(problem, trigger, picks, arcs, recompute) for trigger in fixed_charge.triggers), default=0.0)


def trigger_share(
    problem: Problem, trigger: ChargeTrigger, picks: Picks, arcs: Arcs, recompute: RecomputeCounts = NOTHING
) -> float:
    """1 if a solution uses a trigger's arcs, else 0; of a conversion that is recomputed, the share of members."""
    edge = problem.edges[trigger.edge]
    if trigger.consumers is None:
        return sum(k / edge.count for (w, arc), k in recompute.arcs.items() if w == trigger.edge and trigger.arcs[arc])
    used, mine = arcs[trigger.edge], trigger.arcs  # a few of many: one after the other is faster than numpy
    if not any(mine[arc] for arc in used):
        return 0.0
    return float(any(mine[arc] for arc in leading_to(edge, trigger.consumers, picks, used)))


def route_price(edge: Edge, picks: Picks, used: tuple[int, ...]) -> float:
    """Seconds of the used arcs of one edge, which form a tree."""
    if not used:
        return 0.0
    total = float(edge.seconds[list(used)].sum())
    for cost in edge.conditional_costs:
        total += float(cost.seconds[list(leading_to(edge, cost.consumers, picks, used))].sum())
    return total


def leading_to(edge: Edge, consumers: frozenset[int], picks: Picks, used: tuple[int, ...]) -> tuple[int, ...]:
    """The used arcs on the way to any of these consumers."""
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
    total += sum(float(b[picks[choice]]) * rerun_share(problem, choice, recompute) for choice, b in row.recompute.items())
    total += sum(in_flight_bytes(problem, least, picks) for least in row.in_flight)
    return total + sum(retained_bytes(problem, kept, picks, arcs, recompute) for kept in row.retained)


def rerun_share(problem: Problem, choice: int, recompute: RecomputeCounts) -> float:
    """The share of a choice's members that run again."""
    return recompute.choices.get(choice, 0) / problem.choices[choice].count


def retained_bytes(problem: Problem, kept: RetainedTerm, picks: Picks, arcs: Arcs, recompute: RecomputeCounts) -> float:
    """Bytes that are retained of one edge."""
    edge = problem.edges[kept.edge]
    storage = kept.storage(np.arange(edge.nodes)).tolist()
    recomputed: dict[int, float] = {storage[end_node(edge, PRODUCER, picks)]: rerun_share(problem, edge.producer, recompute)}
    for (w, node), members in recompute.offload.items():
        if w == kept.edge:
            recomputed[storage[node]] = recomputed.get(storage[node], 0.0) + members / edge.count
    rerun: dict[int, float] = {}
    for reader in kept.rerun_by:
        node = storage[end_node(edge, reader, picks)]
        rerun[node] = max(rerun.get(node, 0.0), rerun_share(problem, edge.consumers[reader].choice, recompute))
    sent: dict[int, float] = {}
    for arc in arcs[kept.edge]:
        if not edge.free[arc]:
            source, target = storage[int(edge.source[arc])], storage[int(edge.target[arc])]
            part = recompute.arcs.get((kept.edge, arc), 0) / edge.count
            recomputed[target] = recomputed.get(target, 0.0) + part
            sent[source] = sent.get(source, 0.0) + part
    rerun = {node: max(rerun.get(node, 0.0), sent.get(node, 0.0)) for node in (*rerun, *sent)}
    left = {node: max(0.0, part - recomputed.get(node, 0.0) / kept.first_share) for node, part in rerun.items()}
    for end in kept.saved_by:
        node = storage[end_node(edge, end, picks)]
        left[node] = max(left.get(node, 0.0), 1.0 - kept.droppable * recomputed.get(node, 0.0) / kept.first_share)
    left |= {storage[end_node(edge, end, picks)]: 1.0 for end in kept.read_by}
    if kept.free_as_produced:
        left.pop(storage[end_node(edge, PRODUCER, picks)], None)
    return sum(float(kept.bytes[node]) * part for node, part in left.items())


def in_flight_bytes(problem: Problem, least: InFlightTerm, picks: Picks) -> float:
    """Bytes of a value on its way, at least."""
    edge = problem.edges[least.edge]
    return min(float(least.bytes[end_node(edge, end, picks)]) for end in range(PRODUCER, len(edge.consumers)))


def storages(edge: Edge) -> Ints:
    """For each layout of an edge the first one whose storage it may alias."""
    found = np.arange(edge.nodes)
    for source, target in zip(edge.source[edge.free].tolist(), edge.target[edge.free].tolist(), strict=True):
        found[found == found[target]] = found[source]
    return found


def end_node(edge: Edge, end: int, picks: Picks) -> int:
    """The layout at one end of an edge: as PRODUCER leaves it, or as a consumer wants it."""
    if end == PRODUCER:
        return int(edge.produced[picks[edge.producer]])
    consumer = edge.consumers[end]
    return int(consumer.wants[picks[consumer.choice]])
