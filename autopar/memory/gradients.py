"""The memory of gradients in the backward of a step: when each comes to be, what it is added to, and when it is gone.

of an op's operand    comes with the op's backward; lies in the gradient of the result where that is only passed on
of a value            what its readers give, added up: from the first of them in the backward to its producer's backward
converted             follows on the backward of the first op that read the target
of a weight           waits for all of its bundle; what the collective gives is one piece for all of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.analysis.saved_tensors import SavedTensors
from autopar.ir.conversion import beside
from autopar.ir.mesh import Bytes
from autopar.ir.program import Op, Program
from autopar.memory.prefetch import Node
from autopar.memory.schedule import DURING, ConversionEvent, LiveRange, Schedule, Step
from autopar.search_space.assignment import Assignment

PASSED = ("identity",)  # backward primitives whose result is what they are given


@dataclass(slots=True, eq=False)
class GradientBuffer:
    """Memory of gradients: of what, and how many bytes; `claims` counts who needs it."""

    parts: Sequence[tuple[str, Bytes]]
    start: int
    stop: int
    claims: int = 0
    stored: bool = False  # gradients of parameters as stored, for the optimizer


class Gradients:
    """The gradients of one step; `saved` knows the ops that have a backward, `backward` the values that get a gradient."""

    def __init__(
        self,
        program: Program,
        sizes: tuple[int, ...],
        saved: Mapping[str, SavedTensors],
        backward: frozenset[str],
        size: Callable[[Node], Bytes],
    ) -> None:
        self.program, self.sizes, self.saved, self.backward, self.size = program, sizes, saved, backward, size
        ends = [output for output in program.outputs if output.value in backward]
        self.ends = [end for end in ends if not program.values[end.value].shape] or ends  # what the user differentiates

    def lives(self, chosen: Assignment, schedule: Schedule) -> Iterator[LiveRange]:
        """Everything that takes memory at some moment."""
        pieces: list[GradientBuffer] = []
        step = _Step(self, chosen, schedule, pieces)
        yield from step.run()
        for piece in pieces:
            for name, size in piece.parts:
                kind = "gradient" if piece.stored else "flowing" if name in self.program.producer else "transient"
                yield LiveRange(kind, name, piece.start, piece.stop, size)


class _Step:
    """One backward; `waiting` holds what a value's gradient is so far."""

    def __init__(self, of: Gradients, chosen: Assignment, schedule: Schedule, pieces: list[GradientBuffer]) -> None:
        self.of, self.chosen, self.schedule, self.pieces = of, chosen, schedule, pieces
        self.waiting: dict[Node, GradientBuffer] = {}

    def run(self) -> Iterator[LiveRange]:
        """The backward in its order; yields what lives only meanwhile."""
        begin = self.schedule.mirror(self.schedule.events[-1][0])
        for output in self.of.ends:
            node = output.value, self.chosen.outputs[output.path]
            self._arrive(node, self._new([node], begin), begin)
        for time, event in reversed(self.schedule.events):
            if isinstance(event, Op):
                self._op(event, self.schedule.mirror(time))
            else:
                yield from self._back(event, self.schedule.mirror(time))
        several, once = self.of.program.runs > 1, self.chosen.once
        for name, layout in self.schedule.prefetch.arrives if several and once else ():
            if name in self.of.backward:
                yield LiveRange("gradient", name, 0, self.schedule.end - 1, self.of.size((name, layout)))
        for node in self.chosen.given.items():
            if node in self.waiting:
                self.waiting[node].stored = True
                if several and not once:  # added to those of the micro-batches before
                    yield LiveRange("gradient", node[0], 0, self.schedule.end + DURING, self.of.size(node))
                else:
                    self.waiting[node].stop = self.schedule.end + DURING

    def _op(self, op: Op, now: int) -> None:
        """The backward of an op."""
        candidate, kept = self.chosen.ops[op.name], self.of.saved.get(op.name)
        results = zip((r.name for r in op.results), candidate.results, strict=True)
        given = [self.waiting.pop(node) for node in results if node in self.waiting]
        if not given or kept is None:
            return
        for position, node in enumerate(zip(op.operands, candidate.operands, strict=True)):
            if node[0] in self.of.backward:
                self._arrive(node, given[0] if position in kept.through else self._new([node], now), now)
        for piece in given:
            self._release(piece, now)

    def _back(self, done: ConversionEvent, now: int) -> Iterator[LiveRange]:
        """The gradients of what was converted together, on their way back."""
        steps = [(name, step) for name, step in done.steps if (name, step.target) in self.waiting]
        if done.bucketed and steps and steps[0][1].primitives[1] in ("all_reduce", "reduce_scatter"):
            yield from self._together(steps, now, self.schedule.mirror(done.begun))
            return
        for name, step in steps:
            piece, source = self.waiting.pop((name, step.target)), (name, step.source)
            yield LiveRange("transient", name, now, now, beside(step, self.of.program.values[name], self.of.sizes, back=True))
            self._arrive(source, piece if step.primitives[1] in PASSED else self._new([source], now), now)
            self._release(piece, now)

    def _together(self, steps: Sequence[Step], now: int, waited: int) -> Iterator[LiveRange]:
        """The gradients of a bundle in one buffer: the sum of all ranks' lies in it, parts of the sum do not."""
        sources = [(name, step.source) for name, step in steps]
        if steps[0][1].primitives[1] == "reduce_scatter":
            yield LiveRange("flight", steps[0][0], now, waited, sum(self.of.size((name, step.target)) for name, step in steps))
        sent = self._new(sources, now)
        for name, step in steps:
            self._arrive((name, step.source), sent, now)
            self._release(self.waiting.pop((name, step.target)), now)

    def _new(self, nodes: Sequence[Node], now: int) -> GradientBuffer:
        """Memory for the gradients of these."""
        piece = GradientBuffer(parts=[(node[0], self.of.size(node)) for node in nodes], start=now, stop=now)
        self.pieces.append(piece)
        return piece

    def _arrive(self, node: Node, piece: GradientBuffer, now: int) -> None:
        """One more gradient of a value: added to what there is, in place if nothing else needs that."""
        piece.claims += 1
        before = self.waiting.get(node)
        if before is None:
            self.waiting[node] = piece
            return
        self._release(piece, now)
        if before.claims > 1:
            self._release(before, now)
            self.waiting[node] = total = self._new([node], now)
            total.claims = 1

    def _release(self, piece: GradientBuffer, now: int) -> None:
        piece.claims -= 1
        piece.stop = max(piece.stop, now)
