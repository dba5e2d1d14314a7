"""The integer program.

Indices
    o, c    choices; candidates of a choice          t       fixed charges
    v       edges (values)                           g       triggers of a fixed charge: (edge v, consumers k, arcs a)
    k       consumers of an edge                     m       storages: layouts that alias each other count as one
    l       layouts of an edge: nodes of its graph   i       sizes of a value in its layouts, ascending
    a       arcs of an edge: conversions             r       memory rows: moments of the step
    s       conditional costs of an edge: sets of consumers that alone cause them

Variables: `pick` is binary; so is `use` of an edge with several consumers (one with a single consumer needs no flow: its use is
its flow). The others are continuous and at least 0; `rerun`, `reconvert` and `offload` are shares of members here, and count
members in the matrix.

    minimise    sum_o,c seconds[o,c] pick[o,c] + sum_v,a seconds[v,a] use[v,a] + sum_v,s,a conditional[v,s,a] due[v,s,a]
                + sum_t seconds[t] paid[t] + sum_o,c recompute[o,c] rerun[o,c] + sum_v,a recompute[v,a] reconvert[v,a]
                + sum_v,l offload_seconds[v,l] offload[v,l] + sum_p excess[p]              -> implemented in:
    (one)       sum_c pick[o,c] = 1                                every choice o             __init__
    (route)     produced[v,l] + inflow[v,k,l] - outflow[v,k,l]     every edge v, consumer k,
                    = consumed[v,k,l]                              layout l                   _route
    (share)     use[v,a] >= flow[v,k,a]                            every consumer k, arc a    _edge
    (due)       due[v,s,a] >= flow[v,k,a]                          every consumer k in s      _edge
    (charge)    paid[t] >= sum_a flow[v,k,a]                       every trigger of t         _charge
                paid[t] >= sum_a reconvert[v,a]                    if it is one of recomputed conversions
    (recompute) rerun[o,c] <= pick[o,c]                            what may be recomputed     _members_of
                reconvert[v,a] <= use[v,a]
    (tree)      sum_a into m use[v,a] + produced[v,m] <= 1         every storage m            _tree
    (keep)      keep[v,l] >= consumed[v,k,l] - recomputed[v,l]     saved for consumer k       memory_terms.retained_columns
                keep[v,l] >= rerun[v,k,l] - recomputed[v,l]        every k that may rerun
                keep[v,l] >= sum_a from l reconvert[v,a] - recomputed[v,l]
    (excess)    excess[p] >= link[p,a] - busy[p]                   every region p, link a     overlap_rows
    (step)      step[v,i] >= 1 + sum_k (larger[v,k,i] - 1)         every size i in flight     memory_terms.in_flight_columns
    (budget)    bytes . (pick, use, keep, step, rerun) <= limit    every memory row r         add_memory_row

`produced` and `consumed` are sums of picks with that layout, `larger` of those with one of at least size i, `rerun[v,k,l]` a
sum of reruns; `recomputed` is what reruns produce, what is converted again into that layout, and what comes back in it from the
host. `busy` is what a region computes and waits for, `link` what it sends over a link, linear in all of the above; there are
none where messages do not overlap with computing. (recompute), (tree), (keep), (step) and (budget) join with the first memory
row: without one they only cost. Shares are integers only where picks and routes are fixed (`members`): branched on together
with the picks they take minutes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.matrix import MICROSECONDS, Matrix, SparseBlock
from autopar.solver.memory_terms import in_flight_columns, retained_columns
from autopar.solver.overlap_rows import RegionColumns, add_recomputed, add_regions
from autopar.solver.problem import Bools, Consumer, Edge, FixedCharge, Floats, Ints, Problem, Row, storages
from autopar.solver.settings import SearchSettings


@dataclass(slots=True)
class Columns:
    """The first column of each group of a problem's variables."""

    pick: list[int] = field(default_factory=list)  # per choice
    use: list[int] = field(default_factory=list)  # per edge
    flow: list[list[int]] = field(default_factory=list)  # per edge and consumer
    due: list[dict[int, int]] = field(default_factory=list)  # per edge, by place of the conditional cost
    paid: dict[int, int] = field(default_factory=dict)  # of fixed charges
    regions: list[RegionColumns] = field(default_factory=list)
    rerun: dict[int, int] = field(default_factory=dict)  # of choices that may run again
    reconvert: dict[int, int] = field(default_factory=dict)  # of edges that may be converted again
    offload: dict[int, tuple[int, Ints]] = field(default_factory=dict)  # of edges that the host may hold, with their layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBound:
    """A new upper bound of a row of the matrix."""

    row: int
    upper: float


