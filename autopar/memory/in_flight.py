"""Memory of a pipeline stage for other micro-batches in flight, or waiting for their weight gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autopar.analysis.deferrable import deferrable
from autopar.analysis.weights import weights
from autopar.ir.device import Bytes
from autopar.ir.program import Op, Program
from autopar.ir.training_step import StageMoment, TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The memory of a stage, independent of its schedule.

    With k micro-batches in flight, and w others whose gradients of weights are deferred, it holds
    at most max(`running` + (k - 1) `held` + w `deferred`, `ending`) bytes; `halving` replaces `running` during the half I of a
    backward, which frees less. `weights_held` is the part of `held` that is gathered weights.

    What `memory.rank_memory` counts action by action: for every parameter, buffer and input of the batch, in the program's
    order, the bytes that are `stored`, with optimizer state, their `gradients`, which are there from the first backward on, or
    from the first half W where that makes them (`made_later`), and what the optimizer steps (`stepped`); `shared` are weights
    that are gathered once. Beside these a `forward`, a `backward`
    or its half I (`halved`) take so many bytes at most, what the micro-batch holds included, and the `first` backward, or half
    (`first_half`), with the gradients that it makes; the half W takes `weights` beside what is deferred. What arrives for a
    micro-batch takes `received` bytes and what is sent `sent`, `beside` of these where the micro-batch still holds the others;
    gradients that are sent back take `returned`, those that come `back`.
    """

    running: Bytes
    ending: Bytes
    held: Bytes
    weights_held: Bytes
    halving: Bytes
    deferred: Bytes
    stored: tuple[Bytes, ...]
    gradients: tuple[Bytes, ...]
    made_later: tuple[bool, ...]
    stepped: tuple[Bytes, ...]
    shared: Bytes
    forward: Bytes
    backward: Bytes
    first: Bytes
    halved: Bytes
    first_half: Bytes
    weights: Bytes
    received: Bytes
    returned: Bytes
    sent: Bytes
    beside: Bytes
    back: Bytes

    @property
    def alone(self) -> Bytes:
        """The peak bytes with one micro-batch at a time."""
        return max(self.running, self.ending)

    def dropping(self, *, several: bool) -> StageMemory:
        """The memory of a stage that drops gathered weights, except those that the next action needs if micro-batches are
        always alone.
        """
        return replace(self, held=self.held - self.weights_held, weights_held=0) if several else self

    def peak(self, moments: Iterable[StageMoment]) -> Bytes:
        """The peak bytes over the moments of a schedule."""
        return max(self.ending, *map(self.alive, moments))

    def alive(self, now: StageMoment) -> Bytes:
        """The peak bytes at a moment."""
        own = self.halving if now.halves else self.running
        return own + (now.flights - 1) * self.held + now.waiting * self.deferred


def moments_of(step: TrainingStep) -> tuple[StageMoment, ...]:
    """The moments of a step's schedule; without stages or split backwards only the one with most micro-batches in flight."""
    known = step.stage.moments if step.stage else ()
    return known or (StageMoment(flights=step.flights, waiting=0, halves=False),)


def deferred_products(program: Program) -> Iterator[tuple[int, Op, str]]:
    """The products whose weight gradients may be deferred, in backward order, each with its index in the program and its
    activation.
    """
    later = deferrable(program)
    for place, op in reversed(list(enumerate(program.ops))):
        if op.name in later:
            yield place, op, later[op.name][0]


def deferred_weights(program: Program) -> frozenset[str]:
    """The weights, with their views and copies, whose gradients the halves W make: those that only products read."""
    later, known, readers = deferrable(program), weights(program), defaultdict[str, list[Op]](list)
    for op in program.ops:
        for name in op.operands:
            readers[name].append(op)

    def waits(name: str) -> bool:
        return all(made_later(op, name) for op in readers[name])

    def made_later(op: Op, name: str) -> bool:
        if op.name in later:
            return later[op.name][1] == name  # and not as its bias
        derived = [result.name for result in op.results if result.name in known]
        return bool(derived) and all(map(waits, derived))

    return frozenset(name for name in known if readers[name] and waits(name))


__all__ = ["StageMemory", "deferred_products", "deferred_weights", "moments_of"]
