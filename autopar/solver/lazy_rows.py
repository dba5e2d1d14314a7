"""Memory rows that are added only where a solution breaks them, and tightened where one that is there does not suffice.

A row counts at most the bytes that are alive at its moment, so that a solution may keep to it and still not fit. Then its
`constant` is what the row does not count of that solution, so that it counts the next one like it in full, until a solution
fits. What is searched for lies between the last constant that did not suffice and the first that did: `halfway`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.solver.problem import Row, Solution, row_bytes
from autopar.solver.reduced_cost_fixing import Window
from autopar.solver.settings import SearchSettings


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Excess:
    """A moment at which a solution holds more than its limit: its row, and by how many bytes."""

    row: Row
    bytes: float


Judge = Callable[[Solution], Iterable[Excess]]  # the moments at which a solution holds too much, the worst first


class LazyRows:
    """The memory rows that solutions broke so far, by name: they hold in the whole problem, and so in each of its windows.

    Args:
        judge: says at which moments a solution holds too much.
        convert: a row of the judge as a row of the problem that is solved.
        rows: rows that are known from the start, of that problem.
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
        """The rows of moments that have none yet, as rows of a window."""
        self._met |= {one.row.name: self._convert(one.row) for one in excess if one.row.name not in self._met}
        return self.take(window, [self._met[one.row.name] for one in excess if one.row.name not in self.rows])

    def met_by_copies(self, window: Window) -> list[Row]:
        """The rows of moments that only copies of these have, as rows of a window."""
        return self.take(window, [row for name, row in self._met.items() if name not in self.rows])

    def tightened(self, window: Window, solution: Solution, excess: Sequence[Excess]) -> list[Row]:
        """The row of the worst moment, which has one that does not suffice, with what it does not count of the solution."""
        row = replace(self.rows[excess[0].row.name], constant=0.0)
        seen = row_bytes(window.problem, window.row(row), solution.picks, solution.arcs, solution.recompute)
        least = self.rows[row.name].constant + self._settings.tighten_least * row.limit
        return self.take(window, [replace(row, constant=max(least, row.limit + excess[0].bytes - seen))])

    def as_tight(self, window: Window, other: LazyRows) -> list[Row]:
        """The rows of a copy that are not here, or ask for more than here, as rows of a window."""
        here = self.rows
        tighter = [row for name, row in other.rows.items() if name not in here or row.constant > here[name].constant]
        return self.take(window, tighter)

    def take(self, window: Window, rows: Sequence[Row]) -> list[Row]:
        """Take rows, or other constants of rows that are here; returns them as rows of a window."""
        self.rows |= {row.name: row for row in rows}
        return [window.row(row) for row in rows]

    def loosen(self) -> None:
        """Rows are as they were before they were tightened: what one did not count of a solution it may count of all others."""
        self.rows = {name: self._met[name] for name in self.rows}

    def copy(self) -> LazyRows:
        """A copy of these rows, which may be tightened here and not there; each hears of the moments that the other meets."""
        other = LazyRows(self._judge, self._convert, self.rows.values(), self._settings)
        other._met = self._met
        return other


class Tightening:
    """Rows of a search, tightened for what they do not count: by too little, solutions do not fit; by too much, none is left.

    Once it was too much, what lies between is halved, `halvings` times at most.
    """

    def __init__(self, memory: LazyRows, window: Window, halvings: int) -> None:
        self._memory, self._window, self._halvings = memory, window, halvings
        self._less: dict[str, Row] | None = None  # by which the last solution did not fit
        self._more: dict[str, Row] | None = None  # that left none

    def tighter(self, solution: Solution, excess: Sequence[Excess]) -> list[Row]:
        """Tighter rows than those by which a solution does not fit; none where these were halved too often."""
        self._less = dict(self._memory.rows)
        return self._memory.tightened(self._window, solution, excess) if self._more is None else self._between()

    def looser(self) -> list[Row]:
        """Looser rows than those that left no solution; none where they were not tightened, or halved too often."""
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
