"""Buckets: weights, or their copies in another dtype, whose conversions travel in one message: its latency is paid once.

    h.0.ln.weight  h.0.ln.bias  h.0.fc.weight  h.0.fc.bias      all_gather, 4 values
    h.1.ln.weight  h.1.ln.bias  h.1.fc.weight  h.1.fc.bias      all_gather, 4 values
    ln.weight  ln.bias  head.weight                             all_gather, 3 values

Which weights may share a bucket: `autopar.analysis.weight_buckets`. Gathered weights take memory from the first use of a bucket
to its last, so a bucket stays within a block. If only gradients travel, blocks share a bucket. Weights gathered again for the
backward and weights kept until then are in different buckets. A step that shares no message is a bucket of its own.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

from autopar.analysis.weight_buckets import weight_buckets
from autopar.ir.conversion import FROM_DEVICE, TO_DEVICE, Conversion
from autopar.ir.layout import Layout, R
from autopar.ir.program import Program

# What is one message for a whole bucket, sent while the program computes: of its values (again, too), and of their gradients.
TOGETHER = (frozenset({"all_gather", *TO_DEVICE}), frozenset({"all_reduce", "reduce_scatter", *FROM_DEVICE}))
LONGEST = 1000  # steps of a route, and more


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One conversion step of several weights: `steps` has each weight's, all on one axis between the same two kinds of state.

    The axis is one of the mesh or a flattened one.
    A bucket begins after all buckets of the same weights with a lower `level`. Unless the weights have `moved`, only their
    gradients travel, after accumulation over micro-batches.
    """

    level: int
    steps: tuple[tuple[str, Conversion], ...]
    moved: bool = True

    @property
    def axis(self) -> int:
        return self.steps[0][1].axis

    @property
    def primitives(self) -> tuple[str, str]:
        """What happens to the values, and to their gradients."""
        return self.steps[0][1].primitives


def bucketed(
    program: Program, routes: Mapping[str, tuple[Conversion, ...]], recompute: Set[tuple[str, Conversion]]
) -> tuple[Bucket, ...]:
    """The conversions of weights as they travel, in the order of their weights' first use, each after those before it.

    `recompute` has those repeated in the backward.
    """
    found: dict[tuple[int, bool, object], list[tuple[str, Conversion]]] = defaultdict(list)
    for moved in (True, False):
        for number, names in enumerate(weight_buckets(program, moved=moved)):
            for name in names:
                for step in routes.get(name, ()):
                    if _moved(routes[name], step) == moved:
                        level = _level(routes[name], step)
                        alone = "" if _together(step) else name
                        key = level, moved, (number, step.axis, step.primitives, (name, step) in recompute, alone)
                        found[key].append((name, step))
    first = {name: place for place, name in enumerate(name for names in weight_buckets(program, moved=True) for name in names)}
    result = [Bucket(level=key[0], steps=tuple(steps), moved=key[1]) for key, steps in found.items()]
    return tuple(sorted(result, key=lambda one: (first[one.steps[0][0]], one.level)))


def shared(layout: Layout) -> int:
    """The number of axes on which ranks hold the same value, each with its part of the gradient."""
    return layout.count(R)


def moves(step: Conversion) -> bool:
    """Whether the value itself changes on some rank, not only its gradient."""
    return step.primitives[0] != "identity"


def _together(step: Conversion) -> bool:
    """Whether weights, or their gradients, share a message for this step."""
    return any(primitive in kinds for primitive, kinds in zip(step.primitives, TOGETHER, strict=True))


def _moved(route: tuple[Conversion, ...], step: Conversion) -> bool:
    """Whether a step of a route, or one that leads to it, moves the value."""
    before = _before(route, step.source)
    return moves(step) or (before is not None and _moved(route, before))


def _level(route: tuple[Conversion, ...], step: Conversion) -> int:
    """If only gradients travel the first axis of a step, else a later level, counted by the steps before it.

    So weights meet on an axis even if one of them skips earlier axes. Steps without a shared message lie in between, and do not
    shift the others: weights meet even if one of them is cut, or padded, before it is gathered, and another one after.
    """
    before, chain = _before(route, step.source), [step]
    while before is not None:
        chain.append(before)
        before = _before(route, before.source)
    if not any(map(moves, chain)) and all(later.axes[0] > sooner.axes[-1] for later, sooner in itertools.pairwise(chain)):
        return step.axes[0]
    sent = [place for place, one in enumerate(chain) if _together(one)]  # of the steps from this one back
    return len(step.source) + LONGEST * len(sent) + (sent[0] if sent else len(chain))


def _before(route: tuple[Conversion, ...], layout: Layout) -> Conversion | None:
    return next((step for step in route if step.target == layout), None)
