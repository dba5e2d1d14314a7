"""What a simulated step says: throughput, share of peak, what is exposed, and the bounds that no schedule beats.

    MFU = operations of the model's products, forward and backward, each once / (seconds of the step x peaks of all devices)

A. Chowdhery et al., "PaLM", 2022, appendix B: what is recomputed does not count. Causal attention counts half of the scores.
"""

from __future__ import annotations

from autopar.analysis.analysis import Analysis
from autopar.cost_models.compute import pricer
from autopar.formulation.prices import local_shapes
from autopar.formulation.step_time import StepPrices
from autopar.ir.mesh import Device, Seconds
from autopar.ir.program import Op, Program
from autopar.plan.breakdown import SimulatedStep
from autopar.search_space.assignment import Assignment
from autopar.search_space.candidates import Candidate
from autopar.simulator.timeline import Timeline


def figures(timeline: Timeline, prices: StepPrices, chosen: Assignment) -> SimulatedStep:
    """The figures of a step under an assignment, with its bounds."""
    analysis, mesh, device = prices.analysis, prices.prices.mesh, prices.prices.device
    peaks: dict[str, Seconds] = {}
    moving: dict[tuple[str, Candidate], Seconds] = {}
    at_peak = memory = 0.0
    for op in analysis.program.ops:
        kind, candidate = analysis.classes.of[op.name], chosen.ops[op.name]
        if kind not in peaks:
            peaks[kind] = _at_peak(op, analysis.program, device)
        if (kind, candidate) not in moving:
            moving[kind, candidate] = _moving(op, candidate, analysis, device)
        at_peak += peaks[kind]
        memory += moving[kind, candidate]
    loads = [(axis, sum(s.transfer.seconds for s in timeline.sent if s.transfer.channel == axis)) for axis in mesh.axes]
    samples, tokens = _batch(analysis)
    return SimulatedStep(
        seconds=timeline.seconds,
        exposed=timeline.exposed,
        slowdown=timeline.slowdown,
        at_peak=analysis.step.microbatches * at_peak / mesh.size,
        memory=analysis.step.microbatches * memory,
        links={axis: seconds for axis, seconds in loads if seconds},
        samples=samples,
        tokens=tokens,
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


def _moving(op: Op, candidate: Candidate, analysis: Analysis, device: Device) -> Seconds:
    """Seconds in which the memory's bandwidth moves what an op's kernels read and write on one rank, forward and backward."""
    found, shapes = (
        pricer(op, analysis.program.values, device),
        local_shapes(op, candidate, analysis.program.values, analysis.sizes),
    )
    return (found.forward(*shapes).bytes + found.gradient(*shapes).bytes) / device.bandwidth


def _batch(analysis: Analysis) -> tuple[int, int]:
    """Samples in a step, dim 0 of the first input; tokens, if that is a matrix of integers, else 0."""
    program = analysis.program
    if not program.inputs:
        return 0, 0
    first = program.inputs[0]
    shape = analysis.step.batch_shape(first.name)
    tokens = len(shape) == 2 and not first.dtype.is_floating_point
    return (shape[0] if shape else 0), shape[0] * shape[1] if tokens else 0


__all__ = ["figures", "products_at_peak"]
