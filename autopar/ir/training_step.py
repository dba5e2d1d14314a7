"""What a training step makes of a program: the loop over its micro-batches, and the dims that it pads.

    step    := program, loop?, padding
    loop    := count, hoisted program?, a state over the micro-batches for every input and output
    padding := (value name, unpadded shape) ...

A step with a loop has the program of one micro-batch and runs it several times, on one part of the batch after the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from autopar.ir.layout import I, Shape, State
from autopar.ir.program import Program, Value, digest


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchLoop:
    """How a step is made of the runs of a program, one per micro-batch: a mesh axis of `count` devices, run in time.

    `hoisted` computes once per step, from the inputs of the whole batch, what every micro-batch needs of it (the number of
    targets, say): the program's last inputs. Over the micro-batches an input is split, or whole (I); an output is split,
    addends (P), or the same (I).
    """

    count: int
    hoisted: Program | None
    inputs: tuple[State, ...]
    outputs: tuple[State, ...]


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A program as a step runs it: once, or in a loop over micro-batches; perhaps on padded values.

    `padding` has the values that are longer than in the model, with their unpadded shapes: parameters, outputs, and what else
    tells it.
    """

    program: Program
    loop: MicrobatchLoop | None = None
    padding: tuple[tuple[str, Shape], ...] = ()

    @property
    def microbatches(self) -> int:
        """How often a step runs the program."""
        return self.loop.count if self.loop else 1

    @property
    def hoisted(self) -> tuple[Value, ...]:
        """The inputs that are computed once per step, not given by the user."""
        hoisted = self.loop.hoisted if self.loop else None
        return self.program.inputs[len(hoisted.inputs) :] if hoisted else ()

    @functools.cached_property
    def states(self) -> dict[str, State]:
        """The state over the micro-batches of every input and output, by value."""
        ends = [*(value.name for value in self.program.inputs), *(output.value for output in self.program.outputs)]
        states = (*self.loop.inputs, *self.loop.outputs) if self.loop else (I,) * len(ends)
        return dict(zip(ends, states, strict=True))

    @functools.cached_property
    def unpadded(self) -> dict[str, Shape]:
        """The unpadded shapes of padded values."""
        return dict(self.padding)

    def batch_shape(self, name: str) -> Shape:
        """The shape of an input or output for the whole batch, without padding."""
        shape, state = self.unpadded.get(name, self.program.values[name].shape), self.states[name]
        return tuple(
            size * (self.microbatches if (state.kind, dim) == ("S", state.dim) else 1) for dim, size in enumerate(shape)
        )

    @functools.cached_property
    def hash(self) -> str:
        """Hex digest of the structure; the program's own for a step that neither pads nor loops."""
        text, loop = self.program.structure, self.loop
        text += f"\n{self.padding}" if self.padding else ""
        if loop:
            text += f"\n{loop.count} {loop.inputs} {loop.outputs} {loop.hoisted.hash if loop.hoisted else ''}"
        return digest(text)


__all__ = ["MicrobatchLoop", "TrainingStep"]
