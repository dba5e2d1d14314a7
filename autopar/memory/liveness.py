"""Liveness analysis of one training step under a given assignment; the plan's peak memory is the maximum of its curve.

Times are those of `memory.schedule`. Each storage has one or more live ranges, of these kinds:

    stored       parameters and buffers with optimizer state, inputs        the whole step
    produced     a value in the layout in which its producer leaves it      until its last use in the forward
    converted    a value in another layout                                  from its conversion to its last use
    kept         either of them, saved for the backward                     from that last use to its last use in the backward
    internal     what autograd saves beside operands and results            until the op's backward
    recompute    a value that is recomputed instead of kept                 from its first to its last use in the backward
    flight       send and receive buffers of a bucket of weights            from when the message is issued until it arrives
    transient    workspace of an op or a conversion                         while it runs
    waiting      other micro-batches in flight, between their passes        until the last backward of the step
    deferred     factors of gradients of weights that the half W makes      from the op's backward until then
    gradient, flowing: see `memory.gradients`

A view, or the result of a conversion that moves nothing, has no storage of its own: it extends the live range of the storage
that it aliases, its *home*.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.analysis.analysis import Analysis
from autopar.analysis.recomputability import is_alias
from autopar.analysis.saved_tensors import NOTHING, SavedTensors
from autopar.analysis.view_or_copy import copied
from autopar.cost_models.optimizers import Optimizer
from autopar.ir.conversion import TO_DEVICE, beside
from autopar.ir.device import Bytes
from autopar.ir.layout import local_shape
from autopar.ir.program import Op, elements
from autopar.memory.gradients import Gradients
from autopar.memory.in_flight import StageMemory, deferred_products, deferred_weights, moments_of
from autopar.memory.in_place_reductions import reduced_in_place
from autopar.memory.prefetch import Node
from autopar.memory.rematerialization import Rematerialization
from autopar.memory.schedule import SPAN, ConversionEvent, LiveRange, Schedule, Step, at
from autopar.operators import view_of
from autopar.plan.breakdown import OPTIMIZER
from autopar.search_space.assignment import Assignment
from autopar.search_space.candidates import Candidate, distributed
from autopar.solver.problem import Floats, Ints


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes on one rank: what autograd saves inside an op, and temporary memory of its forward and of its backward."""

    internal: Bytes
    forward: Bytes
    backward: Bytes


REMEMBERED = 4  # steps: the best of a search and what is judged on the way to a proposal beside it


