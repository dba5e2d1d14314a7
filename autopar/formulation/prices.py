"""Prices of candidates and conversions: seconds on one device, for the forward and the backward of a step.

op           its cost at local shapes
parameter    its optimizer step
conversion   a collective by its link, a local primitive by the memory that it moves; the same for its gradient

Everything is paid per micro-batch, except the optimizer's step and gradients that are `added_up` before they are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from autopar.analysis.analysis import Analysis
from autopar.cost_models.cost_model import CATALOG, CostModel, OpCost
from autopar.cost_models.optimizers import OPTIMIZERS, Optimizer
from autopar.ir.conversion import CARRIED, COPIES, SUMS, WAYS, copies
from autopar.ir.device import Device, Seconds
from autopar.ir.layout import D, H, I, Layout, State, local_shape, place
from autopar.ir.mesh import Mesh
from autopar.ir.program import OUTPUT, Op, Value
from autopar.ir.training_step import TrainingStep
from autopar.operators import OpSharding
from autopar.search_space.buckets import TOGETHER
from autopar.search_space.candidates import Candidate, distributed
from autopar.search_space.layout_graph import LayoutGraph
from autopar.solver.problem import Bools, Floats, Ints

LARGE = 1e12  # bytes of a copy beside which its launch is nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A cost model applied to a mesh with device and links, and an optimizer."""

    mesh: Mesh
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    model: CostModel = CATALOG

    @property
    def device(self) -> Device:
        """The device that runs the ops."""
        assert self.mesh.device is not None, "a mesh is priced with its device"
        return self.mesh.device

    def op(self, op: Op, values: Mapping[str, Value]) -> OpCost:
        """The cost of an op as a function of its local shapes."""
        return self.model.op_cost(op, values, self.device)

    def collectives(self, kind: str, sizes: Floats, axis: int) -> Floats:
        """Seconds of a collective over an axis, of the mesh or flattened, or of a copy between memories, for buffers of so many
        bytes."""
        if kind in COPIES:
            return np.array([self.copy(kind, size) for size in sizes.tolist()])
        return np.asarray(self.model.collective_seconds(kind, sizes, self.mesh.ranks_over(axis), self.mesh.link_over(axis)))

    def collective(self, kind: str, size: float, axis: int) -> Seconds:
        """Seconds of one collective over a mesh axis, for a buffer of so many bytes."""
        return float(self.collectives(kind, np.array([size], dtype=np.float64), axis)[0])

    def latency(self, kind: str, axis: int) -> Seconds:
        """Seconds of an empty collective."""
        return self.collective(kind, 0.0, axis)

    def primitive(self, primitive: str, large: Ints, small: Ints, axis: int) -> Floats:
        """Seconds of a primitive: of its message on a link, or of the memory that it moves locally (slice: part read and
        written; pad: whole).
        """
        if primitive in CARRIED:
            return self.collectives(primitive, large.astype(np.float64), axis)
        if primitive == "identity":
            return np.zeros(len(large))
        return self.model.copy_seconds((2 * small if primitive == "slice" else small + large).astype(np.float64), self.device)

    def unpacking(self, primitive: str, large: Ints, small: Ints, scattered: Bools, *, bucketed: bool) -> Floats:
        """Seconds of the device's copies for a conversion's messages; `scattered` has the two columns before and after it. For
        a gathered bucket, shards are copied into its buffer, and whole weights out of it.
        """
        apart = self._copies(primitive, large, scattered)
        return self._together(2 * (small + large)) + apart if bucketed and primitive == "all_gather" else apart

    def packing(self, primitive: str, large: Ints, small: Ints, scattered: Bools, *, bucketed: bool, wider: int = 1) -> Floats:
        """Seconds to copy the gradients that a conversion sends back, in a dtype so many times wider, and to round the results;
        `scattered` has the columns before and after that. For a bucket one kernel joins all gradients, and one widens those
        that are all-reduced.
        """
        rounded = (1 + wider) * (wider > 1)
        apart = self._copies(primitive, large * (wider if primitive in SUMS else 1), scattered)
        if bucketed and primitive == "reduce_scatter":
            return self._together((1 + wider) * large + rounded * small) + (apart if wider == 1 else 0.0)
        return self._together((2 + 2 * rounded) * large) if bucketed and primitive == "all_reduce" else apart

    def _together(self, moved: Ints) -> Floats:
        """Seconds of a copy within a bucket's copy, which has no launch of its own."""
        return self.model.copy_seconds(np.array([LARGE]), self.device) / LARGE * moved

    def _copies(self, primitive: str, large: Ints, scattered: Bools) -> Floats:
        """Seconds of the copies of a message outside of any bucket."""
        times = np.array([copies(primitive, before=before, after=after) for before, after in scattered.tolist()])
        return np.where(times > 0, times * self.model.copy_seconds((2 * large).astype(np.float64), self.device), 0.0)

    def offload(self, size: float) -> Seconds:
        """Seconds of moving bytes to host memory and back."""
        return self.model.offload_seconds(size, self.device)

    def copy(self, kind: str, size: float) -> Seconds:
        """Seconds of a copy of so many bytes between the device and its host, or between the device and the disk."""
        if kind in ("read", "write"):
            return self.model.disk_seconds(size * (kind == "read"), size * (kind == "write"), self.device)
        return self.offload(size) / 2

    def optimizer_step(self, stored: float, there: State = I) -> Seconds:
        """Seconds of one optimizer step over so many bytes of a parameter that one device stores, or the host (H) or disk (D).

        On the disk gradient, parameter and state are read, and parameter and state are written.
        """
        if there == H:
            return self.model.host_optimizer_seconds(stored, self.optimizer, self.device)
        if there == D:
            kept = 1 + self.optimizer.states
            return self.model.disk_seconds((1 + kept) * stored, kept * stored, self.device)
        return self.model.optimizer_seconds(stored, self.optimizer, self.device)

    def slicing(self, value: Value, layout: Layout) -> Seconds:
        """Seconds of slicing a whole input, one axis after the other."""
        seconds, size = 0.0, value.bytes
        for axis, state in enumerate(layout):
            if state.kind == "S":
                size //= self.mesh.sizes[axis]
                seconds += float(self.model.copy_seconds(np.array([2.0 * size]), self.device)[0])
        return seconds

    def arrival(self, step: TrainingStep, value: Value, layout: Layout) -> Seconds:
        """Seconds to receive an input in every micro-batch; the first hoisted one pays for all of them."""
        if value.name in step.received:
            return 0.0
        seconds, loop = step.microbatches * self.slicing(value, layout), step.loop
        if loop and loop.hoisted and value == step.hoisted[0]:
            for op in loop.hoisted.ops:
                shapes = [loop.hoisted.values[name].shape for name in op.operands], [r.shape for r in op.results]
                seconds += self.op(op, loop.hoisted.values).forward_seconds(*shapes)
        return seconds

    def sending(self, step: TrainingStep, value: Value, layout: Layout) -> Seconds:
        """Seconds to send an output to the next pipeline stage in every micro-batch, and its gradient back, as if each were
        waited for.

        The schedule's clock tells how much of this lengthens a step: less, or nothing, if messages overlap with computing.
        """
        if step.stage is None or step.stage.link is None or not step.sends:
            return 0.0
        size = value.local_bytes(layout, self.mesh.sizes)
        return step.microbatches * (1 + value.requires_grad) * step.stage.link.send(size)


