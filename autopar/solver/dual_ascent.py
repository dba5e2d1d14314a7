"""A lower bound on every solution without a simplex method: dual ascent by messages.

The relaxation without rows splits into small parts: candidates, and for every consumer of an edge the cheapest route from the
producer's layout to the consumer's. Costs that several consumers pay once (arcs, conditional costs, fixed charges) are divided
into shares, one per consumer; any shares give a bound. Parts agree by messages: each passes what it knows about the price of
each candidate to the next one, in the order of the choices and back, so that the bound never falls:

    reparametrisation    price = sum_o left[o, c] + sum_v,k sent[v, k] + distance(produced, wanted, shares[v, k]) + wanted[v, k]
    bound                sum_o min_c left[o, c] + sum_v,k min over both ends
    messages             sent[v, k](l) = weight * min-marginal(l) - message back, distances by Bellman and Ford
    shares               an arc keeps of its share what the distances at it differ by; what is free goes where it is needed

V. Kolmogorov, "A new look at reweighted message passing", IEEE Transactions on Pattern Analysis and Machine Intelligence 37
(2015), with pairs for factors: there the sequential tree-reweighted messages of the same author (ibid. 28, 2006). Shares are
dual variables of (share), (due) and (charge) of `integer_program`, messages those of (route).

The bound of a Llama of two layers on (2, 2, 2) is that of the relaxation after 0.5 CPU seconds, where the simplex method takes
47; of T5-3B on (8, 8) 0.2% below after 0.8 (16), of GPT-2 on (2, 2, 2) 0.4% below after 0.5 (3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from autopar.solver.problem import Edge, FixedCharge, Floats, Ints, Problem
from autopar.solver.reduced_cost_fixing import Window
from autopar.solver.settings import DEFAULTS, SearchSettings

_NEEDED = 0.999  # of a share: what is used nearly wholly could use more


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class DualBound:
    """Every solution costs at least `bound` seconds, plus the reduced cost of any candidate (by choice) or arc (by edge) that
    it uses. Reduced costs are infinite if no solution uses it; without any solution `bound` is infinite and reduced costs mean
    nothing.
    """

    bound: float
    candidates: list[Floats]
    arcs: list[Floats]

    def raised(self, part: Window, bound: float, candidates: Sequence[Floats], arcs: Sequence[Floats]) -> DualBound:
        """This bound, with another one's reduced costs in a part of the problem where they are larger."""

        def larger(costs: Floats, places: Ints, others: Floats) -> Floats:
            found = costs.copy()
            found[places] = np.maximum(costs[places], bound - self.bound + others)
            return found

        return replace(
            self,
            candidates=list(map(larger, self.candidates, part.picks, candidates)),
            arcs=list(map(larger, self.arcs, part.arcs, arcs)),
        )


def dual_ascent(problem: Problem, settings: SearchSettings = DEFAULTS) -> DualBound:
    """A bound on every solution of a problem, ignoring rows and regions, which only make solutions more expensive.

    Sweeps go on while they raise the bound by `ascent_gain`, checked every `ascent_check` sweeps, up to `ascent_sweeps`.
    """
    ascent, bound = _Ascent(problem), -np.inf
    for number in range(1, settings.ascent_sweeps + 1):
        ascent.sweep()
        if number % settings.ascent_check == 0:
            last, bound = bound, ascent.bound().bound
            if not last + settings.ascent_gain * abs(bound) < bound < np.inf:
                break
    return ascent.bound()


class _Groups:
    """Positions grouped by layout."""

    def __init__(self, layouts: Ints) -> None:
        self.order = np.argsort(layouts, kind="stable")
        self.layouts, self._first = np.unique(layouts[self.order], return_index=True)
        self._single = len(self.layouts) == len(self.order)

    def least(self, values: Floats) -> Floats:
        """The least value of each group, which are in order, by row."""
        if self._single:
            return values
        found: Floats = np.minimum.reduceat(values, self._first, axis=-1)
        return found

    def spread(self, values: Floats, nodes: Floats) -> None:
        """Write the least value of each layout into those of all layouts, by row."""
        nodes[..., self.layouts] = self.least(values.take(self.order, axis=-1))


