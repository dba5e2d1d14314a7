"""When bundles are sent for: one order for the emitted code and for the schedule that its memory is told by."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from autopar.analysis.weights import copies
from autopar.ir.conversion import Conversion
from autopar.ir.layout import Layout
from autopar.ir.program import Program
from autopar.search_space.assignment import Assignment
from autopar.search_space.buckets import Bucket, bucketed, moves

Node = tuple[str, Layout]  # a value in a layout


class PrefetchOrder:
    """The bundles of a plan in the order of their weights' first use.

    Those that only gradients cause are sent for `first`, at the top, so that the backward waits for gradients last of all. A
    gather is sent for when the one before it has come (`after`), so that it is on its way for one block; at the top too if all
    micro-batches share it.
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
        """Whether a weight comes to a layout as it is stored or cast, and only its gradient is converted.

        Not what is cast again for the backward: it is dropped after its use, and not made long before it.
        """
        step = self.into.get(node)
        if step is None:
            return node[0] not in self._late
        return not moves(step) and self._unmoved((node[0], step.source))

    def _after(self, program: Program) -> Mapping[Bucket, list[Bucket]]:
        """For each gather those that follow: as many as there are dtypes (a block has a bundle of each), if they can begin."""
        gathers = [one for one in self.buckets if one.primitives[0] == "all_gather"]
        dtypes = {program.values[one.steps[0][0]].dtype for one in gathers}
        found: dict[Bucket, list[Bucket]] = {}
        for place, one in enumerate(gathers, start=1):
            following = itertools.islice(gathers, place, place + len(dtypes))
            found[one] = [other for i, other in enumerate(following) if i == 0 or not self._waits(other)]
        return found

    def _waits(self, one: Bucket) -> bool:
        """Whether a bundle starts from what another one brings."""
        return any((name, step.source) in self.arrives for name, step in one.steps)
