"""Which values a plan recomputes or offloads, so that ops on views of them must be recomputed too."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.analysis.recomputability import is_alias, may_copy
from autopar.ir.layout import Layout
from autopar.ir.program import Op, Program
from autopar.operators import view_of
from autopar.search_space.assignment import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedValues:
    """Which values of one program are recomputed under one assignment."""

    program: Program
    assignment: Assignment

    def repeats(self, op: Op) -> bool:
        """Whether an op is called so that the backward can repeat it.

        That is if the plan recomputes it, or if it views or, depending on strides, copies a recomputed value: otherwise a copy
        of that value would be saved.
        """
        views = may_copy(op) and view_of(op, self.program.values)
        return op.name in self.assignment.recompute.ops or (views and self._first_operand(op))

    def _first_operand(self, op: Op) -> bool:
        return self._value(op.operands[0], self.assignment.ops[op.name].operands[0])

    def _value(self, name: str, layout: Layout) -> bool:
        """Whether a value in a layout is recomputed or offloaded, or views one that is."""
        recompute = self.assignment.recompute
        if (name, layout) in recompute.offload:
            return True
        for step in self.assignment.routes.get(name, ()):
            if step.target == layout:
                return (is_alias(step) and self._value(name, step.source)) or (name, step) in recompute.steps
        op = self.program.producer.get(name)
        if op is None:
            return False
        return op.name in recompute.ops or (view_of(op, self.program.values) and self._first_operand(op))