class _Shared:
    """A cost of arcs that is paid once for several consumers of an edge, divided into a share per consumer."""

    def __init__(self, seconds: Floats, consumers: Iterable[int], number: int) -> None:
        self.seconds, self._consumers = seconds, np.array(sorted(consumers))
        self.shares = np.zeros((number, len(seconds)))
        self.shares[self._consumers] = seconds / len(self._consumers)

    @property
    def free(self) -> Floats:
        """The part that nobody pays."""
        unpaid: Floats = np.maximum(0.0, self.seconds - self.shares.sum(axis=0))
        return unpaid

    def divide(self, needed: Floats) -> None:
        """Keep the needed part of each share (by consumer and arc, at most 1), and give the rest to those that need all of
        theirs.
        """
        if len(self._consumers) == 1:
            return
        self.shares *= needed
        weight = (needed[self._consumers] > _NEEDED) + (1 - _NEEDED)
        self.shares[self._consumers] += self.free * weight / weight.sum(axis=0)


@dataclass(slots=True)
class _ChargeShare:
    """The share of a fixed charge that a consumer of an edge pays for using certain arcs."""

    charge: int
    consumer: int
    arcs: Floats
    seconds: float


class _Routes:
    """The routes of one edge to each of its consumers, K in number, with the messages between their ends.

    Attributes:
        sent, wanted: (K, layouts), what the producer and the consumers gave to the price of a route.
        to_consumers, to_producer: (K, layouts), the price of the cheapest route that ends, or starts, in each layout.
    """

    def __init__(self, edge: Edge, charges: list[_ChargeShare]) -> None:
        self.edge, self._charges, number = edge, charges, len(edge.consumers)
        self._into, self._out_of = _Groups(edge.target), _Groups(edge.source)
        self.produced = _Groups(edge.produced)
        self.wants = [_Groups(consumer.wants) for consumer in edge.consumers]
        self.shared = [_Shared(edge.seconds, range(number), number)]
        self.shared += [_Shared(cost.seconds, cost.consumers, number) for cost in edge.conditional_costs if cost.consumers]
        self.sent, self.wanted = np.full((2, number, edge.nodes), np.inf)
        self.produced.spread(np.zeros((number, len(edge.produced))), self.sent)
        for row, ends in zip(self.wanted, self.wants, strict=True):
            ends.spread(np.zeros(len(ends.order)), row)
        self._stale: list[int] = []  # consumers that gave something since the producer asked
        self._sources, self._targets = edge.source[self._into.order], edge.target[self._out_of.order]
        self._add_shares()
        self.to_consumers, self.to_producer = self.forward(), self.backward()

    def _add_shares(self) -> None:
        self.seconds = np.sum([one.shares for one in self.shared], axis=0)
        for share in self._charges:
            self.seconds[share.consumer] += share.seconds * share.arcs
        self._arriving, self._leaving = self.seconds[:, self._into.order], self.seconds[:, self._out_of.order]

    def forward(self, rows: Sequence[int] | slice = slice(None)) -> Floats:
        """The price of the cheapest route that ends in each layout, for these consumers."""
        return _distances(self.sent[rows], self._arriving[rows], self._into, self._sources)

    def backward(self, rows: Sequence[int] | slice = slice(None)) -> Floats:
        """The price of the cheapest route that starts in each layout, for these consumers."""
        return _distances(self.wanted[rows], self._leaving[rows], self._out_of, self._targets)

    def give(self, consumer: int, values: Floats, *, ask: bool) -> None:
        """Receive a consumer's message per candidate; with `ask`, the producer reads it next."""
        self.wants[consumer].spread(values, self.wanted[consumer])
        if ask:
            self._stale.append(consumer)

    def refresh(self) -> None:
        """Bring the messages to the producer up to date."""
        if self._stale:
            self.to_producer[self._stale] = self.backward(self._stale)
            self._stale = []

    def send(self, values: Floats, consumers: list[int], free: list[float]) -> None:
        """Receive the producer's message per candidate, divide shared costs again if all consumers follow, and pass it to
        them.
        """
        self.produced.spread(values, self.sent)
        if not consumers:
            return
        self.to_consumers[consumers] = self.forward(consumers)
        if len(consumers) == len(self.wants) and (len(consumers) > 1 or self._charges):
            self._divide(free)
            self.to_consumers = self.forward()

    def _divide(self, free: list[float]) -> None:
        """Divide shared costs again: the price of every route stays at least the least of its consumer.

        Halfway between the two distances of a layout is a potential: an arc needs what its ends differ by.
        """
        source, target = self.edge.source, self.edge.target
        least = (self.to_consumers + self.wanted).min(axis=1, keepdims=True)
        reached = np.isfinite(self.to_consumers[:, source]) & np.isfinite(self.to_producer[:, target])
        with np.errstate(invalid="ignore"):
            potential = (self.to_consumers + least - self.to_producer) / 2
            difference = np.where(reached, potential[:, target] - potential[:, source], 0.0)
        paid = self.seconds > 0
        needed = np.where(paid, np.clip(difference / np.where(paid, self.seconds, 1.0), 0.0, 1.0), 0.0)
        for one in self.shared:
            one.divide(needed)
        for share in self._charges:
            kept = share.seconds * float((needed[share.consumer] * share.arcs).max(initial=0.0))
            free[share.charge] += share.seconds - kept
            more = free[share.charge] / 2 if kept > _NEEDED * share.seconds else 0.0
            free[share.charge] -= more
            share.seconds = kept + more
        self._add_shares()


