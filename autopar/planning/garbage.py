"""Controls Python's garbage collection while commands plan."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """Collect garbage less often: collections over all of torch's objects would take a tenth of planning."""
    gc.set_threshold(100_000, 50, 1_000)


__all__ = ["collect_seldom"]
