"""Prices of candidates and conversions: seconds on one device, for the forward and the backward of a step.

op           roofline at local shapes (`cost_models.compute`)
parameter    its optimizer step
conversion   a collective by its link, a local primitive by the memory that it moves; its gradient likewise

All but the optimizer's step is paid for every micro-batch, and once what is `added_up` before it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from autopar.analysis.analysis import Analysis
from autopar.analysis.repeated_blocks import OUTPUT
from autopar.cost_models.collectives import seconds as collective_seconds
from autopar.cost_models.compute import pricer
from autopar.cost_models.optimizers import Optimizer, step_seconds
from autopar.ir.conversion import COLLECTIVES, CONVERSIONS, SUMS
from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import Device, Mesh
from autopar.ir.program import Op, Program, Value, elements
from autopar.operators import OpSharding
from autopar.search_space.buckets import TOGETHER
from autopar.search_space.candidates import Candidate, distributed
from autopar.search_space.layout_graph import LayoutGraph
from autopar.solver.problem import Floats, Ints


def choice_seconds(analysis: Analysis, name: str, found: Sequence[Candidate], optimizer: Optimizer, device: Device) -> Floats:
    """Seconds of each candidate of an op class, a given tensor or an output, all members together."""
    program, sizes = analysis.program, analysis.sizes
    count = len(analysis.classes.members[name])
    if name in program.op:
        op, fitted = program.op[name], analysis.fits[name]
        return program.runs * count * np.array(op_seconds(op, fitted, found, program.values, sizes, device))
    if name.startswith(OUTPUT):
        return np.zeros(len(found))
    value = program.values[name]
    local = [elements(local_shape(value.shape, c.results[0], sizes)) * value.dtype.itemsize for c in found]
    trained = name in {p.value.name for p in program.parameters} and value.requires_grad
    if name in {v.name for v in program.inputs}:
        return np.array([arrival_seconds(program, value, c.results[0], sizes, device) for c in found])
    return np.array([count * step_seconds(b, optimizer, device) if trained else 0.0 for b in local])


def recompute_seconds(analysis: Analysis, name: str, found: Sequence[Candidate], device: Device) -> Floats:
    """Seconds of the forward of an op class under each candidate, all members together."""
    program, sizes = analysis.program, analysis.sizes
    return (
        program.runs
        * len(analysis.classes.members[name])
        * np.array(op_seconds(program.op[name], analysis.fits[name], found, program.values, sizes, device, backward=False))
    )


def ties(analysis: Analysis, name: str, found: Sequence[Candidate]) -> Floats:
    """What decides among candidates of equal price: the bytes that one leaves on a rank, then how plain its layouts are."""
    left = _result_bytes(analysis, name, found)
    if name in analysis.program.op or name not in analysis.program.values:
        return left
    shape = analysis.program.values[name].shape
    return np.asarray(left * [1 + PLAIN * oddness(c.results[0], shape, analysis.sizes) for c in found])


PLAIN = 1e-2  # of the bytes, by which an odd layout loses against a plain one


def oddness(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    """How many axes split a dim otherwise than in contiguous chunks nested in mesh order; later dims count a little."""
    left, odd = list(shape), 0.0
    for axis, state in enumerate(layout):
        if state.kind == "S":
            left[state.dim] //= sizes[axis]
            odd += (state.stride != left[state.dim]) + state.dim / 8
    return odd


def _result_bytes(analysis: Analysis, name: str, found: Sequence[Candidate]) -> Floats:
    program = analysis.program
    values = program.op[name].results if name in program.op else [program.values[name]] if name in program.values else []
    return np.array(
        [
            float(
                sum(
                    elements(local_shape(v.shape, x, analysis.sizes)) * v.dtype.itemsize
                    for v, x in zip(values, c.results, strict=True)
                )
            )
            for c in found
        ]
    )


def arrival_seconds(program: Program, value: Value, layout: Layout, sizes: tuple[int, ...], device: Device) -> float:
    """Seconds of taking an input in every run; the first of those that are computed ahead stands for all of them."""
    seconds, loop = program.runs * slicing_seconds(value, layout, sizes, device), program.loop
    if loop and loop.ahead and value == program.ahead[0]:
        for op in loop.ahead.ops:
            shapes = [loop.ahead.values[name].shape for name in op.operands], [r.shape for r in op.results]
            seconds += pricer(op, loop.ahead.values, device).forward_seconds(*shapes)
    return seconds


def slicing_seconds(value: Value, layout: Layout, sizes: tuple[int, ...], device: Device) -> float:
    """Seconds of slicing a whole input, one axis after the other."""
    seconds, size = 0.0, value.bytes
    for axis, state in enumerate(layout):
        if state.kind == "S":
            size //= sizes[axis]
            seconds += max(2 * size / device.bandwidth, device.launch)
    return seconds


def op_seconds(
    op: Op,
    fitted: OpSharding | None,
    found: Sequence[Candidate],
    values: Mapping[str, Value],
    sizes: tuple[int, ...],
    device: Device,
    *,
    backward: bool = True,
) -> list[float]:
    """Forward and backward seconds of one op under each candidate; equal local shapes are priced once."""
    pricing = pricer(op, values, device)
    price = pricing if backward else pricing.forward_seconds
    shapes = [values[name].shape for name in op.operands], [r.shape for r in op.results]
    known: dict[tuple[object, object], float] = {}
    result = []
    for candidate in found:
        inside = tuple(local_shape(s, layout, sizes) for s, layout in zip(shapes[0], candidate.operands, strict=True))
        outside = tuple(local_shape(s, layout, sizes) for s, layout in zip(shapes[1], candidate.results, strict=True))
        if (inside, outside) not in known:
            known[inside, outside] = price(inside, outside)
        result.append(known[inside, outside] * work(fitted, candidate, sizes))
    return result


def work(fitted: OpSharding | None, candidate: Candidate, sizes: tuple[int, ...]) -> float:
    """What the busiest rank computes under a candidate, in ops of the local shapes."""
    own = distributed(fitted, candidate)
    return own[1].work(sizes[own[0]]) if own else 1.0


def arc_seconds(
    graph: LayoutGraph, value: Value, mesh: Mesh, *, bucketed: bool, summed: torch.dtype | None = None, runs: int = 1
) -> tuple[Floats, Floats, Floats]:
    """Per arc: seconds of the conversion, of its gradient, and of its collective alone if it is run again, in all runs.

    `bucketed` if the value travels with others: the latency that it shares with them is a toll (`formulate`). `summed` is the
    dtype in which gradients are added up, if not the value's.
    """
    size = value.dtype.itemsize
    large = np.maximum(graph.elements[graph.source], graph.elements[graph.target]) * size
    small = np.minimum(graph.elements[graph.source], graph.elements[graph.target]) * size
    wider = summed.itemsize // size if summed else 1
    there, back, rerun = np.zeros((3, len(large)))
    for number, (forward, backward) in enumerate(CONVERSIONS.values()):
        for axis in range(len(mesh.sizes)):
            here = np.flatnonzero((graph.pair == number) & (graph.axis == axis))
            there[here] = primitive_seconds(forward, large[here], small[here], axis, mesh)
            times = wider if backward in SUMS else 1
            back[here] = primitive_seconds(backward, times * large[here], times * small[here], axis, mesh)
            if wider > 1 and backward == WHOLE_SUM:
                back[here] += rounding_seconds(large[here], wider, mesh)
            if bucketed:
                there[here] -= latency(forward, axis, mesh) if forward in TOGETHER[0] else 0.0
                back[here] -= latency(backward, axis, mesh) if backward in TOGETHER[1] else 0.0
            if forward in COLLECTIVES:
                rerun[here] = there[here]
            back[here] *= 1 if bucketed and added_up(forward, backward) else runs
    return runs * there, back, runs * rerun


def added_up(forward: str, backward: str) -> bool:
    """Whether micro-batches add up a weight's gradients before this conversion sends them: it leaves the weight as it is.

    If the weight has moved over another axis before, each sends its own. To move last is cheaper, unless a gather is shared,
    and the integer program does not tell the two apart.
    """
    return (forward, backward) == ("identity", "all_reduce")


def primitive_seconds(primitive: str, large: Ints, small: Ints, axis: int, mesh: Mesh) -> Floats:
    """A collective by its link; a local primitive by the memory that it moves (slice: part read and written; pad: whole)."""
    if primitive in COLLECTIVES:
        return np.asarray(collective_seconds(primitive, large.astype(np.float64), mesh.sizes[axis], mesh.links[axis]))
    if primitive == "identity":
        return np.zeros(len(large))
    assert mesh.device is not None
    moved = 2 * small if primitive == "slice" else small + large
    return np.maximum(moved / mesh.device.bandwidth, mesh.device.launch)


WHOLE_SUM = "all_reduce"  # what comes back from the other sum is a shard, which is rounded in no time


def rounding_seconds(size: Ints, wider: int, mesh: Mesh) -> Floats:
    """Seconds in which sums are rounded to a dtype so many times narrower, in which they are of this size."""
    assert mesh.device is not None
    return np.maximum((1 + wider) * size / mesh.device.bandwidth, mesh.device.launch)


def latency(kind: str, axis: int, mesh: Mesh) -> float:
    """Seconds of a collective that sends nothing."""
    return float(collective_seconds(kind, 0.0, mesh.sizes[axis], mesh.links[axis]))