class IntegerProgram:
    """The integer program of a problem; costs are in microseconds, or in `peak_weight` once it minimises memory.

    Args:
        problem: the problem.
        joint: with prices that several choices share, of fixed charges and regions; else they are added later.
    """

    def __init__(self, problem: Problem, *, joint: bool = True) -> None:
        self.problem, self.columns, self.matrix = problem, Columns(), Matrix()
        self._per_second = MICROSECONDS
        self._peak: tuple[int, float] | None = None  # the column of the peak, and its unit in bytes
        self.memory_rows: dict[str, tuple[int, float]] = {}  # by name: the place of the block, and its unit in bytes
        for choice in problem.choices:  # (one)
            number, first = len(choice.seconds), self._add_columns(choice.seconds, integer=True)
            self.columns.pick.append(first)
            self.matrix.add_row(first + np.arange(number), np.ones(number), 1.0, 1.0)
        for edge in problem.edges:
            self._edge(edge)
        if joint:
            self.add_fixed_charges()
            self.add_regions()

    def _add_columns(self, seconds: Floats, *, integer: bool = False) -> int:
        return self.matrix.add_columns(seconds * self._per_second, integer=integer)

    def _edge(self, edge: Edge) -> None:
        """(share), (due), and (route) for each consumer."""
        arcs, every = len(edge.seconds), frozenset(range(len(edge.consumers)))
        seconds = edge.seconds + sum((s.seconds for s in edge.conditional_costs if s.consumers == every), np.zeros(arcs))
        use = self._add_columns(seconds, integer=len(every) > 1)
        flows = [self._add_columns(np.zeros(arcs)) if len(every) > 1 else use for _ in every]
        for consumer, flow in zip(edge.consumers, flows, strict=True):
            self._route(edge, consumer, flow)
            if flow != use:
                self.matrix.add_at_least(use, flow, arcs)
        dues = {number: use for number, cost in enumerate(edge.conditional_costs) if cost.consumers == every}
        for number, cost in enumerate(edge.conditional_costs):
            if cost.consumers and cost.consumers != every:
                dues[number] = due = self._add_columns(cost.seconds)
                for place in sorted(cost.consumers):
                    self.matrix.add_at_least(due, flows[place], arcs)
        self.columns.due.append(dues)
        self.columns.use.append(use)
        self.columns.flow.append(flows)

    def _route(self, edge: Edge, consumer: Consumer, flow: int) -> None:
        """(route): a unit runs from the layout of the producer's pick to the one that the consumer's pick wants."""
        arcs = np.arange(len(edge.seconds))
        parts = [
            (edge.produced, self.columns.pick[edge.producer] + np.arange(len(edge.produced)), 1.0),
            (edge.target, flow + arcs, 1.0),
            (edge.source, flow + arcs, -1.0),
            (consumer.wants, self.columns.pick[consumer.choice] + np.arange(len(consumer.wants)), -1.0),
        ]
        rows = np.concatenate([nodes for nodes, _, _ in parts])
        columns = np.concatenate([columns for _, columns, _ in parts])
        values = np.concatenate([np.full(len(nodes), sign) for nodes, _, sign in parts])
        self.matrix.add_rows(rows, columns, values, edge.nodes, 0.0, 0.0)

    def add_fixed_charges(self) -> None:
        """(charge), for messages sent once."""
        for number, fixed_charge in enumerate(self.problem.fixed_charges):
            if not fixed_charge.recomputed:
                self._charge(number, fixed_charge)

    def add_regions(self) -> None:
        """(excess), which counts charges too: call it after those, and before recomputation is added."""
        assert not self.columns.rerun
        self.columns.regions = add_regions(self.problem, self.columns, self.matrix, self._per_second / MICROSECONDS)

    def add_recomputation(self) -> list[int]:
        """(recompute), (tree), (charge) of conversions that may be recomputed, and their part in regions; returns the rows that
        are relaxed by it.
        """
        columns = self.columns
        for number, choice in enumerate(self.problem.choices):
            if choice.recompute is not None:
                columns.rerun[number] = self._members_of(choice.recompute, choice.count, columns.pick[number])
        for number, edge in enumerate(self.problem.edges):
            if edge.recompute is not None and len(edge.recompute):
                columns.reconvert[number] = self._members_of(edge.recompute, edge.count, columns.use[number])
                self._tree(edge, columns.use[number])
            if edge.offload is not None and len(layouts := np.flatnonzero(np.isfinite(edge.offload))):
                columns.offload[number] = self._add_columns(edge.offload[layouts] / edge.count), layouts
        for number, fixed_charge in enumerate(self.problem.fixed_charges):
            if fixed_charge.recomputed:
                self._charge(number, fixed_charge)
        add_recomputed(self.problem, columns.regions, columns, self.matrix)
        return [self.matrix.change_upper(region.idle, np.inf) for region in columns.regions]

    def reconvert_together(self) -> None:
        """Reconvert the same share of each edge that shares a message, in a problem all of whose arcs are used."""
        for fixed_charge in self.problem.fixed_charges:
            parts = [
                (self.columns.reconvert[trigger.edge] + np.flatnonzero(trigger.arcs), self.problem.edges[trigger.edge].count)
                for trigger in fixed_charge.triggers
                if trigger.consumers is None and trigger.arcs.any() and trigger.edge in self.columns.reconvert
            ]
            for (first, many), (other, number) in itertools.pairwise(parts):
                shares = np.append(np.full(len(first), 1.0 / many), np.full(len(other), -1.0 / number))
                self.matrix.add_row(np.append(first, other), shares, 0.0, 0.0)

    def _members_of(self, seconds: Floats, count: int, whole: int) -> int:
        """(recompute): columns that count members, at most `count` where the column `whole` is 1."""
        finite = np.isfinite(seconds)
        members, row = self._add_columns(np.where(finite, seconds, 0.0) / count), np.arange(finite.sum())
        allowed, never = np.flatnonzero(finite), np.flatnonzero(~finite)
        columns = np.concatenate([whole + allowed, members + allowed])
        values = np.concatenate([np.full(len(row), float(count)), np.full(len(row), -1.0)])
        self.matrix.add_rows(np.concatenate([row, row]), columns, values, len(row), 0.0, np.inf)
        self.matrix.add_row(members + never, np.ones(len(never)), 0.0, 0.0)
        return members

    def _tree(self, edge: Edge, use: int) -> None:
        """(tree): otherwise layouts in a cycle of conversions would recompute each other."""
        moved, storage = np.flatnonzero(~edge.free), storages(edge)
        picks = self.columns.pick[edge.producer] + np.arange(len(edge.produced))
        layouts, columns = np.append(edge.target[moved], edge.produced), np.append(use + moved, picks)
        self.matrix.add_rows(storage[layouts], columns, np.ones(len(layouts)), edge.nodes, -np.inf, 1.0)

    def _charge(self, number: int, fixed_charge: FixedCharge) -> None:
        """(charge): a unit uses at most one arc of a trigger."""
        self.columns.paid[number] = paid = self._add_columns(np.array([fixed_charge.seconds]))
        for trigger in fixed_charge.triggers:
            if trigger.consumers is None:
                reconvert = self.columns.reconvert.get(trigger.edge)  # none where an edge has no arc
                firsts, share = [] if reconvert is None else [reconvert], -1.0 / self.problem.edges[trigger.edge].count
            else:
                firsts, share = [self.columns.flow[trigger.edge][place] for place in sorted(trigger.consumers)], -1.0
            for first in firsts:
                columns = np.append(first + np.flatnonzero(trigger.arcs), paid)
                self.matrix.add_row(columns, np.append(np.full(len(columns) - 1, share), 1.0), 0.0, np.inf)

    def add_memory_row(self, row: Row) -> None:
        """(budget), with the (keep) and (step) of its terms; in units of the limit, so that one tolerance fits all rows."""
        columns = [self.columns.pick[choice] + np.arange(len(b)) for choice, b in row.picks.items()]
        columns += [self.columns.use[edge] + np.arange(len(b)) for edge, b in row.uses.items()]
        values = [*row.picks.values(), *row.uses.values()]
        for choice, bytes_of in row.recompute.items():
            if choice in self.columns.rerun:
                columns.append(self.columns.rerun[choice] + np.arange(len(bytes_of)))
                values.append(bytes_of / self.problem.choices[choice].count)
        terms = [retained_columns(self.problem, self.columns, self.matrix, term) for term in row.retained]
        terms += [in_flight_columns(self.problem, self.columns, self.matrix, term) for term in row.in_flight]
        columns += [term.columns for term in terms]
        values += [term.values for term in terms]
        limit, scale = row.limit, max(row.limit, 1.0)
        if self._peak and not row.fixed:
            limit, scale = 0.0, self._peak[1]
            columns.append(np.array([self._peak[0]]))
            values.append(np.array([-scale]))
        column, value = np.concatenate(columns), np.concatenate(values) / scale
        self.memory_rows[row.name] = self.matrix.add_row(column, value, -np.inf, (limit - row.constant) / scale), scale

    def tighten(self, row: Row) -> RowBound | None:
        """Change the constant of an existing memory row; None if there is none of its name."""
        if row.name not in self.memory_rows:
            return None
        place, scale = self.memory_rows[row.name]
        upper = ((0.0 if self._peak and not row.fixed else row.limit) - row.constant) / scale
        return RowBound(row=self.matrix.change_upper(place, upper), upper=upper)

    def minimise_peak(self, scale: float, seconds: float, settings: SearchSettings) -> int:
        """Minimise the largest bytes of any row, in units of `scale`, plus a small weight of the time in units of `seconds`.

        Returns the column of the peak. Memory rows added from now on are bounded by it, not by their limits.
        """
        self._per_second = settings.peak_weight * settings.time_weight / max(seconds, 1 / MICROSECONDS)
        self.matrix.costs = [cost * (self._per_second / MICROSECONDS) for cost in self.matrix.costs]
        column = self.matrix.add_columns(np.array([settings.peak_weight]))
        self._peak = column, scale
        return column

    def block(self, column: int = 0, row: int = 0) -> SparseBlock:
        """The columns from `column` and the rows from `row` on, in HiGHS's form."""
        return self.matrix.block(self.costs(), column, row)

    def integers(self, *, arcs: bool = False) -> Bools:
        """Which columns are integers; with `arcs`, the use of every arc is."""
        found = self.matrix.integers
        if arcs:
            for first, edge in zip(self.columns.use, self.problem.edges, strict=True):
                found[first : first + len(edge.seconds)] = True
        return found

    def members(self) -> Bools:
        """Which columns count members: recomputed, converted again or offloaded ones."""
        problem, found = self.problem, np.zeros(self.matrix.columns, bool)
        blocks = [(first, len(problem.choices[choice].seconds)) for choice, first in self.columns.rerun.items()]
        blocks += [(first, len(problem.edges[edge].seconds)) for edge, first in self.columns.reconvert.items()]
        blocks += [(first, len(layouts)) for first, layouts in self.columns.offload.values()]
        for first, number in blocks:
            found[first : first + number] = True
        return found

    def costs(self) -> Floats:
        """Costs of all columns, plus a tie-breaker by `tie`, the largest of which weighs a thousandth of the smallest price."""
        extra, cost = np.zeros(self.matrix.columns), np.concatenate([np.zeros(0), *self.matrix.costs])
        for first, choice in zip(self.columns.pick, self.problem.choices, strict=True):
            extra[first : first + len(choice.tie)] = choice.tie
        most = extra.max(initial=0.0)
        return cost + extra * (
            cost[cost > 0].min(initial=1.0) / most * 1e-3 if most and self._per_second == MICROSECONDS else 0.0
        )