def _distances(start: Floats, seconds: Floats, groups: _Groups, ends: Ints) -> Floats:
    """Bellman and Ford: the least of `start` and of what lies before, by row, over arcs to or from `groups`, in their order."""
    found = start.copy()
    if not len(ends):
        return found
    before = found.take(groups.layouts, axis=1)
    while True:
        after = np.minimum(before, groups.least(found.take(ends, axis=1) + seconds))
        if not np.count_nonzero(after < before):
            return found
        found[:, groups.layouts] = before = after


class _Ascent:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        charges = [charge for charge in problem.fixed_charges if not charge.recomputed]
        shares = _charge_shares(charges)
        self._free = [0.0] * len(charges)  # of each charge: what nobody pays
        self._routes = [_Routes(edge, shares.get(w, [])) if edge.consumers else None for w, edge in enumerate(problem.edges)]
        self._out: list[list[_Routes]] = [[] for _ in problem.choices]
        self._in: list[list[tuple[_Routes, int]]] = [[] for _ in problem.choices]
        for routes in filter(None, self._routes):
            self._out[routes.edge.producer].append(routes)
            for place, consumer in enumerate(routes.edge.consumers):
                self._in[consumer.choice].append((routes, place))
        self._weight = [1 / max(1, *map(len, self._neighbours(o))) for o in range(len(problem.choices))]
        self._visited: Sequence[int] = range(len(problem.choices))

    def _neighbours(self, choice: int) -> tuple[list[int], list[int]]:
        """The choices before and after one to which a route leads."""
        ends = [consumer.choice for routes in self._out[choice] for consumer in routes.edge.consumers]
        ends += [routes.edge.producer for routes, _ in self._in[choice]]
        return [end for end in ends if end < choice], [end for end in ends if end > choice]

    def sweep(self) -> None:
        """Send messages in the order of the choices, and back."""
        for choices, later in ((self._visited, int.__lt__), (reversed(self._visited), int.__gt__)):
            for choice in choices:
                self._send(choice, later)
            for routes in filter(None, self._routes):
                routes.refresh()
        several = [len(choice.seconds) > 1 for choice in self._problem.choices]  # elsewhere messages change no more
        self._visited = [o for o in self._visited if several[o] or any(several[end] for end in chain(*self._neighbours(o)))]

    def _send(self, choice: int, later: Callable[[int, int], bool]) -> None:
        """Collect the messages of all routes about each candidate, and pass them to those that lead to a later choice."""
        total = self._problem.choices[choice].seconds.copy()
        before = [routes.to_consumers[place].take(routes.edge.consumers[place].wants) for routes, place in self._in[choice]]
        for known in before:
            total += known
        after = []
        for routes in self._out[choice]:
            routes.refresh()
            after.append(routes.to_producer.take(routes.edge.produced, axis=1))
            total += after[-1].sum(axis=0)
        possible = np.isfinite(total)
        if not possible.all():
            total = np.where(possible, total, 0.0)
            before = [np.where(possible, known, -np.inf) for known in before]
            after = [np.where(possible, known, -np.inf) for known in after]
        given = total * self._weight[choice]
        for routes, known in zip(self._out[choice], after, strict=True):
            follow = [place for place, consumer in enumerate(routes.edge.consumers) if later(choice, consumer.choice)]
            values = -known
            values[follow] += given
            routes.send(values, follow, self._free)
        for (routes, place), known in zip(self._in[choice], before, strict=True):
            follows = later(choice, routes.edge.producer)
            routes.give(place, follows * given - known, ask=follows)

    def bound(self) -> DualBound:
        """The bound of the current messages and shares, with its reduced costs."""
        left = [choice.seconds.copy() for choice in self._problem.choices]
        for o, costs in enumerate(left):
            for routes, place in self._in[o]:
                costs += _taken(routes.wanted[place, routes.edge.consumers[place].wants])
            for routes in self._out[o]:
                costs += _taken(routes.sent[:, routes.edge.produced]).sum(axis=0)
        bound = sum(float(costs.min()) for costs in left)
        if bound == np.inf:
            return DualBound(bound=bound, candidates=left, arcs=[edge.seconds for edge in self._problem.edges])
        candidates = [costs - costs.min() for costs in left]
        arcs: list[Floats] = []
        for edge, found in zip(self._problem.edges, self._routes, strict=True):
            if found is None:
                arcs.append(edge.seconds)
                continue
            routes = found
            before, after = routes.forward(), routes.backward()
            least = (before + routes.wanted).min(axis=1)
            bound += float(least.sum())
            candidates[edge.producer] += ((routes.sent + after) - least[:, None])[:, edge.produced].sum(axis=0)
            for place, consumer in enumerate(edge.consumers):
                candidates[consumer.choice] += (before + routes.wanted)[place, consumer.wants] - least[place]
            detour = before[:, edge.source] + routes.seconds + after[:, edge.target] - least[:, None]
            arcs.append(detour.min(axis=0) + np.sum([one.free for one in routes.shared], axis=0))
        return DualBound(bound=bound, candidates=candidates, arcs=arcs)


def _taken(given: Floats) -> Floats:
    """Subtract what a candidate gave away; one without any route stays infinitely expensive."""
    return np.where(np.isfinite(given), -given, np.inf)


def _charge_shares(charges: Sequence[FixedCharge]) -> dict[int, list[_ChargeShare]]:
    """Equal shares of each charge, by edge."""
    found = [
        (trigger.edge, number, consumer, trigger.arcs.astype(float))
        for number, charge in enumerate(charges)
        for trigger in charge.triggers
        for consumer in sorted(trigger.consumers or ())
    ]
    users = Counter(number for _, number, *_ in found)
    shares: dict[int, list[_ChargeShare]] = {}
    for edge, number, consumer, arcs in found:
        seconds = charges[number].seconds / users[number]
        shares.setdefault(edge, []).append(_ChargeShare(charge=number, consumer=consumer, arcs=arcs, seconds=seconds))
    return shares