class Liveness:
    """Liveness analysis of a program; parts that do not depend on the assignment are computed once."""

    def __init__(self, analysis: Analysis, optimizer: Optimizer) -> None:
        self.analysis, self.optimizer = analysis, optimizer
        program, of = analysis.program, analysis.classes.of
        self.program, self.sizes, self.count = program, analysis.sizes, len(program.ops)
        self.copied = copied(analysis)
        self.views = frozenset(op.name for op in program.ops if view_of(op, program.values)) - self.copied
        served = not any(op.requires_grad for op in program.ops)
        runs = (op for op in program.ops if served or any(result.name in analysis.backward for result in op.results))
        self.saved: dict[str, SavedTensors] = {
            op.name: analysis.saved[of[op.name]] for op in runs if of[op.name] in analysis.saved
        }
        self.gradients = Gradients(
            analysis.step, analysis.sizes, self.saved, analysis.backward, self.bytes, ahead=not analysis.cpu
        )
        self._bytes: dict[Node, Bytes] = {}
        self._own: dict[tuple[str, Candidate], Workspace] = {}
        self._steps: list[_Step] = []  # the last ones first

    def walk(self, chosen: Assignment) -> Floats:
        """The memory curve: the largest number of bytes alive within each moment of the step."""
        return _by_moment(self.lives(chosen), self.count)

    def alive(self, chosen: Assignment, moment: int) -> list[LiveRange]:
        """The live ranges at the fullest time within a moment."""
        now = int(self.fullest(chosen)[moment])
        return [life for life in self.lives(chosen) if life.start <= now <= life.stop]

    def fullest(self, chosen: Assignment) -> Ints:
        """The time within each moment of the step with the most bytes alive."""
        times, alive = _memory_curve(self.lives(chosen))
        order = np.lexsort((-times, alive, times // SPAN))
        last = np.append(np.diff(times[order] // SPAN) > 0, True)
        found: Ints = times[order][last]
        return found

    def lives(self, chosen: Assignment) -> list[LiveRange]:
        """All live ranges of the step."""
        return self._step(chosen).all

    def stage_memory(self, chosen: Assignment) -> StageMemory:
        """The memory of a pipeline stage, independent of its schedule."""
        return self._step(chosen).memory

    def schedule(self, chosen: Assignment) -> Schedule:
        """The order and the times of the step's ops and conversions."""
        return self._step(chosen).schedule

    def rematerialization(self, chosen: Assignment) -> Rematerialization:
        """The recomputations and repeated gathers of the step's backward, with their times."""
        return self._step(chosen).rematerialization

    def _step(self, chosen: Assignment) -> _Step:
        """The step of an assignment, computed once for its curve, peak, schedule and price: a search needs all of them for its
        best solutions.
        """
        found = next((one for one in self._steps if one.chosen == chosen), None) or _Step(self, chosen)
        self._steps = [found, *(one for one in self._steps if one is not found)][:REMEMBERED]
        return found

    def bytes(self, node: Node) -> Bytes:
        """Bytes of one rank's part of a value in a layout on its device."""
        if node not in self._bytes:
            self._bytes[node] = self.program.values[node[0]].device_bytes(node[1], self.sizes)
        return self._bytes[node]

    def own(self, op: Op, candidate: Candidate) -> Workspace:
        """The workspace of an op under a candidate."""
        key = self.analysis.classes.of[op.name], candidate
        if key not in self._own:
            kept, values, sizes = self.saved.get(op.name, NOTHING), self.program.values, self.sizes
            inside = [local_shape(values[n].shape, s, sizes) for n, s in zip(op.operands, candidate.operands, strict=True)]
            outside = [local_shape(r.shape, s, sizes) for r, s in zip(op.results, candidate.results, strict=True)]
            form = distributed(self.analysis.fits[op.name], candidate)
            backward = 0 if form and form[1].in_place else kept.local_backward(inside, outside)
            self._own[key] = Workspace(kept.local_internal(inside, outside), kept.local_forward(inside, outside), backward)
        return self._own[key]


def _memory_curve(lives: Sequence[LiveRange]) -> tuple[Ints, Floats]:
    """Times at which an allocation changes or a moment begins, with the bytes alive from then on."""
    starts = np.array([life.start for life in lives], dtype=np.int64)
    stops = np.array([life.stop for life in lives], dtype=np.int64) + 1
    sizes = np.array([life.bytes for life in lives], dtype=np.float64)
    moments = np.arange(0, int(stops.max()), SPAN, dtype=np.int64)
    times, places = np.unique(np.concatenate([starts, stops, moments]), return_inverse=True)
    change = np.zeros(len(times))
    np.add.at(change, places, np.concatenate([sizes, -sizes, np.zeros(len(moments))]))
    return times[:-1], np.cumsum(change)[:-1]


def _by_moment(lives: Sequence[LiveRange], count: int) -> Floats:
    """The largest number of bytes alive within each moment of the step of so many ops."""
    times, alive = _memory_curve(lives)
    most = np.zeros(2 * count + 1)
    np.maximum.at(most, times // SPAN, alive)
    return most


def _most(curve: Floats) -> Bytes:
    """The most bytes of a part of the memory curve."""
    return round(float(curve.max(initial=0.0)))


class _Step:
    """The live ranges of one step under one assignment."""

    def __init__(self, of: Liveness, chosen: Assignment) -> None:
        self.of, self.program, self.chosen, self.n = of, of.program, chosen, of.count
        self.schedule = Schedule(of.program, chosen)
        self.in_place = reduced_in_place(of.program, chosen, of.analysis.fits)
        self._homes: dict[Node, Node] = {}
        self._first: dict[Node, int] = {}  # first and last use in the forward, by home
        self._last: dict[Node, int] = {}
        for time, event in self.schedule.events:
            for node in _touched(event, chosen):
                self._touch(node, time)
        for output in of.program.outputs:
            self._touch((output.value, chosen.outputs[output.path]), at(self.n, 0) - 1)
        self.rematerialization = Rematerialization(of.program, of.saved, chosen, self.schedule, self.home, of.copied)
        for home, until in list(self.rematerialization.extended(self._last)):
            self._last[home] = max(self._last[home], until)

    @functools.cached_property
    def all(self) -> list[LiveRange]:
        """The live ranges of the step as a list, computed once."""
        return [*self.own, *self._waiting()]

    @functools.cached_property
    def own(self) -> list[LiveRange]:
        """The live ranges of one micro-batch: inputs and parameters, values, ops, conversions and gradients, in that order."""
        return [*self.values, *self._gradients()]

    @functools.cached_property
    def values(self) -> list[LiveRange]:
        """The live ranges of one micro-batch without gradients."""
        return [*self._given(), *self._values(), *self._inside(), *self._converting()]

    @functools.cached_property
    def held(self) -> list[LiveRange]:
        """What a micro-batch holds between its forward and its backward."""
        turn = at(self.n, 0)
        return [one for one in self.own if one.kind in ("kept", "internal") and one.start <= turn <= one.stop]

    @functools.cached_property
    def deferred(self) -> list[LiveRange]:
        """What one micro-batch keeps for deferred weight gradients of products: activations, perhaps shared by several
        products, and gradients of results, from the backward of each product on.
        """
        known, found = set[Node](), list[LiveRange]()
        for place, op, x in deferred_products(self.program):
            candidate = self.chosen.ops[op.name]
            node = x, candidate.operands[op.operands.index(x)]
            size = 0 if node in known else self.of.bytes(node)
            known.add(node)
            size += self.of.bytes((op.results[0].name, candidate.results[0]))
            found.append(LiveRange("deferred", op.name, at(2 * self.n - place), self.schedule.end - 1, size))
        return found

    @functools.cached_property
    def memory(self) -> StageMemory:
        """The memory of the stage, independent of its schedule."""
        analysis, step, turn = self.of.analysis, self.of.analysis.step, self.n
        later, begun = deferred_weights(self.program), list(self._gradients(first=True))
        first_half = [*self.values, *(life for life in begun if life.name not in later), *self.deferred]
        curves = self.own, [*self.own, *self.deferred], [*self.values, *begun], first_half
        own, halved, first, begun_half = (_by_moment(lives, self.n) for lives in curves)
        there = {kind: Counter[str]() for kind in ("stored", "gradient", "converted")}  # the whole step
        for life in self.own:
            if life.kind in there and life.start == 0 and life.stop >= self.schedule.end - 1:
                there[life.kind][life.name] += life.bytes
        passing = [
            life
            for life in self.own
            if life.name in analysis.weights
            and (life.kind in ("transient", "flowing", "flight") or (life.kind == "gradient" and life.start > 0))
        ]
        resident = sum(held.total() for held in there.values())
        names = [value.name for value in self.program.given if value.name not in step.received]
        parts = {name: self.of.bytes((name, self.chosen.given[name])) for name in self.chosen.given}
        sent = {(output.value, self.chosen.outputs[output.path]) for output in self.program.outputs if step.sends}
        kept = {life.name for life in self.held}
        return StageMemory(
            running=_most(own[:-1]),
            ending=_most(own[-1:]),
            held=sum(life.bytes for life in self.held),
            weights_held=sum(life.bytes for life in self.held if life.name in analysis.weights),
            halving=_most(halved[:-1]),
            deferred=sum(life.bytes for life in self.deferred),
            stored=tuple(there["stored"][name] for name in names),
            gradients=tuple(there["gradient"][name] for name in names),
            made_later=tuple(name in later for name in names),
            stepped=tuple(parts[name] * (name in analysis.backward) for name in names),
            shared=there["converted"].total(),
            forward=_most(own[:turn]) - resident,
            backward=_most(own[turn:-1]) - resident,
            first=_most(first[turn:-1]) - resident + there["gradient"].total(),
            halved=_most(halved[turn:-1]) - resident,
            first_half=_most(begun_half[turn:-1]) - resident + there["gradient"].total(),
            weights=_most(_by_moment(passing, turn)[turn:-1]) if passing else 0,
            received=sum(parts[name] for name in step.received),
            returned=sum(parts[name] for name in step.received if name in analysis.backward),
            sent=sum(map(self.of.bytes, sent)),
            beside=sum(self.of.bytes(node) for node in sent if self.home(node)[0] not in kept),
            back=sum(self.of.bytes(node) for node in sent if node[0] in analysis.backward),
        )

    def _gradients(self, *, first: bool = False) -> Iterator[LiveRange]:
        return self.of.gradients.lives(self.chosen, self.schedule, self.in_place, first=first)

    def _waiting(self) -> Iterator[LiveRange]:
        """What a stage holds besides the running micro-batch at the fullest moment of its schedule: other micro-batches in
        flight, between their passes, and deferred memory.
        """
        times, end = moments_of(self.of.analysis.step), self.schedule.end - 1
        now = max(times, key=self.memory.alive) if len(times) > 1 else times[0]
        for life in self.held if now.flights > 1 else ():
            yield LiveRange("waiting", life.name, 0, end, (now.flights - 1) * life.bytes)
        for life in self.deferred if now.waiting else ():
            yield LiveRange("deferred", life.name, 0, end, now.waiting * life.bytes)
        yield from self.deferred if now.halves else ()

    def home(self, node: Node) -> Node:
        """The value in a layout whose storage this one aliases; itself if it has its own storage."""
        found = self._homes.get(node)
        if found is None:
            name = node[0]
            step, op = self.schedule.prefetch.into.get(node), self.program.producer.get(name)
            found = node
            if step is not None:
                if is_alias(step) or (name, step) in self.in_place:
                    found = self.home((name, step.source))
            elif op is not None and op.name in self.of.views:
                found = self.home((op.operands[0], self.chosen.ops[op.name].operands[0]))
            self._homes[node] = found
        return found

    def shared(self, home: Node) -> bool:
        """Whether micro-batches share this storage: it holds weights that are gathered once for all of them."""
        return self.chosen.once and self.of.analysis.step.microbatches > 1 and home in self.schedule.prefetch.arrives

    def _touch(self, node: Node, now: int) -> None:
        home = self.home(node)
        self._first.setdefault(home, now)
        self._last[home] = now

    def _given(self) -> Iterator[LiveRange]:
        states, end, stepped = self.of.optimizer.states, self.schedule.end + SPAN - 1, []
        for parameter in (*self.program.parameters, *self.program.buffers):
            name = parameter.value.name
            size = self.of.bytes((name, self.chosen.given[name]))
            trained = name in self.of.analysis.backward
            stepped += [size] * trained
            yield LiveRange("stored", name, 0, end, size * (1 + states * trained))
        step = at(2 * self.n)
        yield LiveRange("transient", OPTIMIZER, step, step, self.of.optimizer.scratch(stepped, cpu=self.of.analysis.cpu))
        for value in self.program.inputs:
            local = self.of.bytes((value.name, self.chosen.given[value.name]))
            if value.name in self.of.analysis.step.received:  # a message that each micro-batch keeps until its backward
                yield LiveRange("kept", value.name, 0, end - SPAN, local)
                continue
            cut = local < value.bytes  # the caller holds the whole beside the part that is cut
            whole = elements(self.of.analysis.step.batch_shape(value.name)) * value.dtype.itemsize  # of all micro-batches
            yield LiveRange("stored", value.name, 0, end, whole + local * cut)

    def _values(self) -> Iterator[LiveRange]:
        """Live ranges of activations and converted weights, in the forward and the backward."""
        for home, first in self._first.items():
            if home[0] in self.chosen.given and home[1] == self.chosen.given[home[0]]:
                continue
            size, last = self.of.bytes(home), self._last[home]
            if self.shared(home):
                yield LiveRange("converted", home[0], 0, self.schedule.end + SPAN - 1, size)
                continue
            yield LiveRange("converted" if home in self.schedule.prefetch.into else "produced", home[0], first, last, size)
            recompute = self.rematerialization.live_range(home)
            if recompute:
                yield LiveRange("recompute", home[0], *recompute, size)
            elif (stop := self.rematerialization.kept_until(home)) > last:
                yield LiveRange("kept", home[0], last + 1, stop, size)

    def _inside(self) -> Iterator[LiveRange]:
        """Live ranges of the ops' workspace and of what autograd saves inside them."""
        for time, op in self.schedule.events:
            if not isinstance(op, Op) or op.name not in self.of.saved:
                continue
            own, back = self.of.own(op, self.chosen.ops[op.name]), self.schedule.mirror(time)
            recompute = self.rematerialization.recomputed_at(op.name)
            for now in (time, recompute) if own.forward else ():
                if now is not None:
                    yield LiveRange("transient", op.name, now, now, own.forward)
            yield LiveRange("transient", op.name, back, back, own.backward)
            if own.internal:
                span = self.rematerialization.live_range(op.name)
                kind, start, stop = ("recompute", *span) if span else ("internal", time, back)
                yield LiveRange(kind, op.name, start, stop, own.internal)

    def _converting(self) -> Iterator[LiveRange]:
        """Live ranges of the conversions' workspace, and of buckets in flight."""
        for _, event in self.schedule.events:
            if isinstance(event, Op):
                continue
            if event.gathers:
                yield from self._flight(event.steps, event.begun, event.time)
                steps, issued, arrived = self.rematerialization.gathered_again(event)
                if steps:
                    yield from self._flight(steps, issued, arrived)
                continue
            for name, step in event.steps:
                recompute = self.rematerialization.recomputed_at(event)
                scratch = beside(step, self.program.values[name], self.of.sizes)
                for now in (event.time, recompute) if scratch else ():
                    if now is not None:
                        yield LiveRange("transient", name, now, now, scratch)

    def _flight(self, steps: Sequence[Step], begun: int, arrived: int) -> Iterator[LiveRange]:
        """The buffers of a bucket's all-gather: its input, and its output until that is copied into the weights."""
        (first, step), size = steps[0], sum(self.of.bytes((name, step.target)) for name, step in steps)
        sent = sum(self.of.bytes((name, step.source)) for name, step in steps) if len(steps) > 1 else 0
        copied = len(steps) > 1 or beside(step, self.program.values[first], self.of.sizes) > 0
        copied &= step.primitives[0] not in TO_DEVICE  # each weight is copied to where it stays
        yield LiveRange("flight", first, begun, arrived if copied else arrived - 1, size + sent)


def _touched(event: Op | ConversionEvent, chosen: Assignment) -> Iterator[Node]:
    """The values, each in a layout, that an event reads and produces."""
    if isinstance(event, Op):
        candidate = chosen.ops[event.name]
        yield from zip(event.operands, candidate.operands, strict=True)
        yield from zip((result.name for result in event.results), candidate.results, strict=True)
    else:
        yield from ((name, layout) for name, step in event.steps for layout in (step.source, step.target))


__all__ = ["LiveRange", "Liveness"]
