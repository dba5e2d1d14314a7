"""What is alive at the moment of an op, whatever the layouts: what the rows of the integer program are made of.

Moments and memory are those of `solver.liveness`, which knows the decisions and is exact. What depends on the order of
conversions, or on where a value lies between two of its readers, is left out or taken at its least, so that a row says at most
what the timeline does. Of a value there is

    read         at the moment of an op what it reads, as it reads it, and what it makes until that is first read
    kept         what an op reads or makes, for its backward, from the one to the other
    rerun        what an op reads that may run again, until nobody asks for its results
    between      after the first reader and before the last, in whatever layout

of a gradient

    fresh        that of an op's operand, in the op's backward
    waiting      what there is of it between the backwards of the last reader and of the first, in whatever layout
    gradient     after that, as produced, until the producer's backward; of a parameter to the end

and of an op what is stored, internal, or taken by its forward or its backward. What may be made again is taken to be asked for
at the earliest moment possible: by all ops that may run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass

from autopar.analysis.saved_tensors import SavedTensors
from autopar.ir.program import Op, Program

End = tuple[str, int]  # an op that reads a value, and as which operand


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLiveRange:
    """Something takes memory from `start` to `stop` (both included).

    `name` is a value, or an op for what is its own; `end` says who reads or keeps the value, None its producer. Until `needed`
    what is made again is not there.
    """

    kind: str
    name: str
    start: int
    stop: int
    needed: int = 0
    end: End | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessInputs:
    """What lifetimes depend on: what autograd saves of an op that has a backward, the values that get a gradient and those
    that the user differentiates, the parameters and their views, the ops that lie in their operand's memory, those that may
    run again (or lie in what does), and whether gathered weights are dropped."""

    saved: Callable[[Op], SavedTensors | None]
    backward: Set[str]
    ends: Set[str]
    weights: Set[str]
    lying: Set[str]
    reruns: Set[str]
    dropped: bool


def lifetimes(program: Program, terms: LivenessInputs) -> Iterator[SavedLiveRange]:
    """Every lifetime of a step."""
    uses = _Uses(program, terms)
    for name in program.values:
        yield from uses.value(name)
        if name in terms.backward:
            yield from uses.gradient(name)
    for i, op in enumerate(program.ops):
        yield from uses.inside(i, op)
        if op.name in terms.reruns:
            yield from uses.rerun(i, op)


class _Uses:
    """Who reads and keeps what, by the places of ops."""

    def __init__(self, program: Program, terms: LivenessInputs) -> None:
        self.program, self.terms, self.n = program, terms, len(program.ops)
        self.place = {op.name: i for i, op in enumerate(program.ops)}
        self.given = {v.name for v in program.given}
        self.outputs = {output.value for output in program.outputs}
        self.readers: dict[str, list[tuple[int, End]]] = {name: [] for name in program.values}
        self.keepers: dict[str, list[tuple[int, End | None]]] = {name: [] for name in program.values}
        for i, op in enumerate(program.ops):
            for position, name in enumerate(op.operands):
                self.readers[name].append((i, (op.name, position)))
            kept = terms.saved(op)
            if kept is not None:
                for position in kept.operands:
                    self.keepers[op.operands[position]].append((i, (op.name, position)))
                for position in kept.results:
                    self.keepers[op.results[position].name].append((i, None))
        self.asked, self.runs = self._asked()

    def back(self, i: int) -> int:
        """The moment of the backward of the op at a place."""
        return 2 * self.n - 1 - i

    def value(self, name: str) -> Iterator[SavedLiveRange]:
        """A value in the forward, and what is kept of it."""
        readers = self.readers[name]
        first = min((i for i, _ in readers), default=self.n)
        last = self.n if name in self.outputs else max((i for i, _ in readers), default=-1)
        op = self.program.producer.get(name)
        if op is not None:
            here = self.place[op.name]
            yield SavedLiveRange(kind="read", name=name, start=here, stop=max(here, min(first, last) - 1))
        for i, end in readers:
            yield SavedLiveRange(kind="read", name=name, start=i, stop=i, end=end)
        if name not in self.given and first < last:
            yield SavedLiveRange(kind="between", name=name, start=first, stop=last - 1)
        for i, keeper in self.keepers[name]:
            start = i + 1
            if self.terms.dropped and name in self.terms.weights:
                start = self.back(i)
            yield SavedLiveRange(kind="kept", name=name, start=start, stop=self.back(i), needed=self.asked[name], end=keeper)

    def gradient(self, name: str) -> Iterator[SavedLiveRange]:
        """The gradient of a value."""
        places = [i for i, (op, _) in self.readers[name] if self.terms.saved(self.program.op[op]) is not None]
        places += [self.n] if name in self.terms.ends else []
        if not places:
            return
        begin, whole = self.back(max(places)) + 1, self.back(min(places)) + 1
        if begin < whole:
            yield SavedLiveRange(kind="waiting", name=name, start=begin, stop=whole - 1)
        op = self.program.producer.get(name)
        stop = 2 * self.n if op is None else self.back(self.place[op.name])
        start = 0 if op is None and self.program.runs > 1 else whole  # those of micro-batches are added up
        yield SavedLiveRange(kind="gradient", name=name, start=start, stop=stop)

    def inside(self, i: int, op: Op) -> Iterator[SavedLiveRange]:
        """What an op takes for itself, and the gradients of its operands."""
        kept, now = self.terms.saved(op), self.back(i)
        if kept is None:
            return
        yield SavedLiveRange(kind="forward", name=op.name, start=i, stop=i)
        yield SavedLiveRange(kind="backward", name=op.name, start=now, stop=now)
        if kept.internal_bytes:
            yield SavedLiveRange(kind="internal", name=op.name, start=i, stop=now, needed=self.runs[op.name])
        for position, name in enumerate(op.operands):
            if name in self.terms.backward and position not in kept.through:
                yield SavedLiveRange(kind="fresh", name=name, start=now, stop=now, end=(op.name, position))

    def rerun(self, i: int, op: Op) -> Iterator[SavedLiveRange]:
        """What an op reads, if it runs again."""
        kept, names = self.terms.saved(op), [result.name for result in op.results]
        own = kept is not None and (kept.internal_bytes or kept.results)
        readers = [j for name in names for j, _ in self.readers[name]]
        stop = self.back(i if own else min([j for name in names for j, _ in self.keepers[name]] or readers or [i]))
        for position, name in enumerate(op.operands):
            if name not in self.given and not (self.terms.dropped and name in self.terms.weights):
                needed = self.back(i) if name in self.terms.weights else self.asked[name]
                yield SavedLiveRange(kind="rerun", name=name, start=i + 1, stop=stop, needed=needed, end=(op.name, position))

    def _asked(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """The earliest moments at which the backward may ask for each value, and run each op again."""
        never = 2 * self.n
        asked = {name: min((self.back(i) for i, _ in found), default=never) for name, found in self.keepers.items()}
        runs: dict[str, int] = {}
        for i, op in reversed(list(enumerate(self.program.ops))):
            kept = self.terms.saved(op)
            own = self.back(i) if kept is not None and kept.internal_bytes else never
            runs[op.name] = min([own, *(asked[result.name] for result in op.results)])
            if op.name in self.terms.reruns or op.name in self.terms.lying:
                for name in op.operands:
                    if name not in self.terms.weights:
                        asked[name] = min(asked[name], runs[op.name])
        return asked, runs
