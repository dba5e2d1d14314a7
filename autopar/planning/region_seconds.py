"""Estimates the seconds of each region from planned stages: regions that are alike take the same time.

With n[s, c] how many regions of class c stage s has, r[c] what one takes by rough prices, and t[s] what the stage takes, of one
kind of seconds, the classes take x[c] = y[c] r[c] such that

    sum_s (sum_c n[s, c] x[c] - t[s])^2  +  TRUST^2 mean(t)^2 sum_c (y[c] - sum t / sum n r)^2 / (sum t / sum n r)^2

is least: a ridge regression (Hoerl and Kennard, 1970) towards the proportions of rough prices, which decide where stages do not
tell classes apart. What a stage takes beside that, as more that is made again, all of its regions take in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.pipeline.clock import StageSeconds
from autopar.pipeline.stage_table import Cuts, StageArray

TRUST = 0.02  # in rough prices, beside what planned stages take
DIGITS = 6  # of a proportion: solvers of linear equations differ in the last ones
OF_ALL = 1e-9  # of the rough seconds of all regions, up to which two of them are alike


def region_seconds(rough: StageArray, sent: StageArray, cuts: Cuts, known: Sequence[StageSeconds]) -> StageArray:
    """Seconds of the forward, of both halves of the backward and of the work done once: `[4, regions]`.

    Args:
        rough: seconds of the forward and of the backward of each region, by the prices of one device: `[2, regions]`.
        sent: bytes that each region receives, which also distinguish regions.
        cuts: the first region of each planned stage, and the number of regions.
        known: the seconds of these stages.
    """
    unit = OF_ALL * max(float(rough.sum()), 1e-30)
    _, kinds = np.unique(np.round(np.concatenate([rough / unit, sent[None]])), axis=1, return_inverse=True)
    kinds = kinds.ravel()  # numpy 2.0 has it in two dims
    stage_of = np.repeat(np.arange(len(known)), np.diff(cuts))
    counts = np.zeros((len(known), kinds.max() + 1))
    np.add.at(counts, (stage_of, kinds), 1.0)
    firsts = np.unique(kinds, return_index=True)[1]
    takes = np.array([(one.forward, one.backward_input, one.backward_weight, one.once) for one in known]).T
    found = list[StageArray]()
    for prices, stages in zip(rough[[0, 1, 1, 1]], takes, strict=True):
        classes = _fitted(prices[firsts], counts, stages)
        said = (counts * classes).sum(axis=1)  # by no matrix product, which machines round differently
        beside = np.divide(stages, said, out=np.zeros_like(stages), where=said > 0)
        found.append(classes[kinds] * beside[stage_of])
    return np.stack(found)


def _fitted(rough: StageArray, counts: StageArray, stages: StageArray) -> StageArray:
    """The seconds, of one kind, of a region of each class."""
    whole = float((counts * rough).sum())
    if not whole or not stages.sum():
        return np.zeros_like(rough)
    even = rough * (stages.sum() / whole)
    ridge = TRUST * stages.mean() * np.eye(len(rough))
    rows, wanted = np.concatenate([counts * even, ridge]), np.concatenate([stages, ridge.sum(axis=1)])
    shares = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    found: StageArray = even * np.maximum(np.round(shares, DIGITS), 0.0)
    return found


__all__ = ["region_seconds"]
