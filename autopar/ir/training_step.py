"""A training step, as made from a program: its loop over micro-batches, its padded dims, its place in a pipeline.

    step    := program, loop?, padding, stage?
    loop    := count, hoisted program?, a state over the micro-batches for every input and output
    padding := (value name, unpadded shape) ...
    stage   := (value name, layout) ... that are received, whether outputs are sent, samples of a micro-batch, random ops before

A step with a loop has the program of one micro-batch and runs it several times, on one part of the batch after the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from autopar.ir.device import Link
from autopar.ir.layout import I, Layout, Shape, State
from autopar.ir.program import Program, Value, digest


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchLoop:
    """How a step is composed of runs of a program, one per micro-batch: like a mesh axis of `count` devices, but in time.

    `hoisted` computes once per step, from the inputs of the whole batch, values that every micro-batch needs (the number of
    targets, say); they are the program's last inputs. Over the micro-batches an input is split, or whole (I); an output is
    split, a sum of addends (P), or the same (I).
    """

    count: int
    hoisted: Program | None
    inputs: tuple[State, ...]
    outputs: tuple[State, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMoment:
    """The micro-batches in flight during an action of a stage: those between their forward and the end of their backward, or of
    its half I; the others, `waiting` between I and W; and whether the action is an I."""

    flights: int
    waiting: int
    halves: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnds:
    """How a pipeline stage connects to its neighbours: what it has `received`, and whether it sends its outputs.

    Both sides hold a value in the same layout, on ranks of equal coordinates: its state determines each rank's part of the
    value and of the gradient, so parts cross a cut unchanged. `batch` is the number of samples in a micro-batch, and
    `random_ops` the number of random operators in earlier stages, so that this one draws the numbers that the whole program
    would; `flights` is the largest number of micro-batches that the schedule has between their forward and their backward here,
    each of which holds its kept values. It is the maximum over the schedule's `moments`, though some with backwards in halves
    hold more memory. To price the stage, what it sends goes over `link`, and the micro-batches count as `repeats` runs.
    """

    received: tuple[tuple[str, Layout], ...]
    sends: bool
    batch: int
    random_ops: int
    flights: int = 1
    moments: tuple[StageMoment, ...] = field(default=(), repr=False)  # each once; does not affect what the step is
    repeats: int = field(default=1, repr=False, compare=False)  # does not affect what the step is
    link: Link | None = field(default=None, repr=False, compare=False)  # nor does this


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A program as a step runs it: once, or in a loop over micro-batches; perhaps on padded values, or as a pipeline stage.

    `padding` lists the values that are longer than in the model, with their unpadded shapes: parameters, outputs, and others
    that tell the padding apart.
    """

    program: Program
    loop: MicrobatchLoop | None = None
    padding: tuple[tuple[str, Shape], ...] = ()
    stage: StageEnds | None = None

    @functools.cached_property
    def received(self) -> dict[str, Layout]:
        """The inputs received from the previous stage, each with its layout; other inputs arrive whole."""
        return dict(self.stage.received) if self.stage else {}

    @property
    def sends(self) -> bool:
        """Whether the outputs go to the next stage of a pipeline, each in any layout."""
        return self.stage is not None and self.stage.sends

    @property
    def flights(self) -> int:
        """The most micro-batches between their forward and their backward at a time."""
        return self.stage.flights if self.stage else 1

    @property
    def microbatches(self) -> int:
        """How often a step runs the program."""
        return self.loop.count if self.loop else 1

    @property
    def hoisted(self) -> tuple[Value, ...]:
        """The inputs that are computed once per step instead of given by the user."""
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
        """Hex digest of the structure; equals the program's own if the step neither pads nor loops."""
        text, loop = self.program.structure, self.loop
        text += f"\n{self.padding}" if self.padding else ""
        text += f"\n{self.stage}" if self.stage else ""
        if loop:
            text += f"\n{loop.count} {loop.inputs} {loop.outputs} {loop.hoisted.hash if loop.hoisted else ''}"
        return digest(text)


__all__ = ["MicrobatchLoop", "StageEnds", "StageMoment", "TrainingStep"]
