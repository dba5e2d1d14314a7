"""A sparse matrix that grows by columns and by blocks of rows: `lower <= A x <= upper`, `x >= 0`, with a cost per column.

Rows are stored and passed on as arrays: with PuLP's objects the largest programs take longer to build than to solve.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.solver.problem import Bools, Floats, Ints

MICROSECONDS = 1e6  # the objective is in microseconds: HiGHS works with absolute tolerances of 1e-7


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RowBlock:
    """`number` rows with equal bounds, the first of them row `first`; `rows` of the entries count from there."""

    first: int
    number: int
    lower: float
    upper: float
    rows: Ints
    columns: Ints
    values: Floats


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SparseBlock:
    """Columns and rows in HiGHS's row-wise form: entries `start[i]` to `start[i + 1]` are those of row i."""

    cost: Floats
    lower: Floats
    upper: Floats
    start: npt.NDArray[np.int32]
    column: npt.NDArray[np.int32]
    value: Floats


class Matrix:
    """The columns and rows of a program; `integers` says which columns are integer variables."""

    def __init__(self) -> None:
        self.columns = self.rows = 0
        self.costs: list[Floats] = []
        self._integers: list[Bools] = []
        self._blocks: list[RowBlock] = []

    @property
    def integers(self) -> Bools:
        """Which columns are integer variables, as an array of one's own."""
        return np.concatenate(self._integers)

    def add_columns(self, cost: Floats, *, integer: bool = False) -> int:
        """Append columns; the place of the first."""
        first, self.columns = self.columns, self.columns + len(cost)
        self.costs.append(cost)
        self._integers.append(np.full(len(cost), integer))
        return first

    def add_rows(self, rows: Ints, columns: Ints, values: Floats, number: int, lower: float, upper: float) -> int:
        """Append `number` rows with the same bounds; `rows` counts from the first of them. The place of the block."""
        self._blocks.append(
            RowBlock(first=self.rows, number=number, lower=lower, upper=upper, rows=rows, columns=columns, values=values)
        )
        self.rows += number
        return len(self._blocks) - 1

    def add_row(self, columns: Ints, values: Floats, lower: float, upper: float) -> int:
        """Append one row; the place of its block."""
        return self.add_rows(np.zeros(len(columns), np.int64), columns, values, 1, lower, upper)

    def add_at_least(self, greater: int, less: int, number: int) -> None:
        """Append x[greater + i] >= x[less + i] for each i below `number`."""
        row, ones = np.arange(number), np.ones(number)
        columns, values = np.concatenate([greater + row, less + row]), np.concatenate([ones, -ones])
        self.add_rows(np.concatenate([row, row]), columns, values, number, 0.0, np.inf)

    def change_upper(self, block: int, upper: float) -> int:
        """Change the upper bound of a block; the place of its first row."""
        self._blocks[block] = replace(self._blocks[block], upper=upper)
        return self.first_row(block)

    def first_row(self, block: int) -> int:
        """The place of the first row of a block."""
        return self._blocks[block].first

    def block(self, cost: Floats, column: int = 0, row: int = 0) -> SparseBlock:
        """The columns from `column` and the rows from `row` on; entries of the same place are added."""
        blocks = [block for block in self._blocks if block.first >= row]
        rows = np.concatenate([np.zeros(0, np.int64), *(block.first + block.rows for block in blocks)]) - row
        columns = np.concatenate([np.zeros(0, np.int64), *(block.columns for block in blocks)])
        values = np.concatenate([np.zeros(0), *(block.values for block in blocks)])
        places, inverse = np.unique(rows * self.columns + columns, return_inverse=True)
        total = np.bincount(inverse, weights=values, minlength=len(places))
        places, total = places[total != 0], total[total != 0]
        return SparseBlock(
            cost=cost[column:],
            lower=np.concatenate([np.zeros(0), *(np.full(block.number, block.lower) for block in blocks)]),
            upper=np.concatenate([np.zeros(0), *(np.full(block.number, block.upper) for block in blocks)]),
            start=np.searchsorted(places // self.columns, np.arange(self.rows - row + 1)).astype(np.int32),
            column=(places % self.columns).astype(np.int32),
            value=total,
        )
