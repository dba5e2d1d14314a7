"""Memory of a solution: the timeline as the judge, and the rows that bound the integer program at single moments.

The program starts without rows; each finished solution is walked, and the moment of its peak becomes a row if it exceeds the
budget. A
row is made of `cost_models.memory`, which leaves out what depends on decisions; what the walk finds beyond it is asked for when
the row is made again (`within`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.memory import Lifetime, Terms, lifetimes
from autopar.cost_models.optimizers import Optimizer
from autopar.decisions import Decisions
from autopar.evidence import Held
from autopar.ir import elements
from autopar.layout import local_shape
from autopar.passes.regions import regions
from autopar.solver.formulate import Formulated, decisions
from autopar.solver.problem import PRODUCER, Floats, Ints, Kept, Problem, Row, Solution
from autopar.solver.timeline import Timeline

ON_CHOICE = ("stored", "gradient", "internal")  # kinds whose bytes follow a choice; the others follow a wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """One group of lifetimes that take the same bytes: `where` is a choice, or a wire and one of its consumers."""

    kind: str
    where: int
    consumer: int
    starts: Ints
    stops: Ints
    needed: Ints
    weights: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepers:
    """Who keeps what, one entry each: a member (by number) of a wire for one of its consumers, at once or only if that runs
    again."""

    wire: Ints
    member: Ints
    consumer: Ints
    rerun: Ints
    starts: Ints
    stops: Ints
    needed: Ints


class Ledger:
    """The lifetimes of a formulated program, grouped by choice and wire, and its timeline."""

    def __init__(self, formulated: Formulated, optimizer: Optimizer) -> None:
        self.formulated = formulated
        analysis = formulated.analysis
        program, of = analysis.program, analysis.classes.of
        self.timeline = Timeline(analysis, optimizer)
        choice = {name: i for i, name in enumerate(formulated.names)}
        wire = {member: i for i, values in enumerate(formulated.wires) for member in values.members}
        number = {member: i for i, member in enumerate(wire)}
        groups: dict[tuple[str, int, int], list[Lifetime]] = defaultdict(list)
        keepers: list[tuple[int, ...]] = []
        terms = Terms(
            saved=lambda op: analysis.saved.get(of[op.name]), states=optimizer.states, backward=analysis.backward,
            weights=analysis.weights, reruns=formulated.reruns, regions=regions(program),
            dropped=formulated.dropped,
        )  # fmt: skip
        for life in lifetimes(program, terms):
            if life.kind in ON_CHOICE:
                groups[life.kind, choice[of[life.name]], PRODUCER].append(life)
            elif life.name in wire:
                consumer = PRODUCER
                if life.consumer:
                    name, position = life.consumer
                    consumer = formulated.wires[wire[life.name]].consumers.index((of[name], position))
                if life.kind in ("kept", "rerun"):
                    ends = (wire[life.name], number[life.name], consumer, life.kind == "rerun")
                    keepers.append((*ends, life.start, life.stop, life.needed))
                else:
                    groups[life.kind, wire[life.name], consumer].append(life)
        columns = np.array(keepers, dtype=np.int64).reshape(-1, 7).T
        self.keepers = Keepers(
            wire=columns[0], member=columns[1], consumer=columns[2], rerun=columns[3], starts=columns[4], stops=columns[5],
            needed=columns[6],
        )  # fmt: skip
        self.groups = [
            Alive(
                kind=kind, where=where, consumer=consumer,
                starts=np.array([x.start for x in lives]), stops=np.array([x.stop for x in lives]),
                needed=np.array([x.needed for x in lives]), weights=np.array([x.weight for x in lives]),
            )
            for (kind, where, consumer), lives in groups.items()
        ]  # fmt: skip
        self._bytes = [self._table(alive) for alive in self.groups]

    def walk(self, solution: Solution) -> Floats:
        """Bytes alive at every moment of the step."""
        return self.timeline.walk(decisions(self.formulated, solution))

    def held(self, chosen: Decisions, moment: int) -> list[Held]:
        """What takes memory at a moment, by kind and by value or op, the most first; together it is what the walk finds."""
        analysis = self.formulated.analysis
        of, found = analysis.classes.of, dict[tuple[str, str], list[int]]()
        wires = {member: values.example for values in self.formulated.wires for member in values.members}
        for life in self.timeline.alive(chosen, moment):
            if life.bytes:
                given = life.kind in ON_CHOICE or life.name in analysis.program.op
                name = of[life.name] if given else wires.get(life.name, life.name)
                found.setdefault((life.kind, name), []).append(life.bytes)
        named = [Held(kind=kind, name=name, count=len(sizes), bytes=sum(sizes)) for (kind, name), sizes in found.items()]
        return sorted(named, key=lambda held: -held.bytes)

    def row(self, moment: int, limit: float, constant: float = 0.0) -> Row:
        """The bytes alive at a moment, and `constant` more, as a row of the integer program."""
        picks: dict[int, Floats] = {}
        uses: dict[int, Floats] = {}
        again: dict[int, Floats] = {}
        for number, alive in enumerate(self.groups):
            now = (alive.starts <= moment) & (moment <= alive.stops)
            count, table = float(alive.weights[now].sum()), self._bytes[number]
            if count and alive.kind == "converted":
                uses[alive.where] = uses.get(alive.where, 0.0) + count * table
            elif count:
                choice = self._hangs_on(alive, self.formulated.problem)
                picks[choice] = picks.get(choice, 0.0) + count * table
                gone = float((now & (moment < alive.needed)).sum()) if alive.kind == "internal" else 0.0
                if gone and self.formulated.problem.choices[choice].again is not None:
                    again[choice] = again.get(choice, 0.0) - gone * table
        kept = tuple(self._kept(moment))
        return Row(name=f"moment {moment}", limit=limit, picks=picks, uses=uses, again=again, kept=kept, constant=constant)

    def _kept(self, moment: int) -> Iterator[Kept]:
        """What is kept at a moment, the members of a wire together that are kept for the same consumers."""
        k = self.keepers
        now = np.flatnonzero((k.starts <= moment) & (moment <= k.stops))
        ends: dict[tuple[int, int], tuple[set[int], set[int]]] = {}
        needed: dict[tuple[int, int], int] = {}
        for i in now.tolist():
            key = int(k.wire[i]), int(k.member[i])
            ends.setdefault(key, (set(), set()))[int(k.rerun[i])].add(int(k.consumer[i]))
            needed[key] = min(needed.get(key, moment + 1), int(k.needed[i]))
        counts: dict[tuple[int, tuple[int, ...], tuple[int, ...], bool], int] = defaultdict(int)
        for (wire, member), (keepers, reruns) in ends.items():
            counts[wire, tuple(sorted(keepers)), tuple(sorted(reruns)), moment < needed[wire, member]] += 1
        for (wire, at_once, if_again, gone), count in counts.items():
            sizes = count * self._nodes(wire)
            given = self.formulated.wires[wire].producer in self.formulated.given
            yield Kept(wire=wire, keepers=at_once, reruns=if_again, gone=gone, given=given, bytes=sizes)

    def _nodes(self, wire: int) -> Floats:
        """Bytes of one member in every layout."""
        size = self.formulated.program.values[self.formulated.wires[wire].example].dtype.itemsize
        return (self.formulated.spaces[wire].elements * size).astype(np.float64)

    def _hangs_on(self, alive: Alive, problem: Problem) -> int:
        """The choice whose candidates the bytes of a group are listed by."""
        if alive.kind in ON_CHOICE:
            return alive.where
        wire = problem.wires[alive.where]
        return wire.producer if alive.consumer == PRODUCER else wire.consumers[alive.consumer].choice

    def _table(self, alive: Alive) -> Floats:
        """Bytes of one member: per candidate of the choice it hangs on, or per arc of its wire."""
        formulated = self.formulated
        program, sizes = formulated.program, formulated.mesh.sizes
        if alive.kind in ("stored", "gradient"):
            value = program.values[formulated.names[alive.where]]
            shapes = [local_shape(value.shape, c.results[0], sizes) for c in formulated.candidates[alive.where]]
            local = np.array([float(elements(s) * value.dtype.itemsize) for s in shapes])
            if value in program.inputs:  # the caller holds the whole beside the part that is cut on arrival
                return value.bytes + local * (local < value.bytes) * value.requires_grad
            return local
        if alive.kind == "internal":
            return self._internal(formulated.names[alive.where], alive.where)
        wire, nodes = formulated.problem.wires[alive.where], self._nodes(alive.where)
        if alive.kind == "converted":
            return np.where(wire.free, 0.0, nodes[wire.target])
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
