"""The rows that bound the integer program at single moments, made of `cost_models.memory`.

A row says at most what the timeline does at that moment, for any solution that makes nothing again, so that the program is a
relaxation. Left out are what is on its way and what conversions take for themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from autopar.cost_models.optimizers import Optimizer
from autopar.formulation.formulate import PlanningProblem
from autopar.ir.layout import local_shape
from autopar.ir.program import Value, elements
from autopar.memory.alias_sets import AliasSets
from autopar.memory.live_ranges import LivenessInputs, SavedLiveRange, lifetimes
from autopar.memory.liveness import Liveness, Workspace
from autopar.solver.problem import PRODUCER, Floats, InFlightTerm, RetainedTerm, Row, storages

OF_OPS = ("internal", "forward", "backward")


class MemoryRows:
    """The lifetimes of a formulated program, and what each takes by candidate or by layout."""

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
            lying=liveness.lying,
            reruns=formulated.reruns,
            dropped=formulated.dropped,
        )
        self.families = AliasSets(self.program, terms)
        self.lives = [life for life in lifetimes(self.program, terms) if life.name in self.edge or life.kind in OF_OPS]
        self.starts = np.array([life.start for life in self.lives])
        self.stops = np.array([life.stop for life in self.lives])
        self.bytes = [self._layouts(w) for w in range(len(formulated.edges))]
        self.storages = [storages(edge) for edge in formulated.problem.edges]
        self.given = list(_total(self._given(optimizer.states)).items())
        self.stepped = list(_total(self._stepped(optimizer)).items())
        self._own: dict[str, list[Workspace]] = {}

    def row(self, moment: int, limit: float, constant: float = 0.0) -> Row:
        """The bytes alive at a moment, and `constant` more."""
        now = [self.lives[i] for i in np.flatnonzero((self.starts <= moment) & (moment <= self.stops)).tolist()]
        known, waiting = self.families.gradients(now)
        there, between = self.families.values(now)
        given = self.given + self.stepped * (moment == 2 * self.liveness.count)
        return Row(
            name=f"moment {moment}", limit=limit, constant=constant, uses={},
            picks=_total((*given, *self._of_ops(now), *self._of_gradients(known))),
            recompute=_total(self._of_ops([x for x in now if moment < x.needed], sign=-1)),
            retained=tuple(self._kept([x for x in now if x.kind == "rerun" or x.name in there], moment)),
            in_flight=tuple(self._least((*between, *waiting))),
        )  # fmt: skip

    def _of_ops(self, now: Iterable[SavedLiveRange], sign: int = 1) -> Iterator[tuple[int, Floats]]:
        """What ops take for themselves."""
        counts = Counter((self.of[life.name], life.kind) for life in now if life.kind in OF_OPS)
        for (name, kind), count in counts.items():
            choice = self.choice[name]
            if sign > 0 or self.formulated.problem.choices[choice].recompute is not None:
                yield choice, sign * count * np.array([getattr(own, kind) for own in self._owns(name)], dtype=np.float64)

    def _of_gradients(self, known: Iterable[SavedLiveRange]) -> Iterator[tuple[int, Floats]]:
        """Gradients in the layout in which an op makes or takes them."""
        for (w, end), count in Counter((self.edge[x.name], self._end(x)) for x in known).items():
            edge = self.formulated.problem.edges[w]
            if end == PRODUCER:
                yield edge.producer, count * self.bytes[w][edge.produced]
            else:
                yield edge.consumers[end].choice, count * self.bytes[w][edge.consumers[end].wants]

    def _least(self, moving: Iterable[SavedLiveRange]) -> Iterator[InFlightTerm]:
        """What is somewhere between the layouts of a wire."""
        for w, count in Counter(self.edge[life.name] for life in moving).items():
            yield InFlightTerm(edge=w, bytes=count * self.bytes[w])

    def _kept(self, now: Iterable[SavedLiveRange], moment: int) -> Iterator[RetainedTerm]:
        """What is read or kept at a moment, the members of a wire together that are there for the same ends."""
        ends: dict[str, dict[str, set[int]]] = defaultdict(lambda: {"read": set(), "kept": set(), "rerun": set()})
        needed: dict[str, int] = {}
        for life in now:
            if life.kind in ("read", "kept", "rerun"):
                ends[life.name][life.kind].add(self._end(life))
                needed[life.name] = max(needed.get(life.name, 0), life.needed)
        alike: dict[object, list[str]] = defaultdict(list)
        for name, found in ends.items():
            key = (self.edge[name], *map(frozenset, found.values()), moment < needed[name], name in self.families.free)
            alike[key].append(name)
        for names in alike.values():
            w, found = self.edge[names[0]], ends[names[0]]
            count, last = self.formulated.problem.edges[w].count, max(self.number[name] for name in names)
            yield RetainedTerm(
                edge=w, read_by=tuple(sorted(found["read"])), saved_by=tuple(sorted(found["kept"])),
                rerun_by=tuple(sorted(found["rerun"])), droppable=moment < needed[names[0]],
                free_as_produced=names[0] in self.families.free,
                bytes=len(names) * self.bytes[w], storages=self.storages[w], first_share=(last + 1) / count,
            )  # fmt: skip

    def _end(self, life: SavedLiveRange) -> int:
        """The place of a lifetime's end among the consumers of its wire."""
        if life.end is None:
            return PRODUCER
        name, position = life.end
        return self.formulated.edges[self.edge[life.name]].consumers.index((self.of[name], position))

    def _layouts(self, edge: int) -> Floats:
        """Bytes of one member in every layout."""
        size = self.program.values[self.formulated.edges[edge].example].dtype.itemsize
        return (self.formulated.spaces[edge].elements * size).astype(np.float64)

    def _owns(self, name: str) -> list[Workspace]:
        """What an op takes for itself, by candidate."""
        if name not in self._own:
            op = self.program.op[name]
            self._own[name] = [self.liveness.own(op, candidate) for candidate in self.formulated.candidates[self.choice[name]]]
        return self._own[name]

    def _given(self, states: int) -> Iterator[tuple[int, Floats]]:
        """What is stored for the whole step."""
        for parameter in (*self.program.parameters, *self.program.buffers):
            trained = parameter.value.name in self.formulated.analysis.backward
            yield self._stored(parameter.value, 1 + states * trained)
        for value in self.program.inputs:  # the caller holds the whole beside the part that is cut on arrival
            choice, local = self._stored(value)
            whole = elements(self.program.whole(value.name)) * value.dtype.itemsize  # of all micro-batches
            yield choice, whole + local * (local < value.bytes)

    def _stepped(self, optimizer: Optimizer) -> Iterator[tuple[int, Floats]]:
        """What the optimizer takes for its step; on a CPU where it takes most if all parameters are whole."""
        trained = [p.value for p in self.program.parameters if p.value.name in self.formulated.analysis.backward]
        if not self.formulated.analysis.cpu:
            yield from (self._stored(value, optimizer.together) for value in trained)
        elif trained:
            (last, own), whole = optimizer.alone, [value.bytes for value in trained]
            i = max(range(len(trained)), key=lambda i: own * whole[i] + last * whole[i - 1] * (i > 0))
            yield from (self._stored(value, last) for value in trained[max(0, i - 1) : i])
            yield self._stored(trained[i], own)

    def _stored(self, value: Value, times: int = 1) -> tuple[int, Floats]:
        """The choice of a given tensor, and its bytes by candidate."""
        choice = self.choice[self.of[value.name]]
        shapes = (local_shape(value.shape, c.results[0], self.liveness.sizes) for c in self.formulated.candidates[choice])
        return choice, times * np.array([float(elements(shape) * value.dtype.itemsize) for shape in shapes])


def _total(parts: Iterable[tuple[int, Floats]]) -> dict[int, Floats]:
    """The sum for each choice."""
    found: dict[int, Floats] = {}
    for choice, bytes_of in parts:
        found[choice] = found.get(choice, 0.0) + bytes_of
    return found


__all__ = ["MemoryRows"]
