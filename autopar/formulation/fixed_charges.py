"""Fixed charges: the latency of a shared message, paid once by all weights with the same conversion."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.analysis.analysis import Analysis
from autopar.analysis.weight_buckets import weight_buckets
from autopar.formulation.overlap import Sent
from autopar.formulation.overlap_loads import GRADIENT, REGATHER, OverlapLoads
from autopar.formulation.prices import Prices, added_up
from autopar.ir.conversion import WAYS
from autopar.ir.layout import R, numbered_axes
from autopar.search_space.buckets import TOGETHER, shared
from autopar.search_space.layout_graph import LayoutGraph
from autopar.search_space.reachable import Conversions
from autopar.search_space.strategies import StrategyConstraints
from autopar.solver.problem import ChargeTrigger, Edge, FixedCharge, Ints

SENT: Mapping[int | None, Sent] = {None: "gather", REGATHER: "regather", GRADIENT: "reduce"}


def fixed_charges(
    analysis: Analysis,
    prices: Prices,
    edges: Sequence[Edge],
    spaces: Sequence[Conversions],
    constraints: StrategyConstraints,
    dropped: frozenset[str],
    loads: OverlapLoads | None = None,
) -> Iterator[FixedCharge]:
    """The latency of every message that may carry the weights of a bucket; buckets of equal weights share a charge.

    It is that of the large buckets where only gradients travel. What moves goes over one axis after the other: weights share a
    message that are `shared` on as many axes before, which is how many steps they have gone, unless they change dims on their
    way. The same holds for a gradient that is reduced alone over an axis before one on which the weight is shared already: it
    has moved, because axes are taken in order if nothing moves. (Over an axis after that one it may have moved or not: the
    large buckets.) A repeated gather is a message of its own: always if weights are `dropped` after use, else if the solver
    chooses it.
    """
    place = {member: i for i, space in enumerate(spaces) for member in space.values.members}
    kinds = [_kinds(space.graph) for space in spaces]
    groups: dict[bool, dict[frozenset[int], list[str]]] = {False: {}, True: {}}  # the first weight of each bucket of a group
    for moved, alike in groups.items():
        for names in weight_buckets(analysis.program, moved=moved):
            alike.setdefault(frozenset(place[name] for name in names), []).append(names[0])
    charges = itertools.count()
    counts, axes = range(len(prices.mesh.sizes)), range(len(numbered_axes(len(prices.mesh.sizes))))
    for (number, (forward, backward)), axis, before in itertools.product(enumerate(WAYS.values()), axes, counts):
        moved = forward != "identity" or before > 0
        sent = [(forward, None), (forward, REGATHER)] if forward in TOGETHER[0] else []
        sent += [(backward, GRADIENT)] if backward in TOGETHER[1] else []
        for (group, buckets), (kind, condition) in itertools.product(groups[moved].items(), sent):
            triggers = []
            for w in sorted(group):
                edge, arcs = edges[w], (kinds[w][0] == axis) & (kinds[w][1] == number)
                arcs &= (kinds[w][2] if forward != "identity" else kinds[w][3]) == before
                consumers: frozenset[int] | None = frozenset(range(len(edge.consumers)))
                if condition is not None:
                    consumers = edge.conditional_costs[condition].consumers
                if condition == REGATHER and spaces[w].values.example not in dropped:
                    consumers = None if edge.recompute is not None else frozenset()
                if consumers != frozenset() and arcs.any():
                    triggers.append(ChargeTrigger(edge=w, consumers=consumers, arcs=arcs))
            together = constraints.once or (not moved and kind == backward and added_up(forward, backward))
            runs = 1 if together else analysis.step.microbatches
            seconds = runs * len(buckets) * prices.latency(kind, axis) if triggers else 0.0
            if seconds > 0:
                if loads is not None:
                    shares = loads.overlap.shares(buckets, SENT[condition], moved=moved)
                    seconds = loads.charge(next(charges), seconds, axis, shares)
                name = f"{kind} over {prices.mesh.name_of(prices.mesh.axes_over(axis))}"
                yield FixedCharge(name=name, seconds=seconds, triggers=tuple(triggers))


def _kinds(graph: LayoutGraph) -> tuple[Ints, Ints, Ints, Ints]:
    """For each arc its axis and state pair, the number of axes on which its source is shared, and whether one of these is a
    later axis.
    """
    counts = np.array([shared(layout) for layout in graph.nodes])[graph.source]
    last = np.array([max((a for a, state in enumerate(layout) if state == R), default=-1) for layout in graph.nodes])
    innermost = np.array([axes[-1] for axes in numbered_axes(len(graph.nodes[0]))])
    return graph.axis, graph.pair, counts, np.where(last[graph.source] > innermost[graph.axis], counts, 0)
