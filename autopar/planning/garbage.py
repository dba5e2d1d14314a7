"""Garbage collection while commands plan."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """Have the interpreter collect garbage less often: collections over all of torch's objects would be a tenth of planning."""
    gc.set_threshold(100_000, 50, 1_000)


__all__ = ["collect_seldom"]
