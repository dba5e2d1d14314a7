"""Assignments: everything that was chosen for a program, in terms of its ops and values.

An assignment is enough to price a plan, to simulate its memory and to emit its code. A `Plan` is the same as text, with costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.analysis.analysis import Analysis, has_gradient
from autopar.ir.conversion import Conversion
from autopar.ir.layout import Layout
from autopar.ir.program import OUTPUT, Program
from autopar.search_space.candidates import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeChoice:
    """What the backward recomputes or fetches from the host instead of keeping it on the device.

    `ops` run again when the backward needs one of their results or what autograd saves inside them, and so do the `steps` of a
    value's conversions. Their inputs are kept, or recomputed in turn, together with everything that shares their storage. The
    values in `offload` go to host memory in these layouts, and come back on demand.
    """

    ops: frozenset[str] = frozenset()
    steps: frozenset[tuple[str, Conversion]] = frozenset()
    offload: frozenset[tuple[str, Layout]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Assignment:
    """A candidate per op, a layout per given tensor and output, a route per value; and what the backward recomputes.

    `routes` lists the conversions of a value, each after the one whose target it starts from. Everything that autograd saves
    is kept, unless it is in `recompute`. If weights are gathered `once`, it is at the top, and micro-batches share them and
    add up whole gradients; else they are gathered where they are first used, in each.
    """

    ops: Mapping[str, Candidate]
    given: Mapping[str, Layout]  # inputs, parameters and buffers as they are taken or stored
    outputs: Mapping[str, Layout]  # by output path
    routes: Mapping[str, tuple[Conversion, ...]]
    recompute: RecomputeChoice = RecomputeChoice()
    once: bool = False

    @property
    def axes(self) -> set[int]:
        """The numbers of the axes, plain or flattened, on which values are converted."""
        return {step.axis for steps in self.routes.values() for step in steps}

    def produced(self, value: str, program: Program) -> Layout:
        """The layout in which the producer leaves a value."""
        op = program.producer.get(value)
        if op is None:
            return self.given[value]
        return self.ops[op.name].results[[r.name for r in op.results].index(value)]


def backward_conversions(analysis: Analysis, chosen: Assignment, name: str) -> set[Conversion]:
    """The conversions of a value that also convert its gradient."""
    into = {step.target: step for step in chosen.routes.get(name, ())}
    back: set[Conversion] = set()

    def walk(node: Layout) -> None:
        while node in into and into[node] not in back:
            back.add(into[node])
            node = into[node].source

    for op in analysis.readers[name]:
        for position, operand in enumerate(op.operands):
            if operand == name and has_gradient(analysis, name, op.name):
                walk(chosen.ops[op.name].operands[position])
    for output in analysis.program.outputs:
        if output.value == name and has_gradient(analysis, name, OUTPUT + output.path):
            walk(chosen.outputs[output.path])
    return back
