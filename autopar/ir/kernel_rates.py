"""The share of its peaks that a device reaches: coefficients of the laws in `autopar.cost_models.kernels`, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import MeshError

# Bytes that a tensor-core kernel loads at once; it is slow if rows of a matrix do not begin at multiples of them.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRate:
    """How fast a device multiplies matrices, tile by tile. Raises MeshError for impossible numbers."""

    processors: int  # streaming multiprocessors, each of which computes one tile at a time
    fraction: float  # of the peak, reached by long full waves at the device's power and clock (g)
    wave: float  # seconds of a wave of 128 x 256 tiles besides arithmetic: filling, storing; other tiles by area (w)
    source: str
    unaligned: float = 1.0  # largest fraction of the peak if rows of matrices do not begin at multiples of `ALIGNMENT`

    def __post_init__(self) -> None:
        shares = {"fraction of the peak": self.fraction, "unaligned fraction of the peak": self.unaligned}
        positive("a product's", {"number of processors": self.processors, **shares})
        positive("a product's", {"wave": self.wave}, zero=True)
        for name, share in shares.items():
            if share > 1:
                raise MeshError(f"a product's {name} is at most 1, not {share}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRate:
    """How fast a device runs fused attention. Raises MeshError for impossible numbers."""

    forward: Mapping[int, float]  # head dim -> operations per second over long sequences in half precision (R)
    backward: Mapping[int, float]
    start: tuple[float, float]  # keys at which half of that is reached: not causal, causal (S0)
    source: str

    def __post_init__(self) -> None:
        for rates in (self.forward, self.backward):
            positive("attention's", {f"rate at head dim {dim}": rate for dim, rate in rates.items()})
            if not rates:
                raise MeshError("attention needs a rate for at least one head dim, forward and backward")
        positive("attention's", dict(zip(("start", "causal start"), self.start, strict=True)), zero=True)


def positive(whose: str, numbers: Mapping[str, float], *, zero: bool = False) -> None:
    """Raise MeshError for a number that is negative, infinite, not a number or, unless allowed, zero."""
    for name, number in numbers.items():
        if not (math.isfinite(number) and (number > 0 or (zero and number == 0))):
            kind = "nonnegative" if zero else "positive"
            raise MeshError(f"{whose} {name} is {number}, not a {kind} finite number")


__all__ = ["ALIGNMENT", "AttentionRate", "ProductRate", "positive"]
