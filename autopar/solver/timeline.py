"""The timeline of a training step: what is alive when, for given decisions. The plan's peak memory is read off it.

Time counts ops: op i runs forward at time i and backward at time 2n-1-i, the optimizer steps at time 2n. Alive are

    stored       parameters and buffers with their optimizer state, inputs       the whole step
    gradient     of a parameter, as stored                                      from the backward of its last use on;
                                                                                of micro-batches, the whole step
    produced     a value as its producer leaves it                              until its last use
    converted    its other layouts                                              from its first to its last use
    kept         either of them, for the backward                               from its last use until nobody asks any more
    internal     what autograd saves beside operands and results                until that backward
    again        what was not kept, but made again                              from the first backward that asks to the last
    flowing      gradients of values, as produced                               between backward of last use and producer
    transient    gradients as consumed                                          one backward

What lies in the memory of something else (a view; what a conversion leaves where it is) takes none of its own, and lengthens
the life
of that: its *home*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from autopar.conversion import Conversion
from autopar.cost_models.optimizers import Optimizer
from autopar.decisions import Decisions
from autopar.ir import Op, elements
from autopar.layout import Layout, local_shape
from autopar.mesh import Bytes
from autopar.passes.again import aliases, lies
from autopar.solver.analysis import Analysis
from autopar.solver.problem import Floats

Node = tuple[str, Layout]  # a value in a layout
Thing = Node | str  # or what autograd keeps inside an op, by the op's name


@dataclass(frozen=True, slots=True)
class Life:
    """Something takes `bytes` from `start` to `stop` (both included); `name` is a value, or an op for what is internal."""

    kind: str
    name: str
    start: int
    stop: int
    bytes: Bytes


@dataclass(slots=True)
class Asked:
    """When the backward asks for something, and until when what is made from it is asked for."""

    times: list[int] = field(default_factory=list)
    held: int = -1


class Timeline:
    """The lives of a program's steps; what does not depend on decisions is found out once."""

    def __init__(self, analysis: Analysis, optimizer: Optimizer) -> None:
        self.analysis, self.optimizer = analysis, optimizer
        program, of = analysis.program, analysis.classes.of
        self.program, self.sizes = program, analysis.sizes
        self.count = len(program.ops)
        self._lies = frozenset(op.name for op in program.ops if lies(op, program.values))
        runs = (op for op in program.ops if any(result.name in analysis.backward for result in op.results))
        self._saved = {op.name: analysis.saved[of[op.name]] for op in runs if of[op.name] in analysis.saved}
        self._sizes: dict[Node, Bytes] = {}

    def walk(self, chosen: Decisions) -> Floats:
        """Bytes alive at every moment of the step."""
        lives = self.lives(chosen)
        change = np.zeros(2 * self.count + 2)
        sizes = np.array([life.bytes for life in lives], dtype=np.float64)
        np.add.at(change, [life.start for life in lives], sizes)
        np.add.at(change, [life.stop + 1 for life in lives], -sizes)
        return np.cumsum(change)[:-1]

    def lives(self, chosen: Decisions) -> list[Life]:
        """Everything that takes memory at some moment."""
        return list(_Step(self, chosen).lives())

    def bytes(self, node: Node) -> Bytes:
        """The size of one rank's part."""
        if node not in self._sizes:
            value = self.program.values[node[0]]
            self._sizes[node] = elements(local_shape(value.shape, node[1], self.sizes)) * value.dtype.itemsize
        return self._sizes[node]

    def internal(self, op: Op, chosen: Decisions) -> Bytes:
        """What autograd keeps inside an op."""
        kept, candidate = self._saved[op.name], chosen.ops[op.name]
        values, sizes = self.program.values, self.sizes
        inside = [local_shape(values[n].shape, s, sizes) for n, s in zip(op.operands, candidate.operands, strict=True)]
        outside = [local_shape(r.shape, s, sizes) for r, s in zip(op.results, candidate.results, strict=True)]
        return kept.local_internal(inside, outside)


