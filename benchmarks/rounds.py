"""Rounds of a benchmark, in each of which every variant takes a step: how many are asked for, and what is told of them."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence


def count(text: str) -> int:
    """A number of rounds on the command line. Raises ArgumentTypeError for less than one."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rounds, of which there is one at least")
    return int(text)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile over rounds; all the same for a single round."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high
