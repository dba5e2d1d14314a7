"""Fits the coefficients of the kernel laws to timings: what `python -m autopar.profile` writes for a GPU.

    product     1/g and w   seconds = operations P / peak / g + waves w     in the tiling that is best at this g and w
    attention   R and S0    seconds / operations = (1 + S0 / keys) / R      R by head dim and way; S0 by causality
    memory      shares      bytes / seconds / bandwidth                     median, by kind of operator, forward and backward
    beside      beta        (both - product) / message                      a product beside an all-gather

All by least squares of relative errors. The first two are alternated, tilings and coefficients, R and S0, to a fixed point.
Raises MeshError if timings are not positive, or too few.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.kernel_rates import START
from autopar.cost_models.kernels import tilings
from autopar.errors import MeshError
from autopar.ir.device import Seconds
from autopar.ir.kernel_rates import AttentionRate, ProductRate, positive
from autopar.operators.flops import ProductSizes

ROUNDS = 50  # of alternation, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTiming:
    """Seconds of some products one after the other: a forward, or a backward."""

    sizes: tuple[ProductSizes, ...]
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiming:
    """Seconds of fused attention one way: so many operations over so many keys."""

    dim: int
    keys: int
    causal: bool
    way: int  # 0 forward, 1 backward
    operations: int
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTiming:
    """Seconds of a memory-bound operator of a kind ("norm", "dropout", "stream"), and the bytes that it moves."""

    kind: str
    way: int
    bytes: int
    seconds: Seconds


def product_rate(timings: Sequence[ProductTiming], peak: float, processors: int, source: str) -> ProductRate:
    """g and w of some products at a peak in operations per second."""
    if len({timing.sizes for timing in timings}) < 2:
        raise MeshError("a fit of matrix products needs at least two of them, of different sizes", products=len(timings))
    for timing in timings:
        positive("a measured product's", {"time": timing.seconds})
    seconds = np.array([timing.seconds for timing in timings])
    unit = processors / peak  # seconds of an operation of one processor at the peak
    ways = [[tuple(tilings(sizes, processors)) for sizes in timing.sizes] for timing in timings]
    inverse, wave, before = 1.25, 5e-6, (0.0, 0.0)
    for _ in range(ROUNDS):
        best = [[min(cuts, key=lambda cut: cut[0] * unit * inverse + cut[1] * wave) for cuts in products] for products in ways]
        terms = np.array([[sum(cut[0] * unit for cut in cuts), sum(cut[1] for cut in cuts)] for cuts in best])
        inverse, wave = _nonnegative(terms / seconds[:, None])
        inverse = max(inverse, 1.0)  # no product beats the peak
        if np.allclose((inverse, wave), before, rtol=1e-9, atol=0):
            break
        before = inverse, wave
    return ProductRate(processors=processors, fraction=1 / inverse, wave=wave, source=source)


def _nonnegative(terms: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[float, float]:
    """The two nonnegative coefficients whose terms sum closest to 1 in every row."""
    (first, second), *_ = np.linalg.lstsq(terms, np.ones(len(terms)))
    if second < 0:
        first, second = float(terms[:, 0].sum() / (terms[:, 0] ** 2).sum()), 0.0
    return float(first), float(second)


def attention_rate(timings: Sequence[AttentionTiming], source: str) -> AttentionRate:
    """R by head dim and way, S0 by causality; the catalog's S0 where only one length was measured."""
    if {timing.way for timing in timings} != {0, 1}:
        raise MeshError("a fit of attention needs a forward and a backward of every head dim")
    for timing in timings:
        positive("a measured attention's", {"time": timing.seconds, "number of operations": timing.operations})
    start, rates = list(START), dict[tuple[int, int], float]()
    groups: dict[tuple[int, int], list[AttentionTiming]] = defaultdict(list)
    for timing in timings:
        groups[timing.dim, timing.way].append(timing)
    for _ in range(ROUNDS):
        for key, group in groups.items():
            reach = [(1 + start[one.causal] / one.keys) * one.operations / one.seconds for one in group]
            rates[key] = sum(share**2 for share in reach) / sum(reach)  # nearest to 1: share / R
        for causal in (False, True):
            group = [one for one in timings if one.causal == causal]
            if len({one.keys for one in group}) > 1:
                start[causal] = _start(group, rates)
    forward, backward = ({dim: rate for (dim, way), rate in rates.items() if way == which} for which in (0, 1))
    if forward.keys() != backward.keys():
        raise MeshError("a fit of attention needs a forward and a backward of every head dim")
    return AttentionRate(forward=forward, backward=backward, start=(start[0], start[1]), source=source)


def _start(group: Sequence[AttentionTiming], rates: Mapping[tuple[int, int], float]) -> float:
    """The S0 that is nearest to all timings at these rates."""
    least = [one.operations / rates[one.dim, one.way] / one.seconds for one in group]  # seconds without a start, relative
    slopes = np.array([share / one.keys for share, one in zip(least, group, strict=True)])
    return max(float(slopes @ (1 - np.array(least)) / (slopes @ slopes)), 0.0)


def bandwidth_shares(timings: Sequence[MemoryTiming], bandwidth: float) -> dict[str, tuple[float, float]]:
    """Shares of the memory bandwidth that kinds of operators reach, forward and backward; the forward's if there is no
    backward.
    """
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for timing in timings:
        positive(f"a measured {timing.kind} operator's", {"time": timing.seconds, "traffic": timing.bytes})
        found[timing.kind, timing.way].append(timing.bytes / timing.seconds / bandwidth)
    shares = {key: statistics.median(group) for key, group in found.items()}
    return {kind: (shares[kind, 0], shares.get((kind, 1), shares[kind, 0])) for kind, way in shares if way == 0}


def interference(product: Seconds, message: Seconds, both: Seconds) -> float:
    """Seconds that computing loses per second of an overlapping message, between 0 and 1.

    >>> interference(10e-3, 4e-3, 12e-3)
    0.5
    """
    positive("a measured product and message's", {"time": product, "message's time": message, "time together": both})
    return min(max((both - product) / message, 0.0), 1.0)


__all__ = [
    "AttentionTiming",
    "MemoryTiming",
    "ProductTiming",
    "attention_rate",
    "bandwidth_shares",
    "interference",
    "product_rate",
]
