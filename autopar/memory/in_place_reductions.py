"""Which conversions all-reduce in place, as hand-written tensor parallelism does, without a copy or a second tensor.

y = linear(x, w)      partial: the sum over ranks may be written to y if nothing else reads y, as autograd keeps no product
z = linear(r, w)      r replicated, with an all-reduced gradient: if products alone read r, they made that gradient for it

Views are followed. Values that are recomputed or on the host are left alone: the runtimes of both identify tensors by storage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from autopar.analysis.weights import weights
from autopar.ir.conversion import Conversion
from autopar.ir.layout import Layout
from autopar.ir.program import Op, Program
from autopar.memory.prefetch import Node
from autopar.operators import OpSharding, row_of
from autopar.operators.facts import Alias
from autopar.search_space.assignment import Assignment
from autopar.search_space.candidates import distributed

ALL_REDUCE = "all_reduce"


def reduced_in_place(
    program: Program, chosen: Assignment, fits: Mapping[str, OpSharding | None]
) -> frozenset[tuple[str, Conversion]]:
    """The conversions, each with its value, whose all-reduces write into their input: the value, its gradient, or both; `fits`
    holds the rule of every op.
    """
    made = (name for name in chosen.routes if name in program.producer)
    named = [name for name in made if any(ALL_REDUCE in step.primitives for step in chosen.routes[name])]
    if not named:
        return frozenset()
    owners = _Owners(program, chosen, fits)
    return frozenset((name, step) for name in named if name not in owners.kept for step in owners.reduced(name))


class _Owners:
    """Which tensors are referenced only by their reader."""

    def __init__(self, program: Program, chosen: Assignment, fits: Mapping[str, OpSharding | None]) -> None:
        self.program, self.chosen, self.fits = program, chosen, fits
        self.kept = weights(program) | {name for name, _ in chosen.recompute.offload}
        self.readers: dict[Node, list[tuple[Op, int]]] = defaultdict(list)
        for op in program.ops:
            for position, node in enumerate(zip(op.operands, chosen.ops[op.name].operands, strict=True)):
                self.readers[node].append((op, position))
        self.begun = Counter((name, step.source) for name, route in chosen.routes.items() for step in route)
        self.ends = {(output.value, chosen.outputs[output.path]) for output in program.outputs}

    def reduced(self, name: str) -> Iterator[Conversion]:
        """The conversions of a value that reduce in place."""
        new = {self.chosen.produced(name, self.program)} if self._is_new(name) else set[Layout]()
        for step in self.chosen.routes[name]:
            forward, backward = step.primitives
            source, target = (name, step.source), (name, step.target)
            read = source in self.readers or source in self.ends or self.begun[source] > 1
            there = forward != ALL_REDUCE or (step.source in new and not read)
            back = backward != ALL_REDUCE or self._has_new_gradient(target)
            if (name, step) in self.chosen.recompute.steps:
                continue
            if there and back and ALL_REDUCE in step.primitives:
                yield step
            if forward == ALL_REDUCE:
                new.add(step.target)

    def _is_new(self, name: str) -> bool:
        """Whether a value is produced by a product, or is a view of one that nothing else reads."""
        op = self.program.producer.get(name)
        if op is None or name in self.kept:
            return False
        if not self._is_view(op):
            return bool(self._multiplied(op))
        below = op.operands[0], self.chosen.ops[op.name].operands[0]
        alone = len(self.readers[below]) == 1 and below not in self.ends and not self.begun[below]
        return alone and below[1] == self.chosen.produced(below[0], self.program) and self._is_new(below[0])

    def _has_new_gradient(self, node: Node) -> bool:
        """Whether only products read a value in a layout, directly or through views."""
        if node in self.ends or self.begun[node] or node not in self.readers:
            return False
        for op, position in self.readers[node]:
            if self._is_view(op):
                viewed = op.results[0].name, self.chosen.ops[op.name].results[0]
                if position or not self._has_new_gradient(viewed):
                    return False
            elif position not in self._multiplied(op):
                return False
        return True

    def _is_view(self, op: Op) -> bool:
        """Whether an op returns one view of its first operand, or a copy, and runs once."""
        return row_of(op).alias is not Alias.NEVER and not op.several and op.name not in self.chosen.recompute.ops

    def _multiplied(self, op: Op) -> frozenset[int]:
        """The positions of the operands that a product multiplies, if it runs once, by torch's own operator: its result and
        their gradients are new tensors. An added operand shares the result's gradient.
        """
        fitted = self.fits[op.name]
        if fitted is None or not row_of(op).contracts or op.several or op.name in self.chosen.recompute.ops:
            return frozenset()
        if distributed(fitted, self.chosen.ops[op.name]):
            return frozenset()
        kept = {factor for dim in fitted.results[0] for factor in dim}
        found = frozenset(n for n, dims in enumerate(fitted.operands) if any(f not in kept for dim in dims for f in dim))
        return found if len(found) > 1 else frozenset()


__all__ = ["reduced_in_place"]
