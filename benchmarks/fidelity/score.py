"""Scores of predictions: how far off, in which direction, and whether they rank configurations as measurements do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.fidelity.predict import Prediction

LONG = 8192  # tokens from which attention takes a large share


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Relative errors of predicted step times: the median and the mean of their size, their mean with sign, and the rank
    correlation of model FLOPs utilization (nan where nothing can be ranked)."""

    count: int
    median: float
    mean: float
    signed: float
    ranks: float


def score(predictions: Sequence[Prediction]) -> Score:
    """The score of some predictions. Raises ValueError if there are none."""
    if not predictions:
        raise ValueError("no predictions to score")
    off = np.array([one.error for one in predictions])
    measured = np.array([one.utilization(one.run.seconds) for one in predictions])
    predicted = np.array([one.utilization(one.seconds) for one in predictions])
    return Score(
        count=len(off),
        median=float(np.median(abs(off))),
        mean=float(abs(off).mean()),
        signed=float(off.mean()),
        ranks=spearman(measured, predicted),
    )


def spearman(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Spearman's rank correlation, equal values sharing their mean rank; nan if one side is constant.

    >>> spearman(np.array([1.0, 2.0, 4.0]), np.array([5.0, 6.0, 60.0]))
    1.0
    """
    ranks = np.array([_ranks(left), _ranks(right)])
    off = ranks - ranks.mean(1, keepdims=True)
    size = math.sqrt(float((off[0] ** 2).sum() * (off[1] ** 2).sum()))
    return float((off[0] * off[1]).sum()) / size if size else math.nan


def _ranks(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    _, which, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[which], dtype=np.float64)


GROUPS: Mapping[str, Callable[[Prediction], str]] = {
    "table": lambda one: one.run.table,
    "device": lambda one: one.run.device,
    "nodes": lambda one: one.run.scale,
    "device and nodes": lambda one: f"{one.run.device}, {one.run.scale}",
    "recompute": lambda one: f"recompute {one.run.recompute}",
    "length": lambda one: f"{LONG} tokens and more" if one.run.decoder.length >= LONG else f"fewer than {LONG} tokens",
    "width": lambda one: "width 4096 and more" if one.run.decoder.width >= 4096 else "width under 4096",
    "parallel": lambda one: (
        " x ".join(f"{axis}={size}" for axis, size in one.run.mesh.items()) if "tp" in one.run.mesh else "fsdp, zero"
    ),
}


def grouped(predictions: Iterable[Prediction], by: Callable[[Prediction], str]) -> dict[str, list[Prediction]]:
    """Predictions by group, in the order in which groups are first met."""
    found: dict[str, list[Prediction]] = {}
    for one in predictions:
        found.setdefault(by(one), []).append(one)
    return found


__all__ = ["GROUPS", "Score", "grouped", "score", "spearman"]
