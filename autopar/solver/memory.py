"""Memory of a solution: the walk over a training step, and the rows that bound the integer program at single moments.

Both read the same lifetimes (`cost_models.memory`), so that a row at time t is exactly what the walk finds there: the program
starts without rows, each finished solution is walked, and the moment of its peak becomes a row if it exceeds the budget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.memory import Lifetime, lifetimes
from autopar.cost_models.optimizers import Optimizer
from autopar.evidence import Held
from autopar.ir import elements
from autopar.layout import local_shape
from autopar.passes.classes import ValueClass
from autopar.solver.formulate import Formulated
from autopar.solver.problem import PRODUCER, Floats, Ints, Kept, Problem, Row, Solution, end_node

ON_CHOICE = ("stored", "gradient", "internal")  # kinds whose bytes follow a choice; the others follow a wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """One group of lifetimes that take the same bytes: `where` is a choice, or a wire and one of its consumers."""

    kind: str
    where: int
    consumer: int
    starts: Ints
    stops: Ints
    weights: Floats


class Ledger:
    """The lifetimes of a formulated program, grouped by choice and wire."""

    def __init__(self, formulated: Formulated, optimizer: Optimizer) -> None:
        self.formulated = formulated
        analysis = formulated.analysis
        program, of = analysis.program, analysis.classes.of
        self.moments = 2 * len(program.ops) + 1
        self._choice = {name: i for i, name in enumerate(formulated.names)}
        wire = {member: i for i, values in enumerate(formulated.wires) for member in values.members}
        groups: dict[tuple[str, int, int], list[Lifetime]] = defaultdict(list)
        every = lifetimes(
            program, lambda op: analysis.saved.get(of[op.name]), optimizer.states, analysis.backward, analysis.weights
        )
        for life in every:
            if life.kind in ON_CHOICE:
                groups[life.kind, self._choice[of[life.name]], PRODUCER].append(life)
            elif life.name in wire:
                consumer = PRODUCER
                if life.consumer:
                    name, position = life.consumer
                    consumer = formulated.wires[wire[life.name]].consumers.index((of[name], position))
                groups[life.kind, wire[life.name], consumer].append(life)
        self.groups = [
            Alive(
                kind=kind, where=where, consumer=consumer,
                starts=np.array([x.start for x in lives]), stops=np.array([x.stop for x in lives]),
                weights=np.array([x.weight for x in lives]),
            )
            for (kind, where, consumer), lives in groups.items()
        ]  # fmt: skip
        self._bytes = {alive: self._table(alive) for alive in range(len(self.groups))}

    def _table(self, number: int) -> Floats:
        """Bytes of one member: per candidate of the choice it hangs on, or per arc or layout of its wire."""
        alive, formulated = self.groups[number], self.formulated
        program, sizes = formulated.program, formulated.mesh.sizes
        if alive.kind in ("stored", "gradient"):
            value = program.values[formulated.names[alive.where]]
            shapes = [local_shape(value.shape, c.results[0], sizes) for c in formulated.candidates[alive.where]]
            local = np.array([float(elements(s) * value.dtype.itemsize) for s in shapes])
            if value in program.inputs:  # the caller holds the whole beside the part that is cut on arrival
                return value.bytes + local * (local < value.bytes)
            return local
        if alive.kind == "internal":
            return self._internal(formulated.names[alive.where], alive.where)
        values, graph, wire = (
            formulated.wires[alive.where],
            formulated.spaces[alive.where],
            formulated.problem.wires[alive.where],
        )
        size = program.values[values.example].dtype.itemsize
        nodes: Floats = (graph.elements * size).astype(np.float64)
        if alive.kind == "converted":
            return np.where(wire.free, 0.0, nodes[wire.target])
        if alive.kind == "kept":
            return nodes
        if alive.kind == "transient":
            return nodes[wire.consumers[alive.consumer].wants]
        return nodes[wire.produced]

    def _internal(self, name: str, choice: int) -> Floats:
        program, sizes = self.formulated.program, self.formulated.mesh.sizes
        kept = self.formulated.analysis.saved[name]
        op = program.op[name]
        result = []
        for candidate in self.formulated.candidates[choice]:
            inside = [
                local_shape(program.values[n].shape, s, sizes) for n, s in zip(op.operands, candidate.operands, strict=True)
            ]
            outside = [local_shape(r.shape, s, sizes) for r, s in zip(op.results, candidate.results, strict=True)]
            result.append(float(kept.local_internal(inside, outside)))
        return np.array(result)

    def walk(self, solution: Solution) -> Floats:
        """Bytes alive at every moment of the step."""
        change = np.zeros(self.moments + 1)
        kept: dict[tuple[int, int, int], int] = {}
        problem = self.formulated.problem
        for number, alive in enumerate(self.groups):
            if alive.kind == "kept":
                node = end_node(problem.wires[alive.where], alive.consumer, solution.picks)
                for start, stop in zip(alive.starts.tolist(), alive.stops.tolist(), strict=True):
                    kept[alive.where, node, start] = max(kept.get((alive.where, node, start), 0), stop)
                continue
            size = self._size(number, solution)
            np.add.at(change, alive.starts, size * alive.weights)
            np.add.at(change, alive.stops + 1, -size * alive.weights)
        sizes = self._kept_bytes()
        for (where, node, start), stop in kept.items():
            if start <= stop:
                change[start] += sizes[where][node]
                change[stop + 1] -= sizes[where][node]
        return np.cumsum(change)[:-1]

    def _kept_bytes(self) -> Mapping[int, Floats]:
        return {alive.where: self._bytes[n] for n, alive in enumerate(self.groups) if alive.kind == "kept"}

    def _size(self, number: int, solution: Solution) -> float:
        alive, table = self.groups[number], self._bytes[number]
        problem = self.formulated.problem
        if alive.kind == "converted":
            return float(table[list(solution.arcs[alive.where])].sum())
        return float(table[solution.picks[self._hangs_on(alive, problem)]])

    def _hangs_on(self, alive: Alive, problem: Problem) -> int:
        """The choice whose candidates the bytes of a group are listed by."""
        if alive.kind in ON_CHOICE:
            return alive.where
        wire = problem.wires[alive.where]
        return wire.producer if alive.consumer == PRODUCER else wire.consumers[alive.consumer].choice

    def row(self, moment: int, limit: float) -> Row:
        """The bytes alive at a moment as a row of the integer program."""
        picks: dict[int, Floats] = {}
        uses: dict[int, Floats] = {}
        keepers: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, alive in enumerate(self.groups):
            now = (alive.starts <= moment) & (moment <= alive.stops)
            count = float(alive.weights[now].sum())
            if alive.kind == "kept":
                for start in alive.starts[now].tolist():
                    keepers[alive.where, start].append(alive.consumer)
            elif count and alive.kind == "converted":
                uses[alive.where] = uses.get(alive.where, 0.0) + count * self._bytes[number]
            elif count:
                choice = self._hangs_on(alive, self.formulated.problem)
                picks[choice] = picks.get(choice, 0.0) + count * self._bytes[number]
        return Row(name=f"moment {moment}", limit=limit, picks=picks, uses=uses, kept=tuple(self._kept(keepers)))

    def _kept(self, keepers: Mapping[tuple[int, int], list[int]]) -> Iterator[Kept]:
        counts: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
        for (where, _), who in keepers.items():
            counts[where, tuple(sorted(set(who)))] += 1
        sizes = self._kept_bytes()
        for (where, group), count in counts.items():
            yield Kept(wire=where, keepers=group, bytes=count * sizes[where])

    def held(self, solution: Solution, moment: int) -> list[Held]:
        """What takes memory at a moment, by kind and by value or op, the most first; together it is what the walk finds."""
        found: dict[tuple[str, str, int], float] = defaultdict(float)
        kept: dict[tuple[int, int, int], tuple[int, int]] = {}  # of several that keep the same, the last to need it
        for number, alive in enumerate(self.groups):
            if alive.kind == "kept":
                node = end_node(self.formulated.problem.wires[alive.where], alive.consumer, solution.picks)
                for start, stop in zip(alive.starts.tolist(), alive.stops.tolist(), strict=True):
                    if start <= moment <= stop:
                        kept[alive.where, node, start] = number, node
                continue
            count = float(alive.weights[(alive.starts <= moment) & (moment <= alive.stops)].sum())
            if count:
                found[alive.kind, *self._name(alive)] += count * self._size(number, solution)
        for number, node in kept.values():
            alive = self.groups[number]
            found[alive.kind, *self._name(alive)] += float(self._bytes[number][node])
        named = [Held(kind=kind, name=name, count=count, bytes=round(size)) for (kind, name, count), size in found.items()]
        return sorted((held for held in named if held.bytes), key=lambda held: -held.bytes)

    def _name(self, alive: Alive) -> tuple[str, int]:
        """The first of a group's values or ops, and how many there are."""
        if alive.kind in ON_CHOICE:
            name = self.formulated.names[alive.where]
            return name, len(self.formulated.analysis.classes.members[name])
        values: ValueClass = self.formulated.wires[alive.where]
        return values.example, len(values.members)