def end_seconds(analysis: Analysis, name: str, found: Sequence[Candidate], prices: Prices) -> Floats:
    """Seconds of each candidate of a given tensor or an output, all members together."""
    program, sizes = analysis.program, analysis.sizes
    count = len(analysis.classes.members[name])
    if name not in program.values:  # an output
        sent = program.values[name.removeprefix(OUTPUT)] if analysis.step.sends else None
        return np.array([prices.sending(analysis.step, sent, c.operands[0]) if sent else 0.0 for c in found])
    value = program.values[name]
    if name in {v.name for v in program.inputs}:
        return np.array([prices.arrival(analysis.step, value, c.results[0]) for c in found])
    if not value.requires_grad or name not in {p.value.name for p in program.parameters}:
        return np.zeros(len(found))
    layouts = [c.results[0] for c in found]
    return np.array([count * prices.optimizer_step(value.local_bytes(x, sizes), place(x)) for x in layouts])


def op_class_seconds(analysis: Analysis, name: str, found: Sequence[Candidate], prices: Prices) -> tuple[Floats, Floats]:
    """Seconds of an op class under each candidate, all members together: of a step, and of its forward alone."""
    program, step, forward = analysis.program, np.zeros(len(found)), np.zeros(len(found))
    for summed, count in Counter(program.op[member].summed for member in analysis.classes.members[name]).items():
        op = replace(program.op[name], summed=summed)
        both, there = op_seconds(op, analysis.fits[name], found, program.values, prices)
        step += count * np.array(both)
        forward += count * np.array(there)
    return analysis.step.microbatches * step, analysis.step.microbatches * forward


def ties(analysis: Analysis, name: str, found: Sequence[Candidate]) -> Floats:
    """Tie-breakers among candidates of equal price: the bytes left on a rank, then how plain the layouts are."""
    left = _result_bytes(analysis, name, found)
    if name in analysis.program.op or name not in analysis.program.values:
        return left
    shape = analysis.program.values[name].shape
    return np.asarray(left * [1 + PLAIN * oddness(c.results[0], shape, analysis.sizes) for c in found])


PLAIN = 1e-2  # of the bytes, by which an odd layout loses against a plain one


