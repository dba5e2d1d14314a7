"""Memory rows that are added only where a solution breaks them, and tightened where one that is there does not suffice.

A row is a lower bound on the bytes alive at its moment, so a solution may satisfy it and still not fit. Then its `constant` is
set to the bytes that the row missed for that solution, so that it counts a similar one in full, until a solution fits. The
right constant lies between the last one that was too small and the first that was not: `halfway`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.solver.problem import Row, Solution, row_bytes
from autopar.solver.reduced_cost_fixing import Window
from autopar.solver.settings import SearchSettings


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Excess:
    """A moment at which a solution exceeds its limit: its row, and the excess in bytes."""

    row: Row
    bytes: float


Judge = Callable[[Solution], Iterable[Excess]]  # the moments at which a solution holds too much, the worst first


class LazyRows:
    """The memory rows that solutions have violated so far, by name: they hold in the whole problem, hence in each window.

    Args:
        judge: tells at which moments a solution holds too much.
        convert: converts a row of the judge to a row of the solved problem.
        rows: initial rows, of that problem.
        settings: `tighten_least`.
    """

    def __init__(self, judge: Judge, convert: Callable[[Row], Row], rows: Iterable[Row], settings: SearchSettings) -> None:
        self.rows: dict[str, Row] = {row.name: row for row in rows}
        self._met = dict(self.rows)  # and those of solutions of copies of these, as all were before they were tightened
        self._judge, self._convert, self._settings = judge, convert, settings

    def excess(self, window: Window, solution: Solution) -> list[Excess]:
        """The moments at which a solution of a window holds too much."""
        return list(self._judge(window.expand(solution)))

    def fresh(self, window: Window, excess: Sequence[Excess]) -> list[Row]:
        """Rows for moments without one, as rows of a window."""
        self._met |= {one.row.name: self._convert(one.row) for one in excess if one.row.name not in self._met}
        return self.take(window, [self._met[one.row.name] for one in excess if one.row.name not in self.rows])

    def met_by_copies(self, window: Window) -> list[Row]:
        """Rows that so far only copies of this object have, as rows of a window."""
        return self.take(window, [row for name, row in self._met.items() if name not in self.rows])

    def tightened(self, window: Window, solution: Solution, excess: Sequence[Excess]) -> list[Row]:
        """The insufficient row of the worst moment, with the bytes that it missed as its constant."""
        row = replace(self.rows[excess[0].row.name], constant=0.0)
        seen = row_bytes(window.problem, window.row(row), solution.picks, solution.arcs, solution.recompute)
        least = self.rows[row.name].constant + self._settings.tighten_least * row.limit
        return self.take(window, [replace(row, constant=max(least, row.limit + excess[0].bytes - seen))])

    def as_tight(self, window: Window, other: LazyRows) -> list[Row]:
        """The rows of a copy that are missing or looser here, as rows of a window."""
        here = self.rows
        tighter = [row for name, row in other.rows.items() if name not in here or row.constant > here[name].constant]
        return self.take(window, tighter)

    def take(self, window: Window, rows: Sequence[Row]) -> list[Row]:
        """Add rows, or change constants of existing ones; returns them as rows of a window."""
        self.rows |= {row.name: row for row in rows}
        return [window.row(row) for row in rows]

    def loosen(self) -> None:
        """Undo all tightening: bytes that a row missed for one solution it may count for all others."""
        self.rows = {name: self._met[name] for name in self.rows}

    def copy(self) -> LazyRows:
        """A copy of these rows that is tightened independently; both learn about moments that the other meets."""
        other = LazyRows(self._judge, self._convert, self.rows.values(), self._settings)
        other._met = self._met
        return other


class Tightening:
    """Rows of a search, tightened for the bytes that they miss: too little, and solutions do not fit; too much, and none is
    left.

    Once it was too much, the interval is bisected, at most `halvings` times.
    """

    def __init__(self, memory: LazyRows, window: Window, halvings: int) -> None:
        self._memory, self._window, self._halvings = memory, window, halvings
        self._less: dict[str, Row] | None = None  # by which the last solution did not fit
        self._more: dict[str, Row] | None = None  # that left none

    def tighter(self, solution: Solution, excess: Sequence[Excess]) -> list[Row]:
        """Tighter rows after a solution that does not fit; none after too many bisections."""
        self._less = dict(self._memory.rows)
        return self._memory.tightened(self._window, solution, excess) if self._more is None else self._between()

    def looser(self) -> list[Row]:
        """Looser rows after none was left; none if rows were not tightened, or after too many bisections."""
        self._more = dict(self._memory.rows)
        return self._between()

    def _between(self) -> list[Row]:
        self._halvings -= 1
        if self._less is None or self._more is None or self._halvings < 0:
            return []
        return self._memory.take(self._window, halfway(self._less, self._more))


def halfway(less: Mapping[str, Row], more: Mapping[str, Row]) -> list[Row]:
    """The rows whose constants in `more` are larger than in `less`, with constants half way."""
    return [
        replace(row, constant=(row.constant + less[name].constant) / 2)
        for name, row in more.items()
        if name in less and less[name].constant < row.constant
    ]
