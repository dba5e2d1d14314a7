"""The report: scores by table and group, factors of a refit, folds, every row, and what could not be expressed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.fidelity.predict import PARTS, Prediction
from benchmarks.fidelity.refit import explained, fit, folds, refitted
from benchmarks.fidelity.score import GROUPS, grouped, score
from benchmarks.fidelity.tables import Skipped

SCORE = "{:<34}{:>6}{:>10}{:>10}{:>10}{:>8}"
ROW = "{:<12}{:>5}  {:<44}{:<10}{:<10}{:>10}{:>10}{:>8}{:>8}{:>8}"
MEMORY = "{:<12}{:>5}  {:<44}{:>10}{:>10}{:>8}"
WORST = 12
GIB = 2**30


def report(predictions: Sequence[Prediction], skipped: Sequence[Skipped]) -> Iterator[str]:
    """All lines of the report."""
    counted = [one for one in predictions if not one.run.excluded]
    yield "Step time: predicted beside measured. Errors are relative to the measured time; ranks: Spearman's correlation of"
    yield "model FLOPs utilization, predicted with measured."
    yield ""
    yield SCORE.format("rows", "number", "median", "mean", "signed", "ranks")
    yield _score("all", counted)
    for name, by in GROUPS.items():
        if len(groups := grouped(counted, by)) > 1:
            yield f"by {name}"
            yield from (_score(f"  {group}", rows) for group, rows in groups.items())
    yield ""
    yield from _refit(counted)
    yield ""
    yield "Worst rows: the shares of the predicted step (together more than 100% where they overlap), and which parts a refit"
    yield "to all rows would change, in shares of the measured step"
    yield from _worst(counted)
    yield ""
    yield from _memory(predictions)
    yield ""
    yield ROW.format("table", "line", "run", "device", "recompute", "measured", "predicted", "off", "MFU", "pred.")
    yield from map(_row, predictions)
    yield ""
    yield "Not expressed"
    yield from _skipped(predictions, skipped)


def _score(name: str, rows: Sequence[Prediction]) -> str:
    found = score(rows)
    ranks = "" if np.isnan(found.ranks) else f"{found.ranks:.2f}"
    return SCORE.format(name, found.count, f"{found.median:.1%}", f"{found.mean:.1%}", f"{found.signed:+.1%}", ranks)


def _refit(rows: Sequence[Prediction]) -> Iterator[str]:
    yield "By what the parts would have to be multiplied to fit all rows best (1 is as priced), by device"
    factors = fit(rows)
    for device, group in grouped(sorted(factors), lambda key: key[0]).items():
        yield f"  {device:<12}" + ", ".join(f"{part} {factors[device, part]:.2f}" for _, part in group)
    yield ""
    yield "Cross-validation: median error on rows that were left out, as priced and with such factors fitted on the others"
    for fold in folds(rows):
        yield f"  {fold.name:<24}{fold.held:>4} of {fold.held + fold.fitted:<5}{fold.priced:>7.1%}{fold.refitted:>8.1%}"


def _worst(rows: Sequence[Prediction]) -> Iterator[str]:
    factors = fit(rows)
    for one in sorted(rows, key=lambda one: -abs(one.error))[:WORST]:
        shares = ", ".join(f"{part} {one.parts[part] / one.seconds:.0%}" for part in PARTS)
        reasons = sorted(explained(one, factors).items(), key=lambda reason: -abs(reason[1]))
        said = ", ".join(f"{part} {share:+.0%}" for part, share in reasons[:2] if abs(share) >= 0.01)
        yield f"  {one.error:+7.1%}  {one.run.table}:{one.run.line} {one.run.name}, {one.run.device}: {shares}"
        yield f"           a refit would add {said or 'nothing'}, and leave {refitted(one, factors):+.1%}"


def _memory(predictions: Sequence[Prediction]) -> Iterator[str]:
    yield "Memory: peak of what is allocated on a device, in GiB"
    yield MEMORY.format("table", "line", "run", "measured", "predicted", "off")
    for one in predictions:
        if one.run.memory:
            run, sizes = one.run, (one.run.memory / GIB, one.memory / GIB)
            yield MEMORY.format(run.table, run.line, run.name, *(f"{size:.2f}" for size in sizes), f"{one.memory_error:+.1%}")


def _row(one: Prediction) -> str:
    run, use = one.run, [one.utilization(seconds) for seconds in (one.run.seconds, one.seconds)]
    line = ROW.format(
        run.table, run.line, run.name, run.device, run.recompute, f"{run.seconds:.4g}", f"{one.seconds:.4g}",
        f"{one.error:+.1%}", *(f"{share:.1%}" for share in use),
    )  # fmt: skip
    return line + (f"  not counted: {run.excluded}" if run.excluded else "")


def _skipped(predictions: Sequence[Prediction], skipped: Sequence[Skipped]) -> Iterator[str]:
    reasons = Counter((row.table, row.reason) for row in skipped)
    yield from (f"  {table:<12}{count:>4}  {reason}" for (table, reason), count in reasons.items())
    yield f"{len(predictions)} of {len(predictions) + len(skipped)} rows expressed"


__all__ = ["report"]
