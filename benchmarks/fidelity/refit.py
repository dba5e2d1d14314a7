"""Cross-validation: what a refit of the parts of a step would make of rows that it has not seen.

    measured  ~  seconds + sum over parts (factor[part] - 1) parts[part]

One factor per device for products, attention and everything else that computes, and one for all messages: least squares of
relative errors, with factors drawn to 1, halfway for a part that is a hundredth of the steps. A factor far from 1 says which
price is off; an error that a refit does not lower on held-out rows is not one of coefficients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.fidelity.predict import ATTENTION, MESSAGES, OTHERS, PRODUCTS, Prediction

DRAWN = 0.01  # the share of a step at which rows and "no change" weigh the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Median sizes of errors on held-out rows, as priced and with factors that were fitted on the others."""

    name: str
    fitted: int
    held: int
    priced: float
    refitted: float


Factors = dict[tuple[str, str], float]


def fit(predictions: Sequence[Prediction]) -> Factors:
    """The factor of every part of every device that these predictions speak of."""
    names = sorted({key for one in predictions for key in _parts(one)})
    rows = np.array([[_parts(one).get(name, 0.0) / one.run.seconds for name in names] for one in predictions])
    missing = np.array([-one.error for one in predictions])
    drawn = DRAWN * np.sqrt(len(predictions)) * np.eye(len(names))
    found = np.linalg.lstsq(np.vstack([rows, drawn]), np.concatenate([missing, np.zeros(len(names))]), rcond=None)[0]
    return {name: 1 + float(change) for name, change in zip(names, found, strict=True)}


def refitted(one: Prediction, factors: Factors) -> float:
    """The relative error of a prediction whose parts are multiplied by these factors."""
    change = sum((factors.get(name, 1.0) - 1) * seconds for name, seconds in _parts(one).items())
    return (one.seconds + change) / one.run.seconds - 1


def explained(one: Prediction, factors: Factors) -> dict[str, float]:
    """What each part would add under these factors, as a share of the measured time: why a prediction is off."""
    return {key[1]: (factors.get(key, 1.0) - 1) * seconds / one.run.seconds for key, seconds in _parts(one).items()}


def _parts(one: Prediction) -> Factors:
    computing = {(one.run.device, part): one.parts[part] for part in (PRODUCTS, ATTENTION, OTHERS)}
    return computing | {("any", MESSAGES): one.parts[MESSAGES]}


SPLITS: dict[str, Callable[[Prediction], bool]] = {  # which rows are held out
    "width 4096 and more": lambda one: one.run.decoder.width >= 4096,
    "several nodes": lambda one: one.run.nodes > 1,
    "8192 tokens and more": lambda one: one.run.decoder.length >= 8192,
}


def folds(predictions: Sequence[Prediction]) -> Iterator[Fold]:
    """Every split, and every table left out, where there are rows on both sides."""
    tables = dict.fromkeys(one.run.table for one in predictions)
    left_out: dict[str, Callable[[Prediction], bool]] = {
        f"table {table}": lambda one, table=table: one.run.table == table for table in tables
    }
    for name, out in (SPLITS | left_out).items():
        held, rest = [one for one in predictions if out(one)], [one for one in predictions if not out(one)]
        if held and rest:
            factors = fit(rest)
            yield Fold(
                name=name,
                fitted=len(rest),
                held=len(held),
                priced=float(np.median([abs(one.error) for one in held])),
                refitted=float(np.median([abs(refitted(one, factors)) for one in held])),
            )


__all__ = ["Factors", "Fold", "explained", "fit", "folds", "refitted"]
