"""What a simulated step says: throughput, share of peak, what is exposed, and the bounds that no schedule beats.

    MFU = operations of the model's products, forward and backward, each once / (seconds of the step x peaks of all devices)

A. Chowdhery et al., "PaLM", 2022, appendix B: recomputation does not count. Causal attention counts half of the scores.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.analysis.analysis import Analysis
from autopar.cost_models.compute import pricer
from autopar.formulation.prices import local_shapes, work
from autopar.formulation.step_time import StepPrices
from autopar.ir.device import Device, Seconds
from autopar.ir.program import Op, Program
from autopar.memory.recompute_closure import reruns
from autopar.plan.breakdown import KernelGroup, SimulatedStep
from autopar.search_space.assignment import Assignment
from autopar.search_space.candidates import Candidate
from autopar.simulator.timeline import Timeline

GROUPS = PRODUCTS, ATTENTION, OTHERS = "matrix products", "fused attention", "other kernels"


def figures(timeline: Timeline, prices: StepPrices, chosen: Assignment) -> SimulatedStep:
    """The figures of a step under an assignment, with its bounds."""
    analysis, mesh, device = prices.analysis, prices.prices.mesh, prices.prices.device
    peaks: dict[str, Seconds] = {}
    for op in analysis.program.ops:
        kind = analysis.classes.of[op.name]
        if kind not in peaks:
            peaks[kind] = _at_peak(op, analysis.program, device)
    at_peak = sum(peaks[analysis.classes.of[op.name]] for op in analysis.program.ops)
    loads = [
        (axis, sum(sent.transfer.seconds for sent in timeline.sent if place in sent.transfer.axes))
        for place, axis in enumerate(mesh.axes)
    ]
    samples, tokens = _batch(analysis)
    return SimulatedStep(
        seconds=timeline.seconds,
        exposed=timeline.exposed,
        slowdown=timeline.slowdown,
        at_peak=analysis.step.microbatches * at_peak / mesh.size,
        kernels=tuple(kernel_groups(prices, chosen)),
        links={axis: seconds for axis, seconds in loads if seconds},
        samples=samples,
        tokens=tokens,
    )


def kernel_groups(prices: StepPrices, chosen: Assignment) -> Iterator[KernelGroup]:
    """The computing of an assignment by kind of kernel; kinds that take no time are left out."""
    analysis, run = prices.analysis, reruns(prices.analysis, chosen)
    known: dict[tuple[str, Candidate, tuple[int, ...], bool], KernelGroup] = {}
    found: dict[str, list[KernelGroup]] = {name: [] for name in GROUPS}
    for op in analysis.program.ops:
        key = analysis.classes.of[op.name], chosen.ops[op.name], op.summed, op.name in run.ops
        if key not in known:
            known[key] = _kernels(op, chosen.ops[op.name], prices, forwards=1 + key[-1])
        found[known[key].name].append(known[key])
    for name, parts in found.items():
        if any(part.seconds for part in parts):
            yield KernelGroup(
                name=name,
                seconds=sum(part.seconds for part in parts),
                at_peak=sum(part.at_peak for part in parts),
                at_bandwidth=sum(part.at_bandwidth for part in parts),
            )


def _kernels(op: Op, candidate: Candidate, prices: StepPrices, forwards: int) -> KernelGroup:
    """The kernels of one op on one rank, in all micro-batches."""
    analysis, device = prices.analysis, prices.prices.device
    found, (there, back) = pricer(op, analysis.program.values, device), prices.op(op, candidate)
    shapes = local_shapes(op, candidate, analysis.program.values, analysis.sizes)
    forward, gradient = found.forward(*shapes), found.gradient(*shapes)
    times = analysis.step.microbatches * work(analysis.fits[op.name], candidate, analysis.sizes)
    name = PRODUCTS if found.operations is not None else OTHERS
    return KernelGroup(
        name=ATTENTION if found.attention else name,
        seconds=forwards * there + back,
        at_peak=times * (forwards * forward.flops + gradient.flops) / found.peak,
        at_bandwidth=times * (forwards * forward.bytes + gradient.bytes + sum(found.sums(shapes[0]))) / device.bandwidth,
    )


def products_at_peak(program: Program, device: Device) -> Seconds:
    """Seconds of one device at its peak for all products of a program, forward and backward."""
    return sum(_at_peak(op, program, device) for op in program.ops)


def _at_peak(op: Op, program: Program, device: Device) -> Seconds:
    """Seconds of one device at its peak for the products of an op, at global shapes."""
    values = program.values
    found = pricer(op, values, device)
    if found.operations is None:
        return 0.0
    products = found.operations([values[name].shape for name in op.operands], [result.shape for result in op.results])
    wanted = frozenset(found.gradients)
    passes = ((product.flops, 1 + bool(product.left & wanted) + bool(product.right & wanted)) for product in products)
    return sum(flops * times for flops, times in passes) / found.peak


def _batch(analysis: Analysis) -> tuple[int, int]:
    """Samples in a step, dim 0 of the first input; tokens, if that is a matrix of integers, else 0."""
    program = analysis.program
    if not program.inputs:
        return 0, 0
    first = program.inputs[0]
    shape = analysis.step.batch_shape(first.name)
    tokens = len(shape) == 2 and not first.dtype.is_floating_point
    return (shape[0] if shape else 0), shape[0] * shape[1] if tokens else 0


__all__ = ["figures", "kernel_groups", "products_at_peak"]
