"""The report of a verification: one row per compared tensor, and the collectives that differ from the plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.errors import printable
from autopar.plan.plan import Plan
from autopar.plan.text import Grid, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """One compared tensor: `error` is max |a - b| / (1 + max |b|), the largest over all ranks."""

    what: str  # "output", "gradient", "buffer", or "capture" (the captured program against the user's module)
    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of `autopar.verify`.

    `surplus` and `missing` are collectives, as "kind axis bytes pass", that rank 0 issued beyond the plan, or did not issue.
    """

    plan: Plan
    rows: tuple[ReportRow, ...]
    surplus: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows) and not self.surplus and not self.missing

    @property
    def max_error(self) -> float:
        """The largest error of the float64 comparison; NaN if any error is."""
        return float(np.max([0.0, *(row.error for row in self.rows if row.what != "capture")]))

    def __str__(self) -> str:
        table = Grid("", "tensor", "max error", "allowed", "", box=None)
        for row in self.rows:
            table.add_row(row.what, row.name, f"{row.error:.1e}", f"{row.tolerance:.0e}", "" if row.ok else "DIFFERS")
        lines = [f"issued, but not in the plan: {entry}" for entry in self.surplus]
        lines += [f"in the plan, but not issued: {entry}" for entry in self.missing]
        verdict = "equal" if self.ok else "NOT equal"
        lines += [*self.notes, f"{verdict}: max error {self.max_error:.1e} over {len(self.rows)} tensors"]
        return "\n".join([plain([table]), *map(printable, lines)])
