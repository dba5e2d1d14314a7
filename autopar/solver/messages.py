"""The messages of a step: every collective that is issued, with the weights of a bundle together in one.

Each micro-batch issues its own, but that gradients which have been added up are sent once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from autopar.conversion import COLLECTIVES, SUMS, Conversion, arrival
from autopar.cost_models.collectives import seconds as collective_seconds
from autopar.decisions import Decisions
from autopar.ir import Value
from autopar.layout import Layout
from autopar.mesh import Bytes, Mesh, Seconds
from autopar.passes.bundles import TOGETHER, Bundle, bundled
from autopar.solver.analysis import Analysis, due
from autopar.solver.reruns import reruns


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective on a mesh axis for one or several values; `bytes` is its larger buffer on one rank.

    `where` is "forward" or "backward".
    """

    values: tuple[str, ...]
    axis: int
    kind: str
    where: str
    bytes: Bytes
    seconds: Seconds


def messages(analysis: Analysis, chosen: Decisions, mesh: Mesh) -> Iterator[Message]:
    """Every collective of one step, forward and backward."""
    runs = analysis.program.runs
    alone = [
        Bundle(level=0, steps=((name, step),))
        for name, steps in chosen.routes.items()
        if name not in analysis.bundled
        for step in steps
    ]
    rerun = reruns(analysis, chosen).steps
    for bundle in (*bundled(analysis.program, chosen.routes, chosen.again.steps), *alone):
        back = [(name, step) for name, step in bundle.steps if step in due(analysis, chosen, name)]
        again = [pair for pair in bundle.steps if pair in rerun]
        forward, backward = bundle.primitives
        for where, kind, steps, kinds, gradient in (
            ("forward", forward, bundle.steps, TOGETHER[0], False),
            ("backward", backward, back, TOGETHER[1], True),
            ("backward", forward, again, TOGETHER[0], False),
        ):
            together = [steps] if kind in kinds and steps else [[one] for one in steps]
            for sent in together if kind in COLLECTIVES else ():
                message = _message(analysis, mesh, kind, where, sent, gradient=gradient)
                yield from repeat(message, runs if bundle.moved else 1)
    for value in analysis.program.inputs:
        for message in returns(analysis, value, chosen.given[value.name], mesh):
            yield from repeat(message, runs)


def returns(analysis: Analysis, value: Value, layout: Layout, mesh: Mesh) -> Iterator[Message]:
    """The collectives that make the gradient of an input whole again in one run, if the user wants one and takes it split."""
    if value.name in analysis.backward:
        for step in arrival(layout):
            yield _message(analysis, mesh, step.primitives[1], "backward", [(value.name, step)])


def _message(
    analysis: Analysis, mesh: Mesh, kind: str, where: str, sent: Sequence[tuple[str, Conversion]], *, gradient: bool = True
) -> Message:
    names, steps = zip(*sent, strict=True)
    axis = steps[0].axis
    values = [analysis.program.values[name] for name in names]
    sums = analysis.summed if gradient and kind in SUMS else {}
    dtypes = [sums.get(value.name, value.dtype) for value in values]
    size = sum(
        step.collective_bytes(value.shape, dtype.itemsize, mesh.sizes)
        for value, dtype, step in zip(values, dtypes, steps, strict=True)
    )
    seconds = float(collective_seconds(kind, float(size), mesh.sizes[axis], mesh.links[axis]))
    return Message(values=names, axis=axis, kind=kind, where=where, bytes=size, seconds=seconds)
