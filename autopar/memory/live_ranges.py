"""Live ranges that hold for every choice of layouts: the terms of the memory rows in the integer program.

Moments are those of `memory.liveness`, which simulates one assignment exactly. Here the assignment is unknown. Anything that
depends on the order of conversions, or on the layout of a value between two consumers, is left out or counted at its smallest
size, so that a row is a lower bound on the simulated memory. The kinds of live ranges of a value are

    read         the layout that an op reads, while it runs; the layout produced, from the producer to the first read
    kept         saved for the backward by an op that reads or produces it, until that op's backward
    rerun        input of an op that may be recomputed, until the last use of the recomputed results
    between      from the first read to the last, in an unknown layout

of a gradient

    fresh        gradient of one operand, while the op's backward runs
    waiting      partial sum between the backwards of its last and first reader, in an unknown layout
    gradient     complete, in the produced layout, until the producer's backward; of a parameter, until the end of the step; of
                 what another stage has sent, until the end of the backward

and of an op: `internal` (saved by autograd beside operands and results), `forward` and `backward` (workspace). A value that
may be recomputed is assumed to be recomputed as early as any op that may be recomputed could need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass

from autopar.analysis.saved_tensors import SavedTensors
from autopar.ir.program import Op, Program

End = tuple[str, int]  # an op that reads a value, and as which operand


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLiveRange:
    """Memory occupied from moment `start` to moment `stop`, both included.

    `name` is a value, or an op for its workspace and internal tensors; `end` is the op that reads or saves the value, None for
    its producer. If it is recomputed it occupies no memory before the moment `needed`.
    """

    kind: str
    name: str
    start: int
    stop: int
    needed: int = 0
    end: End | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessInputs:
    """The inputs of live ranges.

    `saved` says what autograd saves of an op that has a backward; `backward` are the values that get a gradient and `ends`
    those that the user differentiates; `weights` are the parameters and their views; `views` are the ops whose results
    alias their first operand; `reruns` may be recomputed (or alias a result that may); `dropped` are the weights that are
    freed in the forward once they were gathered and used, `accumulated` whether gradients are those of several micro-batches;
    `elsewhere` are the parameters that the host or the disk may store, `received` the inputs that come from another stage.
    """

    saved: Callable[[Op], SavedTensors | None]
    backward: Set[str]
    ends: Set[str]
    weights: Set[str]
    views: Set[str]
    reruns: Set[str]
    dropped: Set[str]
    accumulated: bool
    elsewhere: Set[str] = frozenset()
    received: Set[str] = frozenset()


def lifetimes(program: Program, terms: LivenessInputs) -> Iterator[SavedLiveRange]:
    """The live ranges of a training step, in the order of values, then of ops."""
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
    """Readers and savers of each value, by the index of the op."""

    def __init__(self, program: Program, terms: LivenessInputs) -> None:
        self.program, self.terms, self.n = program, terms, len(program.ops)
        self.place = {op.name: i for i, op in enumerate(program.ops)}
        self.given = {v.name for v in program.given} - terms.elsewhere  # what is there in any case
        self.outputs = {output.value for output in program.outputs}
        self.readers: dict[str, list[tuple[int, End]]] = {name: [] for name in program.values}
        self.savers: dict[str, list[tuple[int, End | None]]] = {name: [] for name in program.values}
        for i, op in enumerate(program.ops):
            for position, name in enumerate(op.operands):
                self.readers[name].append((i, (op.name, position)))
            kept = terms.saved(op)
            if kept is not None:
                for position in kept.operands:
                    self.savers[op.operands[position]].append((i, (op.name, position)))
                for position in kept.results:
                    self.savers[op.results[position].name].append((i, None))
        self.needed_at, self.runs = self._first_needs()

    def back(self, i: int) -> int:
        """The moment at which the backward of op `i` runs."""
        return 2 * self.n - 1 - i

    def value(self, name: str) -> Iterator[SavedLiveRange]:
        """Live ranges of a value in the forward and, where it is saved, up to the backward."""
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
        for i, saver in self.savers[name]:
            start = i + 1
            if name in self.terms.dropped:
                start = self.back(i)
            yield SavedLiveRange(kind="kept", name=name, start=start, stop=self.back(i), needed=self.needed_at[name], end=saver)

    def gradient(self, name: str) -> Iterator[SavedLiveRange]:
        """Live ranges of the gradient of a value."""
        places = [i for i, (op, _) in self.readers[name] if self.terms.saved(self.program.op[op]) is not None]
        places += [self.n] if name in self.terms.ends else []
        if not places:
            return
        begin, whole = self.back(max(places)) + 1, self.back(min(places)) + 1
        if begin < whole:
            yield SavedLiveRange(kind="waiting", name=name, start=begin, stop=whole - 1)
        op = self.program.producer.get(name)
        stop = 2 * self.n - (name in self.terms.received) if op is None else self.back(self.place[op.name])
        start = 0 if op is None and self.terms.accumulated and name not in self.terms.received else whole
        yield SavedLiveRange(kind="gradient", name=name, start=start, stop=stop)

    def inside(self, i: int, op: Op) -> Iterator[SavedLiveRange]:
        """Live ranges of an op's workspace and internal tensors, and of the gradients of its operands."""
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
        """Live ranges of the inputs of an op that may be recomputed."""
        kept, names = self.terms.saved(op), [result.name for result in op.results]
        own = kept is not None and (kept.internal_bytes or kept.results)
        readers = [j for name in names for j, _ in self.readers[name]]
        stop = self.back(i if own else min([j for name in names for j, _ in self.savers[name]] or readers or [i]))
        for position, name in enumerate(op.operands):
            if name not in self.given and name not in self.terms.dropped:
                needed = self.back(i) if name in self.terms.weights else self.needed_at[name]
                yield SavedLiveRange(kind="rerun", name=name, start=i + 1, stop=stop, needed=needed, end=(op.name, position))

    def _first_needs(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """The earliest moments at which the backward may need each value, and may recompute each op."""
        never = 2 * self.n
        needed_at = {name: min((self.back(i) for i, _ in found), default=never) for name, found in self.savers.items()}
        runs: dict[str, int] = {}
        for i, op in reversed(list(enumerate(self.program.ops))):
            kept = self.terms.saved(op)
            own = self.back(i) if kept is not None and kept.internal_bytes else never
            runs[op.name] = min([own, *(needed_at[result.name] for result in op.results)])
            if op.name in self.terms.reruns or op.name in self.terms.views:
                for name in op.operands:
                    if name not in self.terms.weights:
                        needed_at[name] = min(needed_at[name], runs[op.name])
        return needed_at, runs
