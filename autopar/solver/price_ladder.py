"""Memory at a price: relaxations in which every byte of the peak costs seconds, at a ladder of prices.

    L(y) = min seconds(x) + y peak      subject to the integer program, peak >= bytes_m(x) at every moment m known so far
    bound(B) = max_y L(y) - y B         every solution within B bytes costs at least that (Lagrange)

Without a limit next to nothing couples the layers, so that the relaxation at a price is nearly always a plan, and the next
price starts from its basis. The rungs on both sides of a limit bracket the answer: one fits and costs more, the other costs
less and needs more. What the two use (`mixture`) is a small problem: its solutions treat so many members of each class as in
the one and the rest as in the other, the first k layers recompute and the rest keep.

A ladder serves many limits, which share its rungs: the budget sweep. For one limit it was slower than windows of reduced costs
in each of four paired runs, with the same answers and bounds: 2.2, 2.9 and 17.0 against 1.2, 1.8 and 3.2 CPU seconds (GPT-2 on
(2, 4)), 13.0 against 5.9 (Llama on (2, 4)). A single budget therefore uses windows only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.integer_program import IntegerProgram
from autopar.solver.presolve import merge_followers
from autopar.solver.problem import Bools, Floats, Problem, Row, Solution
from autopar.solver.reduced_cost_fixing import Window, window
from autopar.solver.relaxation import Relaxation
from autopar.solver.rounding import NoRouteError, rounded
from autopar.solver.settings import SearchSettings

PeakRows = Callable[[Solution], tuple[float, list[Row]]]  # the peak of a solution in bytes, and the rows of its highest moments


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Rung:
    """The relaxation at a price in seconds per byte: its Lagrangian in seconds, its peak in bytes and its columns' values."""

    price: float
    lagrangian: float
    peak: float
    values: Floats

    @property
    def seconds(self) -> float:
        """The step time alone."""
        return self.lagrangian - self.price * self.peak


class PriceLadder:
    """The rungs of one problem, kept for every limit that is asked for.

    Args:
        problem: what is relaxed.
        peak_rows: the peak of a solution of the problem in bytes and the rows of the moments that make it, without constants.
        settings: `ladder_rungs`, `ladder_iterations`, `ladder_step`.
    """

    def __init__(self, problem: Problem, peak_rows: PeakRows, settings: SearchSettings) -> None:
        self.presolved, self.settings = merge_followers(problem, settings), settings
        self._peak_rows = peak_rows
        self._rows: dict[str, Row] = {}
        self._rungs: dict[float, Rung | None] = {}
        self._relaxation: Relaxation | None = None

    def rows(self, limit: float) -> list[Row]:
        """The rows of the moments that the rungs met, at a limit in bytes; of the presolved problem."""
        return [replace(row, limit=limit, constant=0.0) for row in self._rows.values()]

    def bound(self, limit: float) -> float:
        """What every solution within so many bytes costs at least, in seconds."""
        rungs = [rung for rung in self._rungs.values() if rung is not None]
        return max((rung.lagrangian - rung.price * limit for rung in rungs), default=0.0)

    def bracket(self, limit: float, rows: Sequence[Row]) -> tuple[Rung, Rung] | None:
        """The neighbouring rungs above and below a limit in bytes; None where a relaxation took too many iterations.

        `rows` are those of moments that are known, of the presolved problem: at least one.
        """
        if self._relaxation is None:
            self._relaxation = self._start(rows)
        low, high = self._ends(limit)
        for _ in range(self.settings.ladder_rungs):
            if low is None or high is None or low.peak <= high.peak:
                break
            price = (high.seconds - low.seconds) / (low.peak - high.peak)
            between = self._rung(price)
            if between is None or between.lagrangian >= (low.seconds + price * low.peak) * (1 - self.settings.equal_price):
                break
            low, high = (low, between) if between.peak <= limit else (between, high)
        return None if low is None or high is None else (low, high)

    def _ends(self, limit: float) -> tuple[Rung | None, Rung | None]:
        """The nearest known rungs that do not fit and that fit; where none fits yet, prices rise until one does."""
        low = self._rung(0.0)
        if low is None or low.peak <= limit:
            return low, low
        price = low.seconds / low.peak  # the whole step for the whole peak: the scale of prices in this problem
        for _ in range(self.settings.ladder_rungs):
            known = [rung for rung in self._rungs.values() if rung is not None]
            fitting = [rung for rung in known if rung.peak <= limit]
            if fitting:
                over = [rung for rung in known if rung.peak > limit]
                return max(over, key=lambda r: r.price, default=low), min(fitting, key=lambda r: r.price)
            if self._rung(price) is None:
                break
            price *= self.settings.ladder_step
        return low, None

    def _start(self, rows: Sequence[Row]) -> Relaxation:
        """The program with its peak and the rows of first moments."""
        self._program = IntegerProgram(self.presolved.problem)
        self._scale = max(row.limit for row in rows)
        self._peak = self._program.add_peak(self._scale)
        relaxation = Relaxation(self._program, self.settings)
        self._rows = {row.name: row for row in rows}
        relaxation.add_rows(self.rows(0.0))
        return relaxation

    def _add(self, rows: Sequence[Row]) -> bool:
        """Add the rows of moments that are new."""
        assert self._relaxation is not None
        fresh = [self.presolved.row(row) for row in rows if row.name not in self._rows]
        self._rows |= {row.name: row for row in fresh}
        self._relaxation.add_rows(fresh)
        return bool(fresh)

    def _rung(self, price: float) -> Rung | None:
        """The relaxation at a price; None if it took too many iterations."""
        if price not in self._rungs:
            self._rungs[price] = self._climbed(price)
        return self._rungs[price]

    def _climbed(self, price: float) -> Rung | None:
        assert self._relaxation is not None
        self._relaxation.price_peak(price)
        while True:
            found = self._relaxation.relax(iterations=self.settings.ladder_iterations).result
            if found is None:
                return None
            peak = float(found.values[self._peak]) * self._scale
            try:
                solution = self.presolved.expand(rounded(self._program, found, self.settings))
            except NoRouteError:
                break
            walked, rows = self._peak_rows(solution)
            if walked <= peak or not self._add(rows[:1]):
                break
        return Rung(price=price, lagrangian=found.objective, peak=peak, values=found.values)

    def mixture(self, low: Rung, high: Rung) -> Window:
        """What two rungs use between them: their candidates, conversions and layouts."""
        problem, columns, tolerance = self.presolved.problem, self._program.columns, self.settings.integrality

        def unused(first: int, number: int) -> Floats:
            here = slice(first, first + number)
            used: Bools = (low.values[here] > tolerance) | (high.values[here] > tolerance)
            return np.where(used, 0.0, math.inf)

        picks = [unused(first, len(c.seconds)) for first, c in zip(columns.pick, problem.choices, strict=True)]
        arcs = [unused(first, len(edge.seconds)) for first, edge in zip(columns.use, problem.edges, strict=True)]
        part = window(problem, picks, arcs, 0.0, math.inf)
        assert part is not None, "no share is too large"
        return part


__all__ = ["PeakRows", "PriceLadder", "Rung"]