def oddness(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    """The number of axes that split a dim other than in contiguous chunks nested in mesh order; later dims add a little."""
    left, odd = list(shape), 0.0
    for axis, state in enumerate(layout):
        if state.kind == "S":
            left[state.dim] //= sizes[axis]
            odd += (state.stride != left[state.dim]) + state.dim / 8
    return odd


def _result_bytes(analysis: Analysis, name: str, found: Sequence[Candidate]) -> Floats:
    """The result bytes on a rank under each candidate of a class."""
    program = analysis.program
    values: Sequence[Value] = ()
    if analysis.step.sends and name.startswith(OUTPUT):  # what is sent
        value = program.values[name.removeprefix(OUTPUT)]
        return np.array([float(value.local_bytes(candidate.operands[0], analysis.sizes)) for candidate in found])
    if name in program.op:
        values = program.op[name].results
    elif name in program.values:
        values = (program.values[name],)

    def left(candidate: Candidate) -> float:
        pairs = zip(values, candidate.results, strict=True) if values else ()
        return float(sum(v.local_bytes(x, analysis.sizes) for v, x in pairs))

    return np.array([left(candidate) for candidate in found])


def op_seconds(
    op: Op, fitted: OpSharding | None, found: Sequence[Candidate], values: Mapping[str, Value], prices: Prices
) -> tuple[list[Seconds], list[Seconds]]:
    """Seconds of one op under each candidate, with and without its backward; equal local shapes are priced once."""
    cost, sizes = prices.op(op, values), prices.mesh.sizes
    known: dict[tuple[object, object], tuple[Seconds, Seconds]] = {}
    both, forward = [], []
    for candidate in found:
        inside, outside = local_shapes(op, candidate, values, sizes)
        if (inside, outside) not in known:
            there = cost.forward_seconds(inside, outside)
            known[inside, outside] = there + cost.backward_seconds(inside, outside), there
        total, there = known[inside, outside]
        times = work(fitted, candidate, sizes)
        both.append(total * times)
        forward.append(there * times)
    return both, forward


def local_shapes(
    op: Op, candidate: Candidate, values: Mapping[str, Value], sizes: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """The shapes of an op's operands and results on one rank under a candidate."""
    operands = (values[name].shape for name in op.operands)
    inside = tuple(local_shape(shape, layout, sizes) for shape, layout in zip(operands, candidate.operands, strict=True))
    outside = tuple(local_shape(r.shape, layout, sizes) for r, layout in zip(op.results, candidate.results, strict=True))
    return inside, outside


def work(fitted: OpSharding | None, candidate: Candidate, sizes: tuple[int, ...]) -> float:
    """The work of the busiest rank under a candidate, in ops of the local shapes."""
    own = distributed(fitted, candidate)
    return own[1].work(fitted, sizes[own[0]]) if fitted and own else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArcSeconds:
    """Seconds per arc, over all runs: of the conversion, its gradient, the part that is always repeated, and of recomputing it
    for the backward (None: never).

    They include the device's copies for messages: `unpacking` for the conversion and its repetition, and `packing` for the
    gradient's.
    """

    there: Floats
    back: Floats
    rerun: Floats
    unpacking: Floats
    packing: Floats
    recompute: Floats | None = None


def arc_seconds(
    graph: LayoutGraph, value: Value, prices: Prices, *, bucketed: bool, reduce_dtype: torch.dtype | None = None, runs: int = 1
) -> ArcSeconds:
    """The seconds of a value's conversions, of which only collectives are repeated.

    `bucketed` if the value travels with others: the latency that it shares with them is a fixed charge (`formulate`).
    `reduce_dtype` is the dtype in which gradients are added up, if not the value's.
    """
    size = value.dtype.itemsize
    large = np.maximum(graph.elements[graph.source], graph.elements[graph.target]) * size
    small = np.minimum(graph.elements[graph.source], graph.elements[graph.target]) * size
    wider = reduce_dtype.itemsize // size if reduce_dtype else 1
    there, back, rerun, unpacking, packing = np.zeros((5, len(large)))
    ways = list(WAYS.values())
    for number, axis in sorted(set(zip(graph.pair.tolist(), graph.axis.tolist(), strict=True))):
        here, (forward, backward) = np.flatnonzero((graph.pair == number) & (graph.axis == axis)), ways[number]
        there[here] = prices.primitive(forward, large[here], small[here], axis)
        times = wider if backward in SUMS else 1
        back[here] = prices.primitive(backward, times * large[here], times * small[here], axis)
        ends = graph.scattered[here]
        unpacking[here] = prices.unpacking(forward, large[here], small[here], ends, bucketed=bucketed)
        packing[here] = prices.packing(backward, large[here], small[here], ends[:, ::-1], bucketed=bucketed, wider=wider)
        if bucketed:
            there[here] -= prices.latency(forward, axis) if forward in TOGETHER[0] else 0.0
            back[here] -= prices.latency(backward, axis) if backward in TOGETHER[1] else 0.0
        there[here] += unpacking[here]
        back[here] += packing[here]
        if forward in CARRIED:
            rerun[here] = there[here]
        times = 1 if bucketed and added_up(forward, backward) else runs
        back[here] *= times
        packing[here] *= times
    return ArcSeconds(there=runs * there, back=back, rerun=runs * rerun, unpacking=runs * unpacking, packing=packing)


def added_up(forward: str, backward: str) -> bool:
    """Whether micro-batches add up a weight's gradients before this conversion sends them: it leaves the weight as it is.

    If the weight has moved over another axis before, each micro-batch sends its own. Moving last is cheaper, unless a gather is
    shared; the integer program does not distinguish the two.
    """
    return (forward, backward) == ("identity", "all_reduce")
