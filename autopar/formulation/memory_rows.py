"""Memory rows: the bytes alive at one moment as a linear function of the integer program's variables.

Rows are built from the live ranges of `memory.live_ranges`. For a solution without recomputation a row never exceeds the
liveness walk at that moment, so the integer program stays a relaxation. Buckets in flight and the workspace of conversions are
left out.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_models.optimizers import Optimizer
from autopar.formulation.formulate import PlanningProblem
from autopar.ir.layout import H, State, place
from autopar.ir.program import Value, elements
from autopar.ir.training_step import StageMoment
from autopar.memory.alias_sets import AliasSets
from autopar.memory.in_flight import deferred_products, moments_of
from autopar.memory.live_ranges import LivenessInputs, SavedLiveRange, lifetimes
from autopar.memory.liveness import Liveness, Workspace
from autopar.memory.places import tensors_of
from autopar.solver.problem import PRODUCER, Floats, InFlightTerm, RetainedTerm, Row, storages

OF_OPS = ("internal", "forward", "backward")


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Held:
    """The terms of a row: what one micro-batch holds at a moment."""

    picks: tuple[tuple[int, Floats], ...] = ()
    recompute: tuple[tuple[int, Floats], ...] = ()
    retained: tuple[RetainedTerm, ...] = ()


NOTHING_HELD = _Held()


class MemoryRows:
    """The live ranges of a planning problem, with their bytes by candidate or by layout."""

    def __init__(self, formulated: PlanningProblem, liveness: Liveness, optimizer: Optimizer) -> None:
        self.formulated, self.liveness, self.program = formulated, liveness, formulated.program
        analysis = formulated.analysis
        self.of, self.choice = analysis.classes.of, {name: i for i, name in enumerate(formulated.names)}
        self.edge = {member: w for w, values in enumerate(formulated.edges) for member in values.members}
        self.number = {member: i for values in formulated.edges for i, member in enumerate(values.members)}
        terms = LivenessInputs(
            saved=lambda op: liveness.saved.get(op.name),
            backward=analysis.backward,
            ends={output.value for output in liveness.gradients.ends},
            weights=analysis.weights,
            views=liveness.views,
            reruns=formulated.reruns,
            dropped=formulated.dropped,
            accumulated=analysis.step.microbatches > 1,
            elsewhere=analysis.stored_anywhere,
            received=analysis.step.received.keys(),
        )
        self.alias_sets = AliasSets(self.program, terms)
        self.lives = [life for life in lifetimes(self.program, terms) if life.name in self.edge or life.kind in OF_OPS]
        self.starts = np.array([life.start for life in self.lives])
        self.stops = np.array([life.stop for life in self.lives])
        self.bytes = [self._layouts(w) for w in range(len(formulated.edges))]
        self.storages = [storages(edge) for edge in formulated.problem.edges]
        self.given = list(_total(self._given(optimizer.states)).items())
        received = (value for value in self.program.inputs if value.name in analysis.step.received)
        self.received = list(map(self._stored, received))
        self.stepped = list(_total(self._stepped(optimizer)).items())
        self._own: dict[str, list[Workspace]] = {}

    def row(self, moment: int, limit: float, constant: float = 0.0) -> Row:
        """The row `bytes alive at the moment + constant <= limit`. Which bytes enter through which term:

        picks      stored tensors, the optimizer's scratch, workspace of ops, gradients whose layout follows from picks
        recompute  minus what autograd keeps inside ops that rerun later
        retained   values that something reads or keeps, or that rerun ops need
        in_flight  values between two layouts, gradients that wait: the smallest of the layouts that are there

        Every other micro-batch in flight adds what it keeps between its forward and its backward; deferred memory follows from
        picks.
        """
        now = [self.lives[i] for i in np.flatnonzero((self.starts <= moment) & (moment <= self.stops)).tolist()]
        known, waiting = self.alias_sets.gradients(now)
        live, between = self.alias_sets.values(now)
        last, others = moment == 2 * self.liveness.count, self._fullest.flights - 1
        given = self.given + (self.stepped if last else self.received)
        held = self._turn if others and not last else NOTHING_HELD
        deferred = () if last else self._deferred(moment)
        return Row(
            name=f"moment {moment}", limit=limit, constant=constant, uses={},
            picks=_total((*given, *self._of_ops(now), *self._of_gradients(known), *_times(others, held.picks), *deferred)),
            recompute=_total((*self._of_ops([x for x in now if moment < x.needed], sign=-1), *_times(others, held.recompute))),
            retained=(
                *self._kept([x for x in now if x.kind == "rerun" or x.name in live], moment),
                *(replace(term, bytes=others * term.bytes) for term in held.retained),
            ),
            in_flight=tuple(self._least((*between, *waiting))),
        )  # fmt: skip

    def away_row(self, there: State, limit: float) -> Row:
        """The row `bytes of weights, their gradients and state on the host (H) or on the disk (D) <= limit`."""
        analysis, picks = self.formulated.analysis, dict[int, Floats]()
        for parameter in self.program.parameters:
            value = parameter.value
            choice = self.choice[self.of[value.name]]
            times = sum(tensors_of(analysis, self.liveness.optimizer, value.name).values())
            layouts = [candidate.results[0] for candidate in self.formulated.candidates[choice]]
            sizes = [value.local_bytes(layout, self.liveness.sizes) * (place(layout) == there) for layout in layouts]
            picks[choice] = picks.get(choice, 0.0) + times * np.array(sizes, dtype=np.float64)
        return Row(name="host" if there == H else "disk", limit=limit, picks=picks, uses={}, retained=(), fixed=True)

    @functools.cached_property
    def _fullest(self) -> StageMoment:
        """The moment of the schedule that rows use: the one with most micro-batches, preferably in flight rather than
        deferred.
        """
        return max(
            moments_of(self.formulated.analysis.step), key=lambda now: (now.flights + now.waiting, now.flights, now.halves)
        )

    def _deferred(self, moment: int) -> Iterator[tuple[int, Floats]]:
        """Deferred memory of other micro-batches, and of this one after the half I of each product."""
        for start, choice, sizes in self._products if self._fullest.waiting or self._fullest.halves else ():
            count = self._fullest.waiting + (self._fullest.halves and start <= moment)
            if count:
                yield choice, count * sizes

    @functools.cached_property
    def _products(self) -> list[tuple[int, int, Floats]]:
        """The moment from which factors of each product are deferred, its choice, and their bytes by candidate; an activation
        that several products read counts with the first."""
        found, known, size = list[tuple[int, int, Floats]](), set[str](), self.liveness.bytes
        for number, op, x in deferred_products(self.program):
            choice, position = self.choice[self.of[op.name]], op.operands.index(x)
            candidates, result = self.formulated.candidates[choice], op.results[0].name
            read = [0 if x in known else size((x, one.operands[position])) for one in candidates]
            made = [size((result, one.results[0])) for one in candidates]
            known.add(x)
            found.append((2 * self.liveness.count - number, choice, np.array(read, dtype=np.float64) + made))
        return found

    @functools.cached_property
    def _turn(self) -> _Held:
        """What one micro-batch holds between forward and backward, without weights gathered for all of them, or again."""
        turn = self.liveness.count
        of_all = self.formulated.analysis.weights if self.formulated.once else self.formulated.dropped
        kept = [
            life
            for life in self.lives
            if life.kind in ("internal", "kept", "rerun") and life.start <= turn <= life.stop and life.name not in of_all
        ]
        live, _ = self.alias_sets.values(kept)
        return _Held(
            picks=(*self.received, *self._of_ops(kept)),
            recompute=tuple(self._of_ops([life for life in kept if turn < life.needed], sign=-1)),
            retained=tuple(self._kept([life for life in kept if life.kind == "rerun" or life.name in live], turn)),
        )

    def _of_ops(self, now: Iterable[SavedLiveRange], sign: int = 1) -> Iterator[tuple[int, Floats]]:
        """Workspace and internal tensors of ops; with `sign` -1, the part that recomputation saves."""
        counts = Counter((self.of[life.name], life.kind) for life in now if life.kind in OF_OPS)
        for (name, kind), count in counts.items():
            choice = self.choice[name]
            if sign > 0 or self.formulated.problem.choices[choice].recompute is not None:
                yield choice, sign * count * np.array([getattr(own, kind) for own in self._owns(name)], dtype=np.float64)

    def _of_gradients(self, known: Iterable[SavedLiveRange]) -> Iterator[tuple[int, Floats]]:
        """Gradients in the layout in which an op produces or consumes them."""
        for (w, end), count in Counter((self.edge[x.name], self._end(x)) for x in known).items():
            edge = self.formulated.problem.edges[w]
            if end == PRODUCER:
                yield edge.producer, count * self.bytes[w][edge.produced]
            else:
                yield edge.consumers[end].choice, count * self.bytes[w][edge.consumers[end].wants]

    def _least(self, moving: Iterable[SavedLiveRange]) -> Iterator[InFlightTerm]:
        """Values and gradients whose layout on their edge is unknown."""
        for w, count in Counter(self.edge[life.name] for life in moving).items():
            yield InFlightTerm(edge=w, bytes=count * self.bytes[w])

    def _kept(self, now: Iterable[SavedLiveRange], moment: int) -> Iterator[RetainedTerm]:
        """Values read or kept at a moment; members of an edge with the same readers and savers share a term."""
        ends: dict[str, dict[str, set[int]]] = defaultdict(lambda: {"read": set(), "kept": set(), "rerun": set()})
        needed: dict[str, int] = {}
        for life in now:
            if life.kind in ("read", "kept", "rerun"):
                ends[life.name][life.kind].add(self._end(life))
                needed[life.name] = max(needed.get(life.name, 0), life.needed)
        groups: dict[object, list[str]] = defaultdict(list)
        for name, found in ends.items():
            key = (self.edge[name], *map(frozenset, found.values()), moment < needed[name], name in self.alias_sets.free)
            groups[key].append(name)
        for names in groups.values():
            w, found = self.edge[names[0]], ends[names[0]]
            count, last = self.formulated.problem.edges[w].count, max(self.number[name] for name in names)
            yield RetainedTerm(
                edge=w, read_by=tuple(sorted(found["read"])), saved_by=tuple(sorted(found["kept"])),
                rerun_by=tuple(sorted(found["rerun"])), droppable=moment < needed[names[0]],
                free_as_produced=names[0] in self.alias_sets.free,
                bytes=len(names) * self.bytes[w], storages=self.storages[w], first_share=(last + 1) / count,
            )  # fmt: skip

    def _end(self, life: SavedLiveRange) -> int:
        """The index of a live range's reader among the consumers of its edge, or PRODUCER."""
        if life.end is None:
            return PRODUCER
        name, position = life.end
        return self.formulated.edges[self.edge[life.name]].consumers.index(self.formulated.analysis.classes.end(name, position))

    def _layouts(self, edge: int) -> Floats:
        """Bytes of one member of an edge in each of its layouts."""
        size = self.program.values[self.formulated.edges[edge].example].dtype.itemsize
        return (self.formulated.spaces[edge].elements * size).astype(np.float64)

    def _owns(self, name: str) -> list[Workspace]:
        """The workspace of an op under each of its candidates."""
        if name not in self._own:
            op = self.program.op[name]
            self._own[name] = [self.liveness.own(op, candidate) for candidate in self.formulated.candidates[self.choice[name]]]
        return self._own[name]

    def _given(self, states: int) -> Iterator[tuple[int, Floats]]:
        """Parameters with optimizer state, buffers and inputs: stored for the whole step."""
        for parameter in (*self.program.parameters, *self.program.buffers):
            trained = parameter.value.name in self.formulated.analysis.backward
            yield self._stored(parameter.value, 1 + states * trained)
        for value in self.program.inputs:  # the caller holds the whole beside the part that is cut on arrival
            if value.name in self.formulated.analysis.step.received:
                continue
            choice, local = self._stored(value)
            batch = self.formulated.analysis.step.batch_shape(value.name)  # of all micro-batches
            whole = elements(batch) * value.dtype.itemsize
            yield choice, whole + local * (local < value.bytes)

    def _stepped(self, optimizer: Optimizer) -> Iterator[tuple[int, Floats]]:
        """Temporary memory of the optimizer step; on a CPU that of the parameter where it would peak if none were split."""
        trained = [p.value for p in self.program.parameters if p.value.name in self.formulated.analysis.backward]
        if not self.formulated.analysis.cpu:
            yield from (self._stored(value, optimizer.foreach_scratch) for value in trained)
        elif trained:
            (last, own), whole = optimizer.loop_scratch, [value.bytes for value in trained]
            i = max(range(len(trained)), key=lambda i: own * whole[i] + last * whole[i - 1] * (i > 0))
            yield from (self._stored(value, last) for value in trained[max(0, i - 1) : i])
            yield self._stored(trained[i], own)

    def _stored(self, value: Value, times: int = 1) -> tuple[int, Floats]:
        """The choice of a parameter, buffer or input, and its bytes by candidate, `times` over."""
        choice = self.choice[self.of[value.name]]
        found = self.formulated.candidates[choice]
        return choice, times * np.array([float(value.device_bytes(c.results[0], self.liveness.sizes)) for c in found])


def _times(count: int, parts: Iterable[tuple[int, Floats]]) -> Iterator[tuple[int, Floats]]:
    """Bytes for each choice, so many times."""
    return ((choice, count * bytes_of) for choice, bytes_of in parts)


def _total(parts: Iterable[tuple[int, Floats]]) -> dict[int, Floats]:
    """The sum of bytes for each choice."""
    found: dict[int, Floats] = {}
    for choice, bytes_of in parts:
        found[choice] = found.get(choice, 0.0) + bytes_of
    return found


__all__ = ["MemoryRows"]
