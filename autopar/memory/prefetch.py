"""Prefetch order: when the all-gather of each bucket of weights is issued.

    all-gather of block 0, wait, all-gather of block 1, compute block 0, wait, all-gather of block 2, compute block 1, ...

A bucket's all-gather is issued when the one before it has arrived, so that it overlaps with the block that uses those weights.
If weights are gathered over several axes in turn, every axis runs one block ahead of the next in the forward: while block 0
computes, block 1 is gathered over the last axis, and block 2 over the one before. Weights on the host are fetched in the same
way, before they are gathered. Emitted code, memory and prices follow the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autopar.analysis.weights import copies
from autopar.ir.conversion import Conversion
from autopar.ir.layout import Layout
from autopar.ir.program import Program
from autopar.search_space.assignment import Assignment
from autopar.search_space.buckets import TOGETHER, Bucket, bucketed, moves

Node = tuple[str, Layout]  # a value in a layout


class PrefetchOrder:
    """The buckets of a plan in the order of their weights' first use.

    `first` are issued at the top of the forward: buckets that communicate only in the backward, so that the backward waits for
    their gradients last, and all buckets if micro-batches share the gathered weights. Otherwise a gather is issued when the
    one of its level before it has arrived (`after`), which overlaps it with one block. `arrives` is the bucket that brings a
    value into a layout, `into` the conversion that does.
    """

    def __init__(self, program: Program, chosen: Assignment) -> None:
        self.buckets = bucketed(program, chosen.routes, chosen.recompute.steps)
        self.arrives: Mapping[Node, Bucket] = {(name, step.target): one for one in self.buckets for name, step in one.steps}
        self.into: Mapping[Node, Conversion] = {(n, s.target): s for n, route in chosen.routes.items() for s in route}
        self._late = {name for name in copies(program) if program.producer[name].name in chosen.recompute.ops}
        self.first = [
            one for one in sorted(self.buckets, key=lambda one: one.level)
            if chosen.once or all(self._unmoved((name, step.target)) for name, step in one.steps)
        ]  # fmt: skip
        self.after = {} if chosen.once else self._after(program)

    def _unmoved(self, node: Node) -> bool:
        """Whether a weight reaches this layout without communication in the forward, stored or cast, so that only its gradient
        moves.

        False for a cast that is recomputed in the backward: it is freed after use, so it must not be made early.
        """
        step = self.into.get(node)
        if step is None:
            return node[0] not in self._late
        return not moves(step) and self._unmoved((node[0], step.source))

    def _after(self, program: Program) -> Mapping[Bucket, list[Bucket]]:
        """The gathers to issue when each gather arrives, and the fetches when a fetch does: the next ones of its level, one per
        dtype and axis, as each block has.
        """
        levels: dict[tuple[int, str], list[Bucket]] = defaultdict(list)
        for one in self.buckets:
            if one.primitives[0] in TOGETHER[0]:
                levels[one.level, one.primitives[0]].append(one)
        found: dict[Bucket, list[Bucket]] = {}
        for gathers in levels.values():
            kinds = {(program.values[one.steps[0][0]].dtype, one.axis) for one in gathers}
            found |= {one: gathers[place : place + len(kinds)] for place, one in enumerate(gathers, start=1)}
        return found
