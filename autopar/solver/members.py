"""Whole members: how many members of each class recompute, convert again or go to the host, under the layouts of a solution.

The relaxation uses fractions of members, and rounding each up wastes part of a member. With picks and routes fixed the program
is so small that members can be integers: branching nearly always ends at the root. Values that share a message are converted
again for the same number of members: otherwise there are more messages, some of them smaller. Rows are also tightened here for
the bytes that they miss, since each solve takes tenths of a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.solver.branch import branch_members
from autopar.solver.integer_program import IntegerProgram
from autopar.solver.lazy_rows import LazyRows, halfway
from autopar.solver.problem import Row, Solution
from autopar.solver.reduced_cost_fixing import Window, only
from autopar.solver.rounding import rounded
from autopar.solver.settings import SearchSettings


class WholeMembers:
    """The program with a solution's picks and routes fixed, and the known rows.

    Args:
        window: where the solution is of.
        solution: its picks and routes stay.
        rows: the rows that are known; here they may become more, and tighter.
        settings: `member_nodes`, `tighten_halvings`, `gap`.
    """

    def __init__(self, window: Window, solution: Solution, rows: LazyRows, settings: SearchSettings) -> None:
        self.rows, self._window, self._settings, self._bound = rows, window, settings, solution.bound
        self._part = only(window.problem, solution)
        self._program = IntegerProgram(self._part.problem)
        self._program.add_recomputation()
        self._program.reconvert_together()
        self._add(rows.take(window, list(rows.rows.values())))

    def best(self, below: float) -> Solution | None:
        """The best solution of the window below so many seconds that exceeds its limit at no moment; None if none is found.

        Rows are tightened until one fits or there is none, then loosened by halves as long as one fits.
        """
        less: Mapping[str, Row] = {}  # the rows when a solution did not fit, the last time, and what that one cost
        least, found = self._bound, self._solved(below)
        while found is not None and (excess := self.rows.excess(self._window, found)):
            fresh = self.rows.fresh(self._window, excess)
            less, least = (less, least) if fresh else (dict(self.rows.rows), found.seconds)
            self._add(fresh or self.rows.tightened(self._window, found, excess))
            found = self._solved(below)
        more = dict(self.rows.rows)
        for _ in range(self._settings.tighten_halvings if less else 0):
            below = below if found is None else found.seconds
            if below <= (1 + self._settings.gap) * least:
                break
            self._add(self.rows.take(self._window, halfway(less, more)))
            other = self._solved(below)
            if other is not None and self.rows.excess(self._window, other):
                less, least = dict(self.rows.rows), other.seconds
            else:
                more, found = dict(self.rows.rows), other or found
        self.rows.rows = more
        return found

    def _add(self, rows: Iterable[Row]) -> None:
        """Add rows of the window to the program, or change the constants of those that are there."""
        for row in map(self._part.row, rows):
            if self._program.tighten(row) is None:
                self._program.add_memory_row(row)

    def _solved(self, below: float) -> Solution | None:
        """The best integer numbers of members within the current rows; None if they cost `below` or more."""
        found = branch_members(self._program, self._settings)
        if found is None:
            return None
        solution = self._part.expand(rounded(self._program, found, self._settings))
        return solution.bounded(self._bound, self._settings.equal_price) if solution.seconds < below else None
