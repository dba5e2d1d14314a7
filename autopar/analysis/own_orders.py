"""Finds ops that may run on each rank's own rows in their own order, from how the program uses the values that it sorts.

A forward pass over the ops: the row of each op says how it transforms the facts about its operands (`own_order`). An op whose
row says nothing either treats rows one by one, or ends the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.ir.program import Op, Program
from autopar.operators import OpSharding, OwnRows, row_of, view_of
from autopar.operators.call import Call
from autopar.operators.facts import OpKind
from autopar.operators.own_order import PLACES, OrderCall, OrderFact, OwnFound, cast, each_row, exact, sort

SAME = (OpKind.SAME, OpKind.CAST)


def own_rows(program: Program, fit_of: Callable[[Op], OpSharding | None]) -> Mapping[str, OwnRows]:
    """How ops run on each rank's own rows, by op name; `fit_of` returns the factors of an op."""
    if not any(row_of(op).own_order is sort for op in program.ops):
        return {}
    known, found = _Known(program), dict[str, OwnRows]()
    for op in program.ops:
        fitted = fit_of(op)
        made = known.follow(op, fitted) if fitted else None
        if made:
            found[op.name] = made.rows
    return found


class _Known:
    """The facts about values so far."""

    def __init__(self, program: Program) -> None:
        self.values = program.values
        self.facts: dict[str, OrderFact] = {}
        self.places: set[str] = set()  # values that are integers from 0 on
        self.of: dict[str, str] = {}  # value -> the value that it copies in another dtype

    def follow(self, op: Op, fitted: OpSharding) -> OwnFound | None:
        """How an op runs on own rows, if it does; records the facts about its results."""
        row, first = row_of(op), op.results[0]
        call = OrderCall(
            call=Call.of(op, self.values),
            facts=[self.facts.get(name) for name in op.operands],
            keys=[self.of.get(name, name) for name in op.operands],
            whole=[name in self.places for name in op.operands],
        )
        found = row.own_order(call) if row.own_order else None
        if found is None and any(call.facts):
            found = (cast(call) if row.kind in SAME else None) or each_row(call, fitted, same=row.kind in SAME)
        for result, fact in zip(op.results, found.facts if found else (), strict=found is not None):
            if fact:
                self.facts[result.name] = fact
        if op.target in PLACES:
            self.places.add(op.results[PLACES[op.target]].name)
        if op.operands and exact(first.dtype):
            source = op.operands[0]
            if source in self.places and (row.kind in SAME or view_of(op, self.values)):
                self.places.update(result.name for result in op.results)
            if row.kind in SAME:
                self.of[first.name] = self.of.get(source, source)
        return found


__all__ = ["own_rows"]
