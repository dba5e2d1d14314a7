"""The integer program.

    minimise    sum_o seconds[o,c] pick[o,c] + sum_v,a seconds[v,a] use[v,a] + surcharge[v,s,a] due[v,s,a]
                + sum_t seconds[t] paid[t] + sum_o again[o,c] rerun[o,c] + sum_v,a again[v,a] resent[v,a]
                + sum_v,l away[v,l] back[v,l]
    (one)       sum_c pick[o,c] = 1                                                   every choice o
    (route)     produced[v,l] + inflow[v,k,l] - outflow[v,k,l] = consumed[v,k,l]      every wire v, consumer k, layout l
    (share)     use[v,a] >= flow[v,k,a]                                               every consumer k: paid once, used by all
    (due)       due[v,s,a] >= flow[v,k,a]                                             every consumer k of surcharge s
    (toll)      paid[t] >= sum_a flow[v,k,a]                                          every way (v, k, arcs a) of toll t
    (again)     rerun[o,c] <= pick[o,c], resent[v,a] <= use[v,a]                      what may be made again
    (tree)      sum_a to m use[v,a] + produced[v,m] <= 1                              every memory m in which layouts lie
    (keep)      keep[v,l] >= consumed[v,k,l] - made[v,l]                              every consumer k that keeps v alive
                keep[v,l] >= rerun'[v,k,l] - made[v,l]                                every consumer k that may run again
                keep[v,l] >= sum_a from l resent[v,a] - made[v,l]
    (least)     step[v,i] >= 1 + sum_k (larger[v,k,i] - 1)                            every size i on the way of v, end k
    (budget)    bytes . (pick, use, keep, step, rerun) <= limit                       every row

`produced` and `consumed` are sums of picks with that layout, `larger` of those with one of at least size i, `rerun'` is a sum
of reruns; `made` is what is produced by reruns, what is converted again into that layout, and what comes back in it from the
host. `flow` is continuous. `rerun`, `resent` and `back` are shares of members here; in the matrix they count members. They are
there from the first row on: without a row they only cost. They may count parts of members, which are whole when they are read
off: dear by less than a member, where branching takes minutes. A wire with one consumer needs no flow of its own: its use is
its flow. Rows and columns are built and handed to HiGHS as arrays: through PuLP's objects the largest problems take longer to
build than to solve. `to_pulp` states the same program in PuLP, for other solvers and for the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pulp

from autopar.solver.problem import (
    PRODUCER,
    Consumer,
    Edge,
    FixedCharge,
    Floats,
    InFlightTerm,
    Ints,
    Problem,
    RetainedTerm,
    Row,
    homes,
)
from autopar.solver.settings import SearchSettings

MICROSECONDS = 1e6  # the objective is in microseconds: HiGHS works with absolute tolerances of 1e-7


@dataclass(slots=True)
class Columns:
    """Where the variables of a problem stand."""

    pick: list[int] = field(default_factory=list)  # first column per choice
    use: list[int] = field(default_factory=list)  # first column per wire
    rerun: dict[int, int] = field(default_factory=dict)  # first column per choice that may run again
    resent: dict[int, int] = field(default_factory=dict)  # first column per wire that may be converted again
    back: dict[int, tuple[int, Ints]] = field(default_factory=dict)  # first column per wire that the host may hold; layouts
    count: int = 0

    def add(self, number: int) -> int:
        first, self.count = self.count, self.count + number
        return first


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RowEntry:
    """`number` rows of the matrix with equal bounds, the first of them row `row`; `rows` counts from there."""

    row: int
    number: int
    lower: float
    upper: float
    rows: Ints
    columns: Ints
    values: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBound:
    """A new upper bound of a row of the matrix."""

    row: int
    upper: float


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SparseBlock:
    """Columns and rows of a program, row by row: entries `start[i]` to `start[i + 1]` are those of row i."""

    cost: Floats
    lower: Floats
    upper: Floats
    start: npt.NDArray[np.int32]
    column: npt.NDArray[np.int32]
    value: Floats


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ColumnRef:
    """Columns that stand for layouts of a wire: column i for layout `nodes[i]`, times `values[i]`."""

    nodes: Ints
    columns: Ints
    values: Floats

    def times(self, factor: float) -> ColumnRef:
        return replace(self, values=factor * self.values)


class IntegerProgram:
    """The program of a problem as a sparse matrix: `lower <= A x <= upper`, `x >= 0`, and costs in microseconds."""

    def __init__(self, problem: Problem, *, fixed_charges: bool = True) -> None:
        self.problem = problem
        self.columns = Columns()
        self.cost: list[Floats] = []
        self.integer: list[npt.NDArray[np.bool_]] = []
        self._entries: list[RowEntry] = []
        self.rows = 0
        self._bounded: dict[str, tuple[int, float]] = {}  # rows by name: the place of the entry, and its unit
        self.peak: tuple[int, float] | None = None
        self._per_second = MICROSECONDS
        for choice in problem.choices:
            self.columns.pick.append(self._columns(choice.seconds, integer=True))
            number = len(choice.seconds)
            self._add(np.zeros(number, np.int64), self.columns.pick[-1] + np.arange(number), np.ones(number), 1, 1.0, 1.0)
        self.flows = [self._wire(edge) for edge in problem.edges]
        if fixed_charges:
            self.add_fixed_charges()

    def add_fixed_charges(self) -> None:
        """(toll): a unit goes at most once along an axis in one way."""
        for fixed_charge in self.problem.fixed_charges:
            if all(way.consumers is not None for way in fixed_charge.ways):
                self._toll(fixed_charge)

    def add_recomputation(self) -> None:
        """(again): what may be made again, with its tolls."""
        for number, choice in enumerate(self.problem.choices):
            if choice.recompute is not None:
                self.columns.rerun[number] = self._again(choice.recompute, choice.count, self.columns.pick[number])
        for number, edge in enumerate(self.problem.edges):
            if edge.recompute is not None and len(edge.recompute):
                self.columns.resent[number] = self._again(edge.recompute, edge.count, self.columns.use[number])
                self._tree(edge, self.columns.use[number])
            if edge.offload is not None and len(nodes := np.flatnonzero(np.isfinite(edge.offload))):
                self.columns.back[number] = self._columns(edge.offload[nodes] / edge.count), nodes
        for fixed_charge in self.problem.fixed_charges:
            if any(way.consumers is None for way in fixed_charge.ways):
                self._toll(fixed_charge)

    def _tree(self, edge: Edge, use: int) -> None:
        """(tree): layouts that come from each other in a circle would make each other again."""
        moved, lies = np.flatnonzero(~edge.free), homes(edge)
        made = self.columns.pick[edge.producer] + np.arange(len(edge.produced))
        nodes, columns = np.append(edge.target[moved], edge.produced), np.append(use + moved, made)
        self._add(lies[nodes], columns, np.ones(len(nodes)), edge.nodes, -np.inf, 1.0)

    def _again(self, seconds: Floats, count: int, whole: int) -> int:
        """Columns that count members, at most `count` of them where the whole column is 1; none where seconds are infinite."""
        may = np.isfinite(seconds)
        members, row = self._columns(np.where(may, seconds, 0.0) / count), np.arange(may.sum())
        held, never = np.flatnonzero(may), np.flatnonzero(~may)
        self._add(
            np.concatenate([row, row]), np.concatenate([whole + held, members + held]),
            np.concatenate([np.full(len(row), float(count)), np.full(len(row), -1.0)]), len(row), 0.0, np.inf,
        )  # fmt: skip
        self._add(np.zeros(len(never), np.int64), members + never, np.ones(len(never)), 1, 0.0, 0.0)
        return members

    def _toll(self, fixed_charge: FixedCharge) -> None:
        paid = self._columns(np.array([fixed_charge.seconds]))
        for way in fixed_charge.ways:
            if way.consumers is None:
                resent = self.columns.resent.get(way.edge)  # none where a wire has no arc
                firsts, each = [] if resent is None else [resent], -1.0 / self.problem.edges[way.edge].count
            else:
                firsts, each = [self.flows[way.edge][place] for place in sorted(way.consumers)], -1.0
            for first in firsts:
                column = np.append(first + np.flatnonzero(way.arcs), paid)
                value = np.append(np.full(len(column) - 1, each), 1.0)
                self._add(np.zeros(len(column), np.int64), column, value, 1, 0.0, np.inf)

    def _columns(self, seconds: Floats, *, integer: bool = False) -> int:
        self.cost.append(seconds * self._per_second)
        self.integer.append(np.full(len(seconds), integer))
        return self.columns.add(len(seconds))

    def _add(self, row: Ints, column: Ints, value: Floats, rows: int, lower: float, upper: float) -> None:
        """Append `rows` rows with the same bounds; `row` counts from the first of them."""
        self._entries.append(
            RowEntry(row=self.rows, number=rows, lower=lower, upper=upper, rows=row, columns=column, values=value)
        )
        self.rows += rows

    def _wire(self, edge: Edge) -> list[int]:
        """The columns and rows of a wire; the first column of each consumer's flow."""
        arcs, every = len(edge.seconds), frozenset(range(len(edge.consumers)))
        seconds = edge.seconds + sum((s.seconds for s in edge.conditional_costs if s.consumers == every), np.zeros(arcs))
        use = self._columns(seconds, integer=len(every) > 1)
        flows = [self._columns(np.zeros(arcs)) if len(every) > 1 else use for _ in every]
        for consumer, flow in zip(edge.consumers, flows, strict=True):
            self._route(edge, consumer, flow)
            if flow != use:
                self._at_least(use, flow, arcs)
        for surcharge in edge.conditional_costs:
            if surcharge.consumers and surcharge.consumers != every:
                due = self._columns(surcharge.seconds)
                for place in sorted(surcharge.consumers):
                    self._at_least(due, flows[place], arcs)
        self.columns.use.append(use)
        return flows

    def _at_least(self, greater: int, less: int, number: int) -> None:
        row = np.arange(number)
        ones = np.ones(number)
        self._add(
            np.concatenate([row, row]),
            np.concatenate([greater + row, less + row]),
            np.concatenate([ones, -ones]),
            number,
            0.0,
            np.inf,
        )

    def _route(self, edge: Edge, consumer: Consumer, flow: int) -> None:
        """(route): a unit runs from the node that the producer's pick names to the one that the consumer's pick wants."""
        arcs = np.arange(len(edge.seconds))
        parts = [
            (edge.produced, self.columns.pick[edge.producer] + np.arange(len(edge.produced)), 1.0),
            (edge.target, flow + arcs, 1.0),
            (edge.source, flow + arcs, -1.0),
            (consumer.wants, self.columns.pick[consumer.choice] + np.arange(len(consumer.wants)), -1.0),
        ]
        row = np.concatenate([nodes for nodes, _, _ in parts])
        column = np.concatenate([columns for _, columns, _ in parts])
        value = np.concatenate([np.full(len(nodes), sign) for nodes, _, sign in parts])
        self._add(row, column, value, edge.nodes, 0.0, 0.0)

    def minimise_peak(self, scale: float, seconds: float, settings: SearchSettings) -> int:
        """From now on the objective is the most bytes of any row in units of `scale` times `peak_weight`, and to a small part
        the time in units of `seconds`; returns the column of the peak."""
        self._per_second = settings.peak_weight * settings.time_weight / max(seconds, 1 / MICROSECONDS)
        self.cost = [cost * (self._per_second / MICROSECONDS) for cost in self.cost]
        self.peak = self.columns.add(1), scale
        self.cost.append(np.full(1, settings.peak_weight))
        self.integer.append(np.zeros(1, bool))
        return self.peak[0]

    def tighten(self, row: Row) -> RowBound | None:
        """Change the constant of a row that is there already; None if none of its name is."""
        if row.name not in self._bounded:
            return None
        place, scale = self._bounded[row.name]
        upper = ((0.0 if self.peak else row.limit) - row.constant) / scale
        self._entries[place] = entry = replace(self._entries[place], upper=upper)
        return RowBound(row=entry.row, upper=upper)

    def add_memory_row(self, row: Row) -> None:
        """(budget), with (keep) where a value is kept for several or may be gone, and (least)."""
        columns = [self.columns.pick[choice] + np.arange(len(b)) for choice, b in row.picks.items()]
        columns += [self.columns.use[edge] + np.arange(len(b)) for edge, b in row.uses.items()]
        values = [*row.picks.values(), *row.uses.values()]
        for choice, bytes_of in row.recompute.items():
            if choice in self.columns.rerun:
                columns.append(self.columns.rerun[choice] + np.arange(len(bytes_of)))
                values.append(bytes_of / self.problem.choices[choice].count)
        for kept in row.kept:
            column, value = self._keep(kept)
            columns.append(column)
            values.append(value)
        for least in row.least:
            column, value = self._least(least)
            columns.append(column)
            values.append(value)
        limit, scale = row.limit, max(row.limit, 1.0)  # in units of the limit, so that one tolerance fits all rows
        if self.peak:
            limit, scale = 0.0, self.peak[1]
            columns.append(np.array([self.peak[0]]))
            values.append(np.array([-scale]))
        self._bounded[row.name] = len(self._entries), scale
        column, value = np.concatenate(columns), np.concatenate(values) / scale
        self._add(np.zeros(len(column), np.int64), column, value, 1, -np.inf, (limit - row.constant) / scale)

    def _keep(self, kept: RetainedTerm) -> tuple[Ints, Floats]:
        """(keep): the columns that say what is kept of a wire, and their bytes."""
        edge = self.problem.edges[kept.edge]
        there, ends = ([self._end(edge, end) for end in some] for some in (kept.there, kept.keepers))
        recompute = [end.times(1 / kept.part) for end in self._made(kept.edge)]
        reruns = [end for reader in kept.reruns if (end := self._rerun(kept.edge, reader)) is not None]
        reruns += self._resent(kept.edge, edge.source)
        given = [self._end(edge, PRODUCER)] if kept.given else []
        made = recompute + given if kept.gone else given
        if len(there) + len(ends) == 1 and not reruns and not made:
            (end,) = (*there, *ends)
            return end.columns, kept.bytes[kept.home(end.nodes)]
        nodes = np.arange(edge.nodes)
        keep = self._columns(np.zeros(len(nodes))) + nodes
        for needed, less in ((there, given), (ends, made), (reruns, recompute + given)):
            for end in needed:
                parts = [ColumnRef(nodes=nodes, columns=keep, values=np.ones(len(nodes))), end.times(-1.0), *less]
                self._add(
                    kept.home(np.concatenate([part.nodes for part in parts])), np.concatenate([part.columns for part in parts]),
                    np.concatenate([part.values for part in parts]), len(nodes), 0.0, np.inf,
                )  # fmt: skip
        return keep, kept.bytes

    def _least(self, least: InFlightTerm) -> tuple[Ints, Floats]:
        """(least): the columns that say how much is on its way at least, and the bytes of each step up."""
        edge = self.problem.edges[least.edge]
        ends = [self._end(edge, end) for end in range(PRODUCER, len(edge.consumers))]
        sizes = np.unique(np.concatenate([least.bytes[end.nodes] for end in ends]))
        most = min(float(least.bytes[end.nodes].max()) for end in ends)
        steps, first = sizes[(sizes > sizes[0]) & (sizes <= most)], self._columns(np.zeros(int((sizes <= most).sum()) - 1))
        for number, size in enumerate(steps):
            larger = [end.columns[least.bytes[end.nodes] >= size] for end in ends]
            column = np.concatenate([np.array([first + number]), *larger])
            value = np.concatenate([np.ones(1), -np.ones(len(column) - 1)])
            self._add(np.zeros(len(column), np.int64), column, value, 1, 1.0 - len(ends), np.inf)
        always = np.full(len(ends[0].columns), sizes[0])
        steps = np.diff(np.concatenate([sizes[:1], steps]))
        return np.concatenate([ends[0].columns, first + np.arange(len(steps))]), np.concatenate([always, steps])

    def _end(self, edge: Edge, keeper: int) -> ColumnRef:
        """The pick columns at one end of a wire, and the layout that each of them has there."""
        choice, nodes = edge.producer, edge.produced
        if keeper != PRODUCER:
            choice, nodes = edge.consumers[keeper].choice, edge.consumers[keeper].wants
        return ColumnRef(nodes=nodes, columns=self.columns.pick[choice] + np.arange(len(nodes)), values=np.ones(len(nodes)))

    def _rerun(self, number: int, keeper: int) -> ColumnRef | None:
        """The columns that recompute one end, by choice; None if it may not be recomputed."""
        edge = self.problem.edges[number]
        choice, nodes = edge.producer, edge.produced
        if keeper != PRODUCER:
            choice, nodes = edge.consumers[keeper].choice, edge.consumers[keeper].wants
        if choice not in self.columns.rerun:
            return None
        columns = self.columns.rerun[choice] + np.arange(len(nodes))
        return ColumnRef(nodes=nodes, columns=columns, values=np.full(len(nodes), 1.0 / self.problem.choices[choice].count))

    def _made(self, number: int) -> list[ColumnRef]:
        """What has a layout of a wire there again."""
        produced, edge = self._rerun(number, PRODUCER), self.problem.edges[number]
        found = ([] if produced is None else [produced]) + self._resent(number, edge.target)
        if number in self.columns.back:
            first, nodes = self.columns.back[number]
            columns, values = first + np.arange(len(nodes)), np.full(len(nodes), 1.0 / edge.count)
            found.append(ColumnRef(nodes=nodes, columns=columns, values=values))
        return found

    def _resent(self, number: int, nodes: Ints) -> list[ColumnRef]:
        """Conversions that are done again, at their sources or at their targets; what stays where it is makes nothing."""
        if number not in self.columns.resent:
            return []
        edge = self.problem.edges[number]
        assert edge.recompute is not None
        moved = np.flatnonzero(~edge.free & np.isfinite(edge.recompute))
        columns = self.columns.resent[number] + moved
        return [ColumnRef(nodes=nodes[moved], columns=columns, values=np.full(len(moved), 1.0 / edge.count))]

    def block(self, column: int = 0, row: int = 0) -> SparseBlock:
        """The columns from `column` and the rows from `row` on, as arrays; entries of the same place are added."""
        entries = [entry for entry in self._entries if entry.row >= row]
        rows = np.concatenate([np.zeros(0, np.int64), *(entry.row + entry.rows for entry in entries)]) - row
        columns = np.concatenate([np.zeros(0, np.int64), *(entry.columns for entry in entries)])
        values = np.concatenate([np.zeros(0), *(entry.values for entry in entries)])
        key = rows * self.columns.count + columns
        places, inverse = np.unique(key, return_inverse=True)
        total = np.bincount(inverse, weights=values, minlength=len(places))
        places, total = places[total != 0], total[total != 0]
        return SparseBlock(
            cost=(np.concatenate(self.cost) + self._tie_break())[column:],
            lower=np.concatenate([np.full(e.number, e.lower) for e in self._entries if e.row >= row] or [np.zeros(0)]),
            upper=np.concatenate([np.full(e.number, e.upper) for e in self._entries if e.row >= row] or [np.zeros(0)]),
            start=np.searchsorted(places // self.columns.count, np.arange(self.rows - row + 1)).astype(np.int32),
            column=(places % self.columns.count).astype(np.int32),
            value=total,
        )

    def _tie_break(self) -> Floats:
        """What lets the smaller `tie` win among equal prices: the largest weighs a thousandth of the smallest price."""
        extra, cost = np.zeros(self.columns.count), np.concatenate(self.cost)
        for first, choice in zip(self.columns.pick, self.problem.choices, strict=True):
            extra[first : first + len(choice.tie)] = choice.tie
        most = extra.max(initial=0.0)
        return extra * (cost[cost > 0].min(initial=1.0) / most * 1e-3 if most and not self.peak else 0.0)

    def to_pulp(self) -> pulp.LpProblem:
        """This integer program in PuLP, for other solvers, for `.lp` files that a person can read, and for tests."""
        program = pulp.LpProblem("autopar", pulp.LpMinimize)
        integer = np.concatenate(self.integer)
        kinds = [pulp.LpInteger if whole else pulp.LpContinuous for whole in integer]
        variables = [program.add_variable(f"x{i}", 0, None, kind) for i, kind in enumerate(kinds)]
        program += pulp.LpAffineExpression(zip(variables, np.concatenate(self.cost).tolist(), strict=True))
        part = self.block()
        for row, (low, high) in enumerate(zip(part.lower, part.upper, strict=True)):
            here = slice(part.start[row], part.start[row + 1])
            pairs = zip(part.column[here].tolist(), part.value[here].tolist(), strict=True)
            total = pulp.LpAffineExpression([(variables[column], value) for column, value in pairs])
            if low == high:
                program += total == low
            else:
                program += (total >= low) if np.isfinite(low) else (total <= high)
        return program
