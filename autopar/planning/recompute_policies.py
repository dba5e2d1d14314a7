"""Solves with narrower recompute policies if the search over all recomputations finds nothing that fits.

The full search stays near a relaxation, which recomputes parts of blocks; it may find nothing within a budget that only fits if
whole blocks, or what is cheap, are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.analysis.recompute_policy import BLOCKS, SELECTIVE
from autopar.formulation.budget_loop import BudgetLoop, Posed
from autopar.formulation.memory_model import MemoryModel
from autopar.ir.device import Bytes
from autopar.solver.settings import SearchSettings

NARROWER = SELECTIVE, BLOCKS


def cheapest_within(limit: Bytes, models: Iterable[MemoryModel], settings: SearchSettings) -> Posed | None:
    """The cheapest solution of any of these problems within a limit; None if none is found that beats the settings' cutoff."""
    best: Posed | None = None
    for model in models:
        cutoff = settings.below if best is None else best[1].seconds
        solution = BudgetLoop(model.formulated, model, settings).within(limit, cutoff=cutoff)
        best = best if solution is None else (model, solution)
    return best


__all__ = ["NARROWER", "cheapest_within"]
