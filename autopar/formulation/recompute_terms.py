"""Which activations the integer program may recompute, and what a named recompute policy adds to its prices.

free        a price per recomputed member: the integer program chooses
by name     the price is part of candidates and conversions, and choosing recomputation costs nothing more, so that memory rows
            stay a relaxation; `read_solution.assignment` recomputes what the policy says, whatever was chosen
"""

from __future__ import annotations

import numpy as np

from autopar.analysis.analysis import Analysis
from autopar.analysis.recompute_policy import RecomputePolicy
from autopar.analysis.regions import inner, regions
from autopar.ir.conversion import FETCHES, WAYS
from autopar.ir.program import Value
from autopar.operators import view_of
from autopar.search_space.layout_graph import LayoutGraph
from autopar.solver.problem import Bools, Floats

FETCHED = np.array([pair in FETCHES for pair in WAYS])
RECONVERTIBLE = np.array(  # what may be converted again but weights: a change of dims takes as much as what it is made from
    [forward in ("all_gather", "all_reduce", "reduce_scatter", "slice") for forward, _ in WAYS.values()]
)


def rerunnable(analysis: Analysis, policy: RecomputePolicy) -> frozenset[str]:
    """The ops that may be recomputed for the backward, and those whose results are restored with their operand.

    A weight is cast again wherever its copy is needed; everything else stays within its region.
    """
    if not policy.free:
        return policy.ops | policy.views | (analysis.recomputable & analysis.casts)
    program = analysis.program
    views = (op.name for op in program.ops if op.requires_grad and view_of(op, program.values))
    return analysis.recomputable.union(views) & (inner(program, regions(program)) | analysis.casts)


def reconvert_seconds(
    value: Value, graph: LayoutGraph, seconds: Floats, policy: RecomputePolicy, *, weight: bool
) -> Floats | None:
    """Seconds per conversion to repeat it in the backward if chosen, infinite if it must not be; None if all are.

    For weights, conversions that make them larger may be repeated; for frozen ones, fetches from the host.
    """
    fetched = FETCHED[graph.pair]
    if not value.requires_grad:
        return np.where(fetched, seconds, np.inf) if weight and fetched.any() else None
    if weight:
        return np.where(graph.elements[graph.target] > graph.elements[graph.source], seconds, np.inf)
    if policy.free:
        return np.where(RECONVERTIBLE[graph.pair], seconds, np.inf)
    repeated = _repeated(value, graph, policy)
    return np.where(repeated, 0.0, np.inf) if repeated.any() else None


def repeated_seconds(value: Value, graph: LayoutGraph, seconds: Floats, policy: RecomputePolicy) -> Floats:
    """Seconds per conversion for repeating it in the backward because the policy says so."""
    return np.where(_repeated(value, graph, policy), seconds, 0.0)


def _repeated(value: Value, graph: LayoutGraph, policy: RecomputePolicy) -> Bools:
    """Which conversions of a value the policy repeats."""
    kinds = np.array([policy.repeats(value.name, forward) for forward, _ in WAYS.values()])
    return kinds[graph.pair]


__all__ = ["reconvert_seconds", "repeated_seconds", "rerunnable"]
