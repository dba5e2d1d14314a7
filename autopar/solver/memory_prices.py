"""Memory rows as prices: the rows of moments, relaxed by Lagrange multipliers of seconds per byte.

With fixed prices, memory that is alive at a moment is charged to the choice that causes it. The program then has neither rows
nor shares of members, and is solved as fast as without a budget:

    bound = min over solutions of (seconds + sum_r price[r] bytes[r]) - sum_r price[r] limit[r]

A value that the backward needs pays for its bytes, or for making it available again, whichever is less: both are linear in the
share of members, so the cheapest share is charged. What a rerun needs is charged in turn, unless it is saved anyway. Where
seconds are free and one row's bytes are not, that is a bound on these bytes (`least_bytes`).

    held[l]         price . bytes of layout l
    rerun[o,c]      recompute[o,c] + sum of available[v, layout that c reads] over edges v that are not saved themselves
    available[p,l]  min(rerun of the producer in p + convert[p,l], min_x held[x] + convert[x,l])
    kept[p,l]       min over shares s of s available[p,l] + (1 - s) held[l]

`p` is the produced layout, `l` the one that a consumer saves, `convert` the shortest path of conversions that are run again. If
several edges share a rerun, each is charged its part: nothing is counted twice, so no solution is overcharged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.memory_terms import ends
from autopar.solver.problem import PRODUCER, Consumer, Edge, Floats, Ints, Problem, RetainedTerm, Row, storages


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Charged:
    """A problem with rows in its prices: every solution within the rows costs at least its optimum less `limits` seconds."""

    problem: Problem
    limits: float


def charged(problem: Problem, rows: Sequence[Row], prices: Mapping[str, float]) -> Charged:
    """The problem with prices under which a solution costs at most

        its seconds + sum of prices[row] * (row_bytes(row) - row.limit) + limits

    however much of it is recomputed or offloaded: the prices include that, and nothing may run again in this problem. Its
    choices are those of the given problem; edges that stand for saved values come after the original ones.

    Args:
        problem: without regions.
        rows: rows of the problem; their constants do not count.
        prices: seconds per byte by row name, at least 0; 0 for rows that are not listed.
    """
    return _Charges(problem, [(row, price) for row in rows if (price := prices.get(row.name, 0.0)) > 0], {}).charged()


def least_bytes(problem: Problem, rows: Iterable[Row]) -> Iterator[float]:
    """For each row, bytes that every solution has at its moment, whatever is recomputed or offloaded: what each choice causes
    by its leanest candidate, without conversions. Constants do not count.

    For GPT-2 on (2, 2) it is the moment of the loss that decides: 5,068 MiB, where the least memory is 5,071, after 6 ms.
    """
    free, conversions = _free(problem), dict[int, Floats]()
    for row in rows:
        due = _Charges(free, [(row, 1.0)], conversions).charged()
        yield sum(float(choice.seconds.min()) for choice in due.problem.choices) - due.limits + row.limit


def _free(problem: Problem) -> Problem:
    """The problem with everything for nothing that is possible."""

    def nothing(seconds: Floats | None) -> Floats | None:
        return None if seconds is None else np.where(np.isinf(seconds), np.inf, 0.0)

    return Problem(
        choices=tuple(
            replace(choice, seconds=np.zeros(len(choice.seconds)), recompute=nothing(choice.recompute))
            for choice in problem.choices
        ),
        edges=tuple(
            replace(
                edge,
                seconds=np.zeros(len(edge.seconds)),
                conditional_costs=(),
                recompute=nothing(edge.recompute),
                offload=nothing(edge.offload),
            )
            for edge in problem.edges
        ),
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """A term of a row, and the seconds charged for all of its bytes, by layout."""

    term: RetainedTerm
    due: Floats

    @property
    def share(self) -> float:
        return self.term.first_share


class _Charges:
    """The charges of a problem's priced rows. Shortest `conversions` by edge take most of the time where there are many
    layouts, and are those of all rows.
    """

    def __init__(self, problem: Problem, rows: Sequence[tuple[Row, float]], conversions: dict[int, Floats]) -> None:
        self.problem, self._rows, self._known = problem, rows, conversions
        self.held: dict[int, list[_Held]] = defaultdict(list)
        self._rerun: dict[int, Floats | None] = {}
        self._available: dict[int, Floats] = {}
        for row, price in rows:
            for term in row.retained:
                layouts = np.arange(problem.edges[term.edge].nodes)
                self.held[term.edge].append(_Held(term, price * term.bytes[term.storage(layouts)]))
        self.storage = {w: storages(problem.edges[w]) for w in self.held}
        self.outputs: dict[int, int] = defaultdict(int)  # edges among which the cost of their producer's rerun is divided
        self.inputs: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by choice: edges that only its rerun needs
        for w, terms in self.held.items():
            edge = problem.edges[w]
            self.outputs[edge.producer] += 1
            if not any(held.term.saved_by or held.term.read_by for held in terms):
                for end in {end for held in terms for end in held.term.rerun_by if end != PRODUCER}:
                    self.inputs[edge.consumers[end].choice].append((w, end))
        for o in sorted(self.outputs):  # in program order, so that what a rerun needs is known
            self.rerun(o)

    def charged(self) -> Charged:
        problem = self.problem
        seconds, arcs = [choice.seconds.copy() for choice in problem.choices], [edge.seconds.copy() for edge in problem.edges]
        for row, price in self._rows:
            for o, size in row.picks.items():
                seconds[o] += price * size
            for w, size in row.uses.items():
                arcs[w] += price * size
            for o, size in row.recompute.items():
                seconds[o] += price * np.minimum(size, 0.0)
        own = [replace(one, seconds=due, recompute=None, offload=None) for one, due in zip(problem.edges, arcs, strict=True)]
        more = list[Edge]()
        for w in self.held:
            edge = problem.edges[w]
            for end, kept in self._kept(w).items():
                o, nodes = ends(edge, end)
                if end == PRODUCER:
                    seconds[o] += kept.diagonal()[nodes]
                    continue
                produced = np.unique(edge.produced)
                least = kept[produced].min(axis=0)
                seconds[o] += least[nodes]
                rest = kept - least
                if rest[np.ix_(produced, np.unique(nodes))].max(initial=0.0) > 0:
                    more.append(_saved(edge, end, rest))
        shift = [min(0.0, float(due.min())) for due in seconds]
        return Charged(
            problem=Problem(
                choices=tuple(
                    replace(choice, seconds=due - less, recompute=None)
                    for choice, due, less in zip(problem.choices, seconds, shift, strict=True)
                ),
                edges=(*own, *more),
                fixed_charges=tuple(charge for charge in problem.fixed_charges if not charge.recomputed),
            ),
            limits=sum(price * row.limit for row, price in self._rows) - sum(shift),
        )

    def _kept(self, w: int) -> dict[int, Floats]:
        """Seconds that the ends of an edge cause by what they save, by produced and wanted layout: each term is charged to one
        end; where several save it, to the one for which most is held."""
        edge, storage = self.problem.edges[w], self.storage[w]
        found: dict[int, Floats] = {}
        saved: dict[int, list[_Held]] = defaultdict(list)
        for held in self.held[w]:
            term = held.term
            if term.read_by or (term.saved_by and not term.droppable):
                end = (*term.read_by, *term.saved_by)[0]
                found[end] = found.get(end, 0.0) + self._due(held, storage)
            else:
                for end in term.saved_by:
                    saved[end].append(held)
        if saved:
            most = max(saved, key=lambda end: (sum(float(held.due.max()) for held in saved[end]), -end))
            again, terms = self.available(w), saved[most]
            least = np.full((edge.nodes, edge.nodes), np.inf)
            dues = [self._due(held, storage) for held in terms]
            for share in sorted({0.0, *(held.share for held in terms)}):
                rest = [max(0.0, 1 - share / held.share) * due for held, due in zip(terms, dues, strict=True)]
                least = np.minimum(least, sum(rest) + (share * again if share else 0.0))
            found[most] = found.get(most, 0.0) + least
        return found

    def _due(self, held: _Held, storage: Ints) -> Floats:
        """Seconds for holding all members, by produced and wanted layout."""
        due = np.tile(held.due, (len(storage), 1))
        return np.where(storage[:, None] == storage, 0.0, due) if held.term.free_as_produced else due

    def available(self, w: int) -> Floats:
        """The fewest seconds that make all members of an edge available for the backward, by produced and wanted layout."""
        if w not in self._available:
            edge, storage, terms = self.problem.edges[w], self.storage[w], self.held[w]
            made, rerun = np.full(edge.nodes, np.inf), self.rerun(edge.producer)
            if rerun is not None:
                less = min(1.0, *(held.share for held in terms)) if not any(h.term.saved_by for h in terms) else 1.0
                np.minimum.at(made, storage[edge.produced], less * rerun / self.outputs[edge.producer])
            hold = np.full(edge.nodes, np.inf)
            np.minimum.at(hold, storage, sum((held.due for held in terms), np.zeros(edge.nodes)))
            if edge.offload is not None:
                np.minimum.at(hold, storage, edge.offload)
            if any(held.term.free_as_produced for held in terms):
                made[:] = 0.0
            convert = self._conversions(w)
            held_anywhere = (hold[:, None] + convert).min(axis=0)
            found = np.minimum(made[storage][:, None] + convert[storage], held_anywhere)
            self._available[w] = found[:, storage]
        return self._available[w]

    def rerun(self, o: int) -> Floats | None:
        """The fewest seconds to rerun all members of a choice, by candidate, including the inputs that only the rerun needs.

        Where the rerun of a member needs other members, as of slices written one after the other, these cost what is known so
        far, which is no more than they cost.
        """
        choice = self.problem.choices[o]
        if choice.recompute is None:
            return None
        if o not in self._rerun:
            self._rerun[o] = total = choice.recompute.copy()
            for row, price in self._rows:
                if o in row.recompute:
                    total += price * np.maximum(row.recompute[o], 0.0)
            for w, end in self.inputs[o]:
                edge = self.problem.edges[w]
                readers = {end for held in self.held[w] for end in held.term.rerun_by}
                made = self.available(w)[np.unique(edge.produced)].min(axis=0)
                total += made[edge.consumers[end].wants] / len(readers)
        return self._rerun[o]

    def _conversions(self, w: int) -> Floats:
        """Shortest paths between storages, by conversions that are run again (Floyd and Warshall)."""
        if w in self._known:
            return self._known[w]
        edge, storage = self.problem.edges[w], self.storage[w]
        found = np.full((edge.nodes, edge.nodes), np.inf)
        np.fill_diagonal(found, 0.0)
        if edge.recompute is not None:
            moved = np.flatnonzero(~edge.free & np.isfinite(edge.recompute))
            np.minimum.at(found, (storage[edge.source[moved]], storage[edge.target[moved]]), edge.recompute[moved])
        self._known[w] = found = _closed(found) if not found[np.isfinite(found)].any() else _shortest(found, storage)
        return found


def _shortest(lengths: Floats, through: Ints) -> Floats:
    """The lengths of shortest paths through these nodes."""
    for between in np.unique(through):
        lengths = np.minimum(lengths, lengths[:, between, None] + lengths[between])
    return lengths


def _closed(lengths: Floats) -> Floats:
    """The lengths of shortest paths where each is 0 or infinite: the transitive closure, by repeated squaring."""
    reached = np.isfinite(lengths).astype(np.float32)
    while (further := (reached @ reached > 0).astype(np.float32)).sum() > reached.sum():
        reached = further
    return np.where(reached > 0, 0.0, np.inf)


def _saved(edge: Edge, end: int, seconds: Floats) -> Edge:
    """An edge that only carries the charges of what an end saves: one arc from each produced layout to each wanted one."""
    consumer = edge.consumers[end]
    produced, first = np.unique(edge.produced, return_inverse=True)
    wanted, last = np.unique(consumer.wants, return_inverse=True)
    source, target = (places.ravel() for places in np.indices((len(produced), len(wanted))))
    return Edge(
        name=f"{edge.name}:saved", producer=edge.producer, produced=first,
        consumers=(Consumer(choice=consumer.choice, wants=len(produced) + last),),
        nodes=len(produced) + len(wanted), source=source, target=len(produced) + target,
        seconds=seconds[np.ix_(produced, wanted)].ravel(), conditional_costs=(), free=np.zeros(len(source), bool),
        count=edge.count,
    )  # fmt: skip


__all__ = ["Charged", "charged", "least_bytes"]