class _Step:
    """One step under one set of decisions."""

    def __init__(self, of: Timeline, chosen: Decisions) -> None:
        self.of, self.program, self.chosen, self.n = of, of.program, chosen, of.count
        self._into = {(name, step.target): step for name, route in chosen.routes.items() for step in route}
        self._homes: dict[Node, Node] = {}
        self._first: dict[Node, int] = {}  # forward: when something comes to be, and its last use, by home
        self._last: dict[Node, int] = {}
        self._asked: dict[Thing, Asked] = defaultdict(Asked)

    def lives(self) -> Iterator[Life]:
        """See `Timeline.lives`."""
        yield from self._given()
        self._forward()
        self._backward()
        yield from self._values()
        yield from self._gradients()

    def _home(self, node: Node) -> Node:
        """Where a value lies in memory."""
        found = self._homes.get(node)
        if found is None:
            name = node[0]
            step, op = self._into.get(node), self.program.producer.get(name)
            found = node
            if step is not None:
                if aliases(step):
                    found = self._home((name, step.source))
            elif op is not None and op.name in self.of._lies:
                found = self._home((op.operands[0], self.chosen.ops[op.name].operands[0]))
            self._homes[node] = found
        return found

    def _is_given(self, home: Node) -> bool:
        return home[0] not in self.program.producer and home[1] == self.chosen.given[home[0]]

    def _given(self) -> Iterator[Life]:
        states, end = self.of.optimizer.states, 2 * self.n
        for parameter in (*self.program.parameters, *self.program.buffers):
            name = parameter.value.name
            size = self.of.bytes((name, self.chosen.given[name]))
            trained = name in self.of.analysis.backward
            yield Life("stored", name, 0, end, size * (1 + states * trained))
        for value in self.program.inputs:
            local = self.of.bytes((value.name, self.chosen.given[value.name]))
            cut = value.requires_grad and local < value.bytes  # the caller holds the whole beside the part that is copied
            whole = elements(self.program.whole(value.name)) * value.dtype.itemsize
            yield Life("stored", value.name, 0, end, whole + local * cut)

    # --- forward ---------------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        """When everything comes to be, and when it was used last."""
        for i, op in enumerate(self.program.ops):
            candidate = self.chosen.ops[op.name]
            for node in zip(op.operands, candidate.operands, strict=True):
                self._use(node, i)
            for result, layout in zip(op.results, candidate.results, strict=True):
                self._touch(self._home((result.name, layout)), i)
        for output in self.program.outputs:
            self._use((output.value, self.chosen.outputs[output.path]), self.n - 1)

    def _use(self, node: Node, i: int) -> None:
        """A value is used in a layout; it is converted when that happens first."""
        step = self._into.get(node)
        if step is not None and node not in self._first:
            self._use((node[0], step.source), i)
        self._first.setdefault(node, i)
        self._touch(self._home(node), i)

    def _touch(self, home: Node, i: int) -> None:
        self._first.setdefault(home, i)
        self._last[home] = i

    # --- backward --------------------------------------------------------------------------------------------------------

    def _backward(self) -> None:
        """What the backward asks for, the latest op first: whoever is made from something is looked at before that."""
        again, saved = self.chosen.again, self.of._saved
        for i in reversed(range(self.n)):
            op, candidate, now = self.program.ops[i], self.chosen.ops[self.program.ops[i].name], 2 * self.n - 1 - i
            results = [(r.name, layout) for r, layout in zip(op.results, candidate.results, strict=True)]
            operands = list(zip(op.operands, candidate.operands, strict=True))
            for result in op.results:
                self._steps(result.name)
            if op.name in saved:
                kept = saved[op.name]
                for node in (*(operands[p] for p in kept.operands), *(results[p] for p in kept.results)):
                    self._asked[self._home(node)].times.append(now)
                if kept.internal_bytes:
                    self._asked[op.name].times.append(now)
            if op.name in again.ops:
                things: list[Thing] = [op.name, *(node for node in results if self._home(node) == node)]
                self._made_from(things, operands)
        for name in self.chosen.given:
            self._steps(name)

    def _steps(self, name: str) -> None:
        """The conversions of a value that are done again, the last of a route first."""
        for step in reversed(self.chosen.routes.get(name, ())):
            if (name, step) in self.chosen.again.steps:
                self._made_from([(name, step.target)], [(name, step.source)])

    def _made_from(self, things: list[Thing], sources: list[Node]) -> None:
        """Things are made again together when the first of them is asked for; their sources are held until the last was."""
        asked = [self._asked[thing] for thing in things if thing in self._asked and self._asked[thing].times]
        if not asked:
            return
        first, last = min(min(a.times) for a in asked), max(max(a.times) for a in asked)
        for node in sources:
            source = self._asked[self._home(node)]
            source.times.append(first)
            source.held = max(source.held, last)

    def _made_again(self, home: Node) -> bool:
        name, step = home[0], self._into.get(home)
        if step is not None:
            return (name, step) in self.chosen.again.steps
        op = self.program.producer.get(name)
        return op is not None and op.name in self.chosen.again.ops

    def _values(self) -> Iterator[Life]:
        """What lies in memory of values and inside ops."""
        for home, first in self._first.items():
            if self._home(home) != home or self._is_given(home):
                continue
            size, last, asked = self.of.bytes(home), self._last[home], self._asked.get(home)
            yield Life("converted" if home in self._into else "produced", home[0], first, last, size)
            if asked is None or not asked.times:
                continue
            if self._made_again(home):
                yield Life("again", home[0], min(asked.times), max(asked.times), size)
            elif (stop := max(asked.held, *asked.times)) > last:
                yield Life("kept", home[0], last + 1, stop, size)
        for i, op in enumerate(self.program.ops):
            if op.name in self._asked and self._asked[op.name].times:
                now, again = 2 * self.n - 1 - i, op.name in self.chosen.again.ops
                start = self._remade(op) if again else i
                yield Life("again" if again else "internal", op.name, start, now, self.of.internal(op, self.chosen))

    def _remade(self, op: Op) -> int:
        """When an op runs again."""
        results = zip((r.name for r in op.results), self.chosen.ops[op.name].results, strict=True)
        things: list[Thing] = [op.name, *results]
        return min(min(self._asked[thing].times) for thing in things if thing in self._asked and self._asked[thing].times)

    # --- gradients -------------------------------------------------------------------------------------------------------

    def _gradients(self) -> Iterator[Life]:
        program, backward, n = self.program, self.of.analysis.backward, self.n
        used = self._last_readers()
        for parameter in (*program.parameters, *program.buffers):
            name = parameter.value.name
            if name in backward:
                size = self.of.bytes((name, self.chosen.given[name]))
                start = 0 if program.runs > 1 else 2 * n - 1 - used.get(name, n - 1)
                yield Life("gradient", name, start, 2 * n, size)
        for i, op in enumerate(program.ops):
            now, flows = 2 * n - 1 - i, op.name not in self.of._lies
            candidate = self.chosen.ops[op.name]
            for result, layout in zip(op.results, candidate.results, strict=True):
                if flows and result.name in backward and result.name in used:
                    yield Life("flowing", result.name, 2 * n - 1 - used[result.name], now, self.of.bytes((result.name, layout)))
            if flows and op.name in self.of._saved:
                for name, layout in zip(op.operands, candidate.operands, strict=True):
                    if name in backward:
                        yield Life("transient", name, now, now, self.of.bytes((name, layout)))

    def _last_readers(self) -> dict[str, int]:
        """The last use of every value, its views' included."""
        last: dict[str, int] = {output.value: self.n - 1 for output in self.program.outputs}
        for i, op in enumerate(self.program.ops):
            for name in op.operands:
                last[name] = max(last.get(name, 0), i)
        for op in reversed(self.program.ops):
            if op.name in self.of._lies:
                ends = [last[r.name] for r in op.results if r.name in last]
                last[op.operands[0]] = max(last[op.operands[0]], *ends) if ends else last[op.operands[0]]
        return last


__all__ = ["Conversion", "Life", "Timeline"]
