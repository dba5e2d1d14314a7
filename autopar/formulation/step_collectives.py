"""The messages of a step: every collective issued, with a bucket's weights in one.

Collectives between ops belong to conversions; those inside of ops are sent by distributed forms.

Each micro-batch issues its own, except that accumulated gradients are sent once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import torch

from autopar.analysis.analysis import Analysis
from autopar.formulation.prices import Prices
from autopar.ir.conversion import CARRIED, SUMS, Conversion, arrival
from autopar.ir.device import Bytes, Seconds
from autopar.ir.layout import Layout, local_shape
from autopar.ir.program import Op, Value
from autopar.memory.recompute_closure import reruns
from autopar.operators import OpSharding
from autopar.operators.call import Call, Local
from autopar.search_space.assignment import Assignment, RecomputeChoice, backward_conversions
from autopar.search_space.buckets import TOGETHER, Bucket, bucketed
from autopar.search_space.candidates import Candidate, distributed, parts_of

Phase = Literal["forward", "backward", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective on an axis, of the mesh or flattened, for one or several values; `bytes` is its larger buffer on one rank.

    In the phase "recompute", which is part of the backward, it repeats one of the forward. It is sent `once` per step, or in
    each micro-batch.
    """

    values: tuple[str, ...]
    axis: int
    kind: str
    phase: Phase
    bytes: Bytes
    seconds: Seconds
    once: bool = False

    @property
    def where(self) -> str:
        """The pass that sends it: "forward" or "backward"."""
        return "forward" if self.phase == "forward" else "backward"


def messages(analysis: Analysis, chosen: Assignment, prices: Prices) -> Iterator[Message]:
    """Every collective of one step, forward and backward."""
    rerun = reruns(analysis, chosen)
    for _, message in conversion_messages(analysis, chosen, prices, rerun):
        yield message
    for _, message in (*op_messages(analysis, chosen, prices, rerun), *input_messages(analysis, chosen, prices)):
        yield message


def conversion_messages(
    analysis: Analysis, chosen: Assignment, prices: Prices, rerun: RecomputeChoice
) -> Iterator[tuple[tuple[str, Conversion], Message]]:
    """The collectives of conversions, each with the first conversion that it serves; no candidate pays for these."""
    runs = analysis.step.microbatches
    alone = [
        Bucket(level=0, steps=((name, step),))
        for name, steps in chosen.routes.items()
        if name not in analysis.bucketed
        for step in steps
    ]
    for bucket in (*bucketed(analysis.program, chosen.routes, chosen.recompute.steps), *alone):
        back = [(name, step) for name, step in bucket.steps if step in backward_conversions(analysis, chosen, name)]
        recompute = [pair for pair in bucket.steps if pair in rerun.steps]
        forward, backward = bucket.primitives
        once = not bucket.moved or (chosen.once and bucket not in alone)
        passes: tuple[tuple[Phase, str, Sequence[tuple[str, Conversion]], Set[str]], ...] = (
            ("forward", forward, bucket.steps, TOGETHER[0]),
            ("backward", backward, back, TOGETHER[1]),
            ("recompute", forward, recompute, TOGETHER[0]),
        )
        for phase, kind, steps, kinds in passes:
            together = [steps] if kind in kinds and steps else [[one] for one in steps]
            for sent in together if kind in CARRIED else ():
                message = _message(analysis, prices, kind, phase, sent, once=once)
                yield from repeat((sent[0], message), 1 if once else runs)


def op_messages(
    analysis: Analysis, chosen: Assignment, prices: Prices, rerun: RecomputeChoice
) -> Iterator[tuple[str, Message]]:
    """The collectives inside ops in a distributed form, each with its op, whose candidate pays for it."""
    program = analysis.program
    for op in program.ops:
        candidate = chosen.ops[op.name]
        differentiated = any(result.name in analysis.backward for result in op.results)
        phases: list[Phase] = ["forward"]
        phases += ["backward"] * differentiated
        phases += ["recompute"] * (op.name in rerun.ops)
        for phase in phases:
            for message in inside(op, analysis.fits[op.name], candidate, program.values, prices, phase):
                yield from repeat((op.name, message), analysis.step.microbatches)


def input_messages(analysis: Analysis, chosen: Assignment, prices: Prices) -> Iterator[tuple[str, Message]]:
    """The collectives that make the gradients of inputs whole, each with its input, whose candidate pays for it."""
    for value in analysis.program.inputs:
        for message in returns(analysis, value, chosen.given[value.name], prices):
            yield from repeat((value.name, message), analysis.step.microbatches)


def inside(
    op: Op, fitted: OpSharding | None, candidate: Candidate, values: Mapping[str, Value], prices: Prices, phase: Phase
) -> Iterator[Message]:
    """The collectives that an op sends in one run of a phase."""
    own = distributed(fitted, candidate)
    if own is None or fitted is None:
        return
    axis, form = own
    sizes = prices.mesh.sizes
    operands = [local_shape(values[name].shape, x, sizes) for name, x in zip(op.operands, candidate.operands, strict=True)]
    results = [local_shape(r.shape, x, sizes) for r, x in zip(op.results, candidate.results, strict=True)]
    call, dtype = Call.of(op), values[op.operands[0]].dtype
    local = Local(fitted=fitted, operands=operands, results=results, parts=parts_of(fitted, candidate, sizes))
    for sent in form.backward if phase == "backward" else form.forward:
        size = sent.elements(call, local) * max(dtype.itemsize, torch.float32.itemsize if sent.wide else 1)
        seconds = prices.collective(sent.kind, size, axis)
        names = (op.results[0].name,)
        message = Message(values=names, axis=axis, kind=sent.kind, phase=phase, bytes=size, seconds=seconds)
        yield from repeat(message, sent.times(call, local, sizes[axis]))


def returns(analysis: Analysis, value: Value, layout: Layout, prices: Prices) -> Iterator[Message]:
    """The collectives that make the gradient of a split input whole in one run, if the user wants that gradient."""
    if value.name in analysis.backward and value.name not in analysis.step.received:
        for step in arrival(layout):
            yield _message(analysis, prices, step.primitives[1], "backward", [(value.name, step)])


def _message(
    analysis: Analysis, prices: Prices, kind: str, phase: Phase, sent: Sequence[tuple[str, Conversion]], *, once: bool = False
) -> Message:
    names, steps = zip(*sent, strict=True)
    axis = steps[0].axis
    values = [analysis.program.values[name] for name in names]
    sums = analysis.reduce_dtypes if phase == "backward" and kind in SUMS else {}
    dtypes = [sums.get(value.name, value.dtype) for value in values]
    size = sum(
        step.collective_bytes(value.shape, dtype.itemsize, prices.mesh.sizes)
        for value, dtype, step in zip(values, dtypes, steps, strict=True)
    )
    return Message(
        values=names,
        axis=axis,
        kind=kind,
        phase=phase,
        bytes=size,
        seconds=prices.collective(kind, size, axis),
        once=once,
    )
