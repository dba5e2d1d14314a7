"""The schedule of a training step: the order used by `codegen.emit`, the memory analysis and `autopar.simulator`.

Op i of n runs forward at moment i and backward at moment 2n-1-i; the optimizer steps at moment 2n. A moment has ticks: operands
are converted first, the op runs in the middle (`DURING`), and the backward mirrors this. The ticks before an op's backward are
free for recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.analysis.weights import copies
from autopar.ir.conversion import Conversion
from autopar.ir.device import Bytes
from autopar.ir.program import Op, Program
from autopar.memory.prefetch import Node, PrefetchOrder
from autopar.search_space.assignment import Assignment
from autopar.search_space.buckets import TOGETHER, Bucket

Step = tuple[str, Conversion]  # a conversion of a value

DURING = 1 << 16
SPAN = 2 * DURING + 1  # ticks of a moment; odd, so that mirroring maps the middle to the middle


@dataclass(frozen=True, slots=True)
class LiveRange:
    """An allocation of `bytes` from time `start` to `stop`, both included; `name` is a value, or an op for its own tensors."""

    kind: str
    name: str
    start: int
    stop: int
    bytes: Bytes


@dataclass(frozen=True, slots=True, eq=False)
class ConversionEvent:
    """Conversions in one message, or a single one: complete at `time`, issued at `begun`."""

    steps: tuple[Step, ...]
    time: int
    begun: int
    bucketed: bool

    @property
    def gathers(self) -> bool:
        """Whether a bucket of weights is gathered, or fetched from the host: the program computes from `begun` to `time`."""
        return self.bucketed and self.steps[0][1].primitives[0] in TOGETHER[0]

    @property
    def reduces(self) -> bool:
        """Whether gradients of a bucket are reduced in one message, or copied to the host: in the backward the program computes
        until the mirror of `begun`."""
        return self.bucketed and self.steps[0][1].primitives[1] in TOGETHER[1]


def at(moment: int, tick: int = DURING) -> int:
    """The time of a tick of a moment; by default the tick at which its op runs."""
    return SPAN * moment + tick


class Schedule:
    """The ops and conversions of a forward in order, each with its time; the backward mirrors it."""

    def __init__(self, program: Program, chosen: Assignment) -> None:
        self.program, self.chosen, self.copies = program, chosen, copies(program)
        self.end = at(2 * len(program.ops), 0)
        self.events: list[tuple[int, Op | ConversionEvent]] = []
        self.prefetch = PrefetchOrder(program, chosen)
        self._begun: dict[Bucket, int] = {}
        self._available: set[Node] = set(chosen.given.items())
        self._now = 0
        for one in self.prefetch.first:
            self._begin(one)
        self.top = self._now  # what is issued at the top of the forward, before inputs are taken, is issued by then
        for i, op in enumerate(program.ops):
            if op.results[0].name not in self.copies:  # casts of weights run at their first use
                self._now = max(self._now, at(i, 0))
                self._run(op, at(i))
        for output in program.outputs:
            self._reach((output.value, chosen.outputs[output.path]))

    @property
    def order(self) -> list[tuple[int, Op | Bucket | ConversionEvent]]:
        """What the forward does: a bucket stands where it is issued, conversions where they are complete."""
        issued = ((time, one) for one, time in self._begun.items())
        return sorted((*self.events, *issued), key=lambda pair: pair[0])

    @functools.cached_property
    def times(self) -> Mapping[object, int]:
        """When every op runs forward, by name, and when every conversion of a value is complete."""
        found: dict[object, int] = {}
        for time, event in self.events:
            found |= {event.name: time} if isinstance(event, Op) else dict.fromkeys(event.steps, time)
        return found

    def mirror(self, time: int) -> int:
        """The time of the backward of what runs forward at `time`."""
        return self.end - 1 - time

    def _run(self, op: Op, now: int | None = None) -> None:
        """Schedule an op, by default as soon as its operands are ready; converts them first."""
        candidate = self.chosen.ops[op.name]
        for node in zip(op.operands, candidate.operands, strict=True):
            self._reach(node)
        if now is None and (op.results[0].name, candidate.results[0]) in self._available:
            return  # a copy of a weight: waiting for the weight has started a bucket of copies
        self._now = self._now + 1 if now is None else now
        self.events.append((self._now, op))
        self._available.update(zip((r.name for r in op.results), candidate.results, strict=True))

    def _reach(self, node: Node) -> None:
        """Schedule whatever is missing until a value is available in a layout."""
        if node in self._available:
            return
        if node[0] in self.copies and node[1] == self.chosen.produced(node[0], self.program):
            self._run(self.program.producer[node[0]])
            return
        if node in self.prefetch.arrives:
            self._finish(self.prefetch.arrives[node])
            return
        step = self.prefetch.into[node]
        self._reach((node[0], step.source))
        self._convert(((node[0], step),), self._now + 1, bucketed=False)

    def _begin(self, one: Bucket) -> None:
        for name, step in one.steps:
            self._reach((name, step.source))
        self._now += 1
        self._begun.setdefault(one, self._now)

    def _finish(self, one: Bucket) -> None:
        self._begin(one)
        if all((name, step.target) in self._available for name, step in one.steps):
            return
        self._convert(one.steps, self._begun[one], bucketed=True)
        for following in self.prefetch.after.get(one, ()):
            self._begin(following)

    def _convert(self, steps: tuple[Step, ...], begun: int, *, bucketed: bool) -> None:
        self._now += 1
        self.events.append((self._now, ConversionEvent(steps=steps, time=self._now, begun=begun, bucketed=bucketed)))
        self._available.update((name, step.target) for name, step in steps)
