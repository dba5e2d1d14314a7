"""The integer program.

    minimise    sum_o seconds[o,c] pick[o,c] + sum_v,a seconds[v,a] use[v,a] + surcharge[v,s,a] due[v,s,a]
                + sum_t seconds[t] paid[t]
    (one)       sum_c pick[o,c] = 1                                                   every choice o
    (route)     produced[v,l] + inflow[v,k,l] - outflow[v,k,l] = consumed[v,k,l]      every wire v, consumer k, layout l
    (share)     use[v,a] >= flow[v,k,a]                                               every consumer k: paid once, used by all
    (due)       due[v,s,a] >= flow[v,k,a]                                             every consumer k of surcharge s
    (toll)      paid[t] >= sum_a flow[v,k,a]                                          every way (v, k, arcs a) of toll t
    (keep)      keep[v,l] >= consumed[v,k,l]                                          every consumer k that keeps v alive
    (budget)    bytes . (pick, use, keep) <= limit                                    every row

`produced` and `consumed` are sums of picks with that layout; `flow` is continuous. A wire with one consumer needs no flow of
its own: its use is its flow. Rows and columns are built and handed to HiGHS as arrays: through PuLP's objects the largest
problems take longer to build than to solve. `to_pulp` states the same program in PuLP, for other solvers and for the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pulp

from autopar.solver.problem import PRODUCER, Consumer, Floats, Ints, Problem, Row, Wire

MICROSECONDS = 1e6  # the objective is in microseconds: HiGHS works with absolute tolerances of 1e-7


@dataclass(slots=True)
class Columns:
    """Where the variables of a problem stand."""

    pick: list[int] = field(default_factory=list)  # first column per choice
    use: list[int] = field(default_factory=list)  # first column per wire
    count: int = 0

    def add(self, number: int) -> int:
        first, self.count = self.count, self.count + number
        return first


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Entry:
    """`number` rows of the matrix with equal bounds, the first of them row `row`; `rows` counts from there."""

    row: int
    number: int
    lower: float
    upper: float
    rows: Ints
    columns: Ints
    values: Floats


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Part:
    """Columns and rows of a program, row by row: entries `start[i]` to `start[i + 1]` are those of row i."""

    cost: Floats
    lower: Floats
    upper: Floats
    start: npt.NDArray[np.int32]
    column: npt.NDArray[np.int32]
    value: Floats


class Model:
    """The program of a problem as a sparse matrix: `lower <= A x <= upper`, `x >= 0`, and costs in microseconds."""

    def __init__(self, problem: Problem, *, tolls: bool = True) -> None:
        self.problem = problem
        self.columns = Columns()
        self.cost: list[Floats] = []
        self.integer: list[npt.NDArray[np.bool_]] = []
        self._entries: list[Entry] = []
        self.rows = 0
        self.peak: tuple[int, float] | None = None
        for choice in problem.choices:
            self.columns.pick.append(self._columns(choice.seconds, integer=True))
            number = len(choice.seconds)
            self._add(np.zeros(number, np.int64), self.columns.pick[-1] + np.arange(number), np.ones(number), 1, 1.0, 1.0)
        self._flows = [self._wire(wire) for wire in problem.wires]
        if tolls:
            self.levy()

    def levy(self) -> None:
        """(toll): a unit goes at most once along an axis in one way."""
        for toll in self.problem.tolls:
            paid = self._columns(np.array([toll.seconds]))
            for way in toll.ways:
                for place in sorted(way.consumers):
                    column = np.append(self._flows[way.wire][place] + np.flatnonzero(way.arcs), paid)
                    value = np.append(np.full(len(column) - 1, -1.0), 1.0)
                    self._add(np.zeros(len(column), np.int64), column, value, 1, 0.0, np.inf)

    def _columns(self, seconds: Floats, *, integer: bool = False) -> int:
        self.cost.append(seconds * MICROSECONDS)
        self.integer.append(np.full(len(seconds), integer))
        return self.columns.add(len(seconds))

    def _add(self, row: Ints, column: Ints, value: Floats, rows: int, lower: float, upper: float) -> None:
        """Append `rows` rows with the same bounds; `row` counts from the first of them."""
        self._entries.append(
            Entry(row=self.rows, number=rows, lower=lower, upper=upper, rows=row, columns=column, values=value)
        )
        self.rows += rows

    def _wire(self, wire: Wire) -> list[int]:
        """The columns and rows of a wire; the first column of each consumer's flow."""
        arcs, every = len(wire.seconds), frozenset(range(len(wire.consumers)))
        seconds = wire.seconds + sum((s.seconds for s in wire.surcharges if s.consumers == every), np.zeros(arcs))
        use = self._columns(seconds, integer=len(every) > 1)
        flows = [self._columns(np.zeros(arcs)) if len(every) > 1 else use for _ in every]
        for consumer, flow in zip(wire.consumers, flows, strict=True):
            self._route(wire, consumer, flow)
            if flow != use:
                self._at_least(use, flow, arcs)
        for surcharge in wire.surcharges:
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

    def _route(self, wire: Wire, consumer: Consumer, flow: int) -> None:
        """(route): a unit runs from the node that the producer's pick names to the one that the consumer's pick wants."""
        arcs = np.arange(len(wire.seconds))
        parts = [
            (wire.produced, self.columns.pick[wire.producer] + np.arange(len(wire.produced)), 1.0),
            (wire.target, flow + arcs, 1.0),
            (wire.source, flow + arcs, -1.0),
            (consumer.wants, self.columns.pick[consumer.choice] + np.arange(len(consumer.wants)), -1.0),
        ]
        row = np.concatenate([nodes for nodes, _, _ in parts])
        column = np.concatenate([columns for _, columns, _ in parts])
        value = np.concatenate([np.full(len(nodes), sign) for nodes, _, sign in parts])
        self._add(row, column, value, wire.nodes, 0.0, 0.0)

    def minimise_peak(self, scale: float) -> None:
        """Forget the seconds: from now on the objective is the most bytes that any row has, in units of `scale`."""
        self.cost = [np.zeros(len(cost)) for cost in self.cost]
        self.peak = self._columns(np.ones(1) / MICROSECONDS), scale

    def bound(self, row: Row) -> None:
        """(budget) and, where several consumers keep a value, (keep)."""
        columns = [self.columns.pick[choice] + np.arange(len(b)) for choice, b in row.picks.items()]
        columns += [self.columns.use[wire] + np.arange(len(b)) for wire, b in row.uses.items()]
        values = [*row.picks.values(), *row.uses.values()]
        for kept in row.kept:
            ends = [self._end(self.problem.wires[kept.wire], keeper) for keeper in kept.keepers]
            if len(ends) == 1:
                columns.append(ends[0][0])
                values.append(kept.bytes[ends[0][1]])
                continue
            nodes = np.arange(self.problem.wires[kept.wire].nodes)
            keep = self._columns(np.zeros(len(nodes))) + nodes
            for picks, wants in ends:
                signs = np.concatenate([np.ones(len(nodes)), np.full(len(picks), -1.0)])
                self._add(np.concatenate([nodes, wants]), np.concatenate([keep, picks]), signs, len(nodes), 0.0, np.inf)
            columns.append(keep)
            values.append(kept.bytes)
        limit, scale = row.limit, max(row.limit, 1.0)  # in units of the limit, so that one tolerance fits all rows
        if self.peak:
            limit, scale = 0.0, self.peak[1]
            columns.append(np.array([self.peak[0]]))
            values.append(np.array([-scale]))
        column, value = np.concatenate(columns), np.concatenate(values) / scale
        self._add(np.zeros(len(column), np.int64), column, value, 1, -np.inf, (limit - row.constant) / scale)

    def _end(self, wire: Wire, keeper: int) -> tuple[Ints, Ints]:
        """The pick columns at one end of a wire, and the layout that each of them has there."""
        choice, nodes = wire.producer, wire.produced
        if keeper != PRODUCER:
            choice, nodes = wire.consumers[keeper].choice, wire.consumers[keeper].wants
        return self.columns.pick[choice] + np.arange(len(nodes)), nodes

    def part(self, column: int = 0, row: int = 0) -> Part:
        """The columns from `column` and the rows from `row` on, as arrays; entries of the same place are added."""
        entries = [entry for entry in self._entries if entry.row >= row]
        rows = np.concatenate([np.zeros(0, np.int64), *(entry.row + entry.rows for entry in entries)]) - row
        columns = np.concatenate([np.zeros(0, np.int64), *(entry.columns for entry in entries)])
        values = np.concatenate([np.zeros(0), *(entry.values for entry in entries)])
        key = rows * self.columns.count + columns
        places, inverse = np.unique(key, return_inverse=True)
        total = np.bincount(inverse, weights=values, minlength=len(places))
        places, total = places[total != 0], total[total != 0]
        return Part(
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
        return extra * (cost[cost > 0].min(initial=1.0) / most * 1e-3) if most else extra

    def to_pulp(self) -> pulp.LpProblem:
        """The same integer program in PuLP, for other solvers, for `.lp` files that a person can read, and for tests."""
        program = pulp.LpProblem("autopar", pulp.LpMinimize)
        integer = np.concatenate(self.integer)
        kinds = [pulp.LpInteger if whole else pulp.LpContinuous for whole in integer]
        variables = [program.add_variable(f"x{i}", 0, None, kind) for i, kind in enumerate(kinds)]
        program += pulp.LpAffineExpression(zip(variables, np.concatenate(self.cost).tolist(), strict=True))
        part = self.part()
        for row, (low, high) in enumerate(zip(part.lower, part.upper, strict=True)):
            here = slice(part.start[row], part.start[row + 1])
            pairs = zip(part.column[here].tolist(), part.value[here].tolist(), strict=True)
            total = pulp.LpAffineExpression([(variables[column], value) for column, value in pairs])
            if low == high:
                program += total == low
            else:
                program += (total >= low) if np.isfinite(low) else (total <= high)
        return program
