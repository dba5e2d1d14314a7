"""Memory of gradients in the backward: when each buffer is allocated, accumulated into, and freed.

of an op's operand    allocated in the op's backward; aliases the gradient of the result where that is passed through
of a value            sum over its readers: from the first contribution in the backward to the producer's backward
of what crosses a cut gradients received for a stage's outputs, and sent for its inputs: until the backward ends
of a conversion       converted back after the backward of the first op that read the converted value
of a weight           waits until its whole bucket is complete; the collective returns one buffer for the bucket
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.analysis.saved_tensors import SavedTensors
from autopar.ir.conversion import FROM_DEVICE, beside
from autopar.ir.device import Bytes
from autopar.ir.program import Op
from autopar.ir.training_step import TrainingStep
from autopar.memory.prefetch import Node
from autopar.memory.schedule import DURING, ConversionEvent, LiveRange, Schedule, Step
from autopar.search_space.assignment import Assignment

PASSED = ("identity",)  # backward primitives that return their input


@dataclass(slots=True, eq=False)
class GradientBuffer:
    """One allocation that holds the gradients `parts` (value, bytes); `claims` counts the references to it."""

    parts: Sequence[tuple[str, Bytes]]
    start: int
    stop: int
    claims: int = 0
    stored: bool = False  # gradients of parameters as stored, for the optimizer


class Gradients:
    """Live ranges of gradients; `saved` has an entry per op with a backward, `backward` has the values that get a gradient;
    copies to the host run `ahead`, overlapping with computation, unless the device is a CPU.
    """

    def __init__(
        self,
        step: TrainingStep,
        sizes: tuple[int, ...],
        saved: Mapping[str, SavedTensors],
        backward: frozenset[str],
        size: Callable[[Node], Bytes],
        *,
        ahead: bool,
    ) -> None:
        program, self.accumulated, self.step = step.program, step.microbatches > 1, step
        self.program, self.sizes, self.saved, self.backward, self.size = program, sizes, saved, backward, size
        self.ahead = ahead
        ends = [output for output in program.outputs if output.value in backward]
        scalars = [end for end in ends if not program.values[end.value].shape]
        self.ends = ends if step.sends else scalars or ends  # what is differentiated, by the user or by the next stage

    def lives(
        self, chosen: Assignment, schedule: Schedule, in_place: frozenset[Step], *, first: bool = False
    ) -> Iterator[LiveRange]:
        """The live ranges of all gradient buffers in one step, with some conversions `in_place`; with `first` no earlier
        micro-batch has left gradients.

        Gradients of weights gathered once for all micro-batches are always counted as if one had.
        """
        buffers: list[GradientBuffer] = []
        step = _Step(self, chosen, schedule, in_place, buffers, several=self.accumulated and (not first or chosen.once))
        yield from step.run()
        for buffer in buffers:
            for name, size in buffer.parts:
                passing = "flowing" if name in self.program.producer else "transient"
                yield LiveRange("gradient" if buffer.stored else passing, name, buffer.start, buffer.stop, size)


class _Step:
    """One backward pass; `waiting` maps a value in a layout to the buffer in which its gradient accumulates."""

    def __init__(
        self,
        of: Gradients,
        chosen: Assignment,
        schedule: Schedule,
        in_place: frozenset[Step],
        buffers: list[GradientBuffer],
        *,
        several: bool,
    ) -> None:
        self.of, self.chosen, self.schedule, self.buffers, self.several = of, chosen, schedule, buffers, several
        self.in_place = in_place
        self.waiting: dict[Node, GradientBuffer] = {}

    def run(self) -> Iterator[LiveRange]:
        """Run the backward in order; yields temporary buffers, and gradients that accumulate over micro-batches."""
        begin = self.schedule.mirror(self.schedule.events[-1][0] if self.schedule.events else 0)
        for output in self.of.ends:
            node = output.value, self.chosen.outputs[output.path]
            buffer = self._new([node], begin)
            if self.of.step.sends:  # a message, which the rank lets go of after the backward
                buffer.claims, buffer.stop = 1, self.schedule.end - 1
            self._arrive(node, buffer, begin)
        for time, event in reversed(self.schedule.events):
            if isinstance(event, Op):
                self._op(event, self.schedule.mirror(time))
            else:
                yield from self._convert_back(event, self.schedule.mirror(time))
        once = self.schedule.prefetch.arrives if self.several and self.chosen.once else ()
        for name, layout in once:
            if name in self.of.backward:
                yield LiveRange("gradient", name, 0, self.schedule.end - 1, self.of.size((name, layout)))
        gathered = {name for name, _ in once}
        for node in self.chosen.given.items():
            if node[0] in self.of.step.received and node in self.waiting:  # sent back when the backward ends
                self.waiting[node].stop = self.schedule.end - 1
            elif node in self.waiting:
                self.waiting[node].stored = True
                if self.several and node[0] not in gathered:  # added to those of the micro-batches before
                    yield LiveRange("gradient", node[0], 0, self.schedule.end + DURING, self.of.size(node))
                else:
                    self.waiting[node].stop = self.schedule.end + DURING

    def _op(self, op: Op, now: int) -> None:
        """Run the backward of an op: consume its results' gradients, contribute to those of its operands."""
        candidate, kept = self.chosen.ops[op.name], self.of.saved.get(op.name)
        results = zip((r.name for r in op.results), candidate.results, strict=True)
        given = [self.waiting.pop(node) for node in results if node in self.waiting]
        if not given or kept is None:
            return
        for position, node in enumerate(zip(op.operands, candidate.operands, strict=True)):
            if node[0] in self.of.backward:
                self._arrive(node, given[0] if position in kept.through else self._new([node], now), now)
        for buffer in given:
            self._release(buffer, now)

    def _convert_back(self, conversion: ConversionEvent, now: int) -> Iterator[LiveRange]:
        """Convert gradients back; yields the buffers that this needs temporarily."""
        steps = [(name, step) for name, step in conversion.steps if (name, step.target) in self.waiting]
        if steps and conversion.reduces:
            yield from self._reduce_bucket(steps, now, self.schedule.mirror(conversion.begun))
            return
        for name, step in steps:
            buffer, source = self.waiting.pop((name, step.target)), (name, step.source)
            yield LiveRange("transient", name, now, now, beside(step, self.of.program.values[name], self.of.sizes, back=True))
            passed = step.primitives[1] in PASSED or (name, step) in self.in_place
            self._arrive(source, buffer if passed else self._new([source], now), now)
            self._release(buffer, now)

    def _reduce_bucket(self, steps: Sequence[Step], now: int, waited: int) -> Iterator[LiveRange]:
        """Reduce the gradients of a bucket in one buffer: all_reduce works in place, reduce_scatter needs an output buffer."""
        sources = [(name, step.source) for name, step in steps]
        if steps[0][1].primitives[1] in FROM_DEVICE and self.of.ahead and waited > now:  # the copies to the host read them
            yield LiveRange(
                "flight", steps[0][0], now + 1, waited, sum(self.of.size((name, step.target)) for name, step in steps)
            )
        if steps[0][1].primitives[1] == "reduce_scatter":
            yield LiveRange("flight", steps[0][0], now, waited, sum(self.of.size((name, step.target)) for name, step in steps))
        sent = self._new(sources, now)
        for name, step in steps:
            self._arrive((name, step.source), sent, now)
            self._release(self.waiting.pop((name, step.target)), now)

    def _new(self, nodes: Sequence[Node], now: int) -> GradientBuffer:
        """Allocate one buffer for the gradients of these values."""
        buffer = GradientBuffer(parts=[(node[0], self.of.size(node)) for node in nodes], start=now, stop=now)
        self.buffers.append(buffer)
        return buffer

    def _arrive(self, node: Node, buffer: GradientBuffer, now: int) -> None:
        """Accumulate one more contribution to a gradient, in place if nothing else references the buffer."""
        buffer.claims += 1
        before = self.waiting.get(node)
        if before is None:
            self.waiting[node] = buffer
            return
        self._release(buffer, now)
        if before.claims > 1:
            self._release(before, now)
            self.waiting[node] = total = self._new([node], now)
            total.claims = 1

    def _release(self, buffer: GradientBuffer, now: int) -> None:
        buffer.claims -= 1
        buffer.stop = max(buffer.stop, now)
