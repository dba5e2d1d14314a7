"""The rows of regions, in which messages overlap with computing; (busy), (link) and (excess) of `integer_program`.

    minimise    ... + sum_r excess[r]
    (busy)      busy[r] <= load + share sum_p (busy[p] + again[p] + excess[p])          every region r with parts p
    (link)      link[r,a] >= load + share sum_p (link[p,a] + resent[p,a])               every link a
    (excess)    excess[r] + busy[r] + again[r] >= link[r,a] + resent[r,a]

`again` and `resent` are the loads of what is recomputed. They are 0 until the columns of recomputation join: then
(again) again[r] <= load, (resent) resent[r,a] >= load. Seconds are microseconds here, as in the objective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.solver.matrix import MICROSECONDS, Matrix
from autopar.solver.memory_terms import RowTerm
from autopar.solver.overlap import Load
from autopar.solver.problem import Floats, Ints, Problem

if TYPE_CHECKING:
    from autopar.solver.integer_program import Columns

_LARGEST = 1e8  # what a row is divided by at most: HiGHS drops what is below 1e-9, even the column itself


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionColumns:
    """The columns of one region, `link` and `resent` the first of those per link; `outlast` are the rows (excess), one per
    link, and `idle` is the block of again[r] <= 0."""

    excess: int
    busy: int
    again: int
    link: int
    resent: int
    outlast: tuple[int, ...]
    idle: int


def add_regions(problem: Problem, columns: Columns, matrix: Matrix, cost: float) -> list[RegionColumns]:
    """(busy), (link) and (excess) of every region; a microsecond of excess has this cost."""
    found: list[RegionColumns] = []
    for region in problem.regions:
        number, parts = len(region.links), [found[part] for part in region.parts]
        excess, busy = matrix.add_columns(np.array([cost])), matrix.add_columns(np.zeros(2 + 2 * number))
        again, link, resent = busy + 1, busy + 2, busy + 2 + number
        inside = [column for part in parts for column in (part.busy, part.again, part.excess)]
        outlast: list[int] = []
        _at_most(matrix, busy, (*_load(region.busy, problem, columns), _share(inside, region.share)))
        for a, load in enumerate(region.links):
            carried = [column for part in parts for column in (part.link + a, part.resent + a)]
            _at_least(matrix, link + a, (*_load(load, problem, columns), _share(carried, region.share)))
            row = np.array([excess, busy, again, link + a, resent + a])
            outlast.append(matrix.rows)
            matrix.add_row(row, np.array([1.0, 1.0, 1.0, -1.0, -1.0]), 0.0, np.inf)
        idle = matrix.add_row(np.array([again]), np.ones(1), -np.inf, 0.0)
        found.append(
            RegionColumns(excess=excess, busy=busy, again=again, link=link, resent=resent, outlast=tuple(outlast), idle=idle)
        )
    return found


def add_recomputed(problem: Problem, regions: Sequence[RegionColumns], columns: Columns, matrix: Matrix) -> None:
    """(again) and (resent), once there are columns for recomputation; the rows `idle` must be relaxed then."""
    for region, own in zip(problem.regions, regions, strict=True):
        _at_most(matrix, own.again, _recomputed(region.busy, problem, columns))
        for a, load in enumerate(region.links):
            _at_least(matrix, own.resent + a, _recomputed(load, problem, columns))


def _at_most(matrix: Matrix, column: int, terms: Iterable[RowTerm]) -> None:
    """A column is at most the sum of terms."""
    matrix.add_row(*_less(column, terms), -np.inf, 0.0)


def _at_least(matrix: Matrix, column: int, terms: Iterable[RowTerm]) -> None:
    """A column is at least the sum of terms."""
    matrix.add_row(*_less(column, terms), 0.0, np.inf)


def _less(column: int, terms: Iterable[RowTerm]) -> tuple[Ints, Floats]:
    """A column minus the sum of terms, scaled to at most 1: microseconds range from a thousandth to a million, and the simplex
    method has numerical trouble with such long and uneven rows.
    """
    parts = list(terms)
    columns = np.concatenate([np.array([column]), *(part.columns for part in parts)])
    values = np.concatenate([np.ones(1), *(-part.values for part in parts)])
    return columns, values / min(np.abs(values).max(), _LARGEST)


def _share(columns: Sequence[int], share: float) -> RowTerm:
    return RowTerm(columns=np.array(columns, dtype=np.int64), values=np.full(len(columns), share))


def _term(first: int, seconds: Floats, members: int = 1) -> RowTerm:
    """Columns from the first on, of those that have a part; so many of a column are the whole."""
    places = np.flatnonzero(seconds)
    return RowTerm(columns=first + places, values=seconds[places] * (MICROSECONDS / members))


def _load(load: Load, problem: Problem, columns: Columns) -> Iterator[RowTerm]:
    """The part of a load that is not of recomputation."""
    for o, seconds in load.choices.items():
        yield _term(columns.pick[o], seconds)
    for w, seconds in load.arcs.items():
        yield _term(columns.use[w], seconds)
    for (w, place), seconds in load.conditional.items():
        if place in columns.due[w]:
            yield _term(columns.due[w][place], seconds)
    yield from _charges(load, problem, columns, recomputed=False)


def _recomputed(load: Load, problem: Problem, columns: Columns) -> Iterator[RowTerm]:
    """The part of a load that is of recomputation."""
    for o, seconds in load.reruns.items():
        if o in columns.rerun:
            yield _term(columns.rerun[o], seconds, problem.choices[o].count)
    for w, seconds in load.reconverts.items():
        if w in columns.reconvert:
            yield _term(columns.reconvert[w], seconds, problem.edges[w].count)
    yield from _charges(load, problem, columns, recomputed=True)


def _charges(load: Load, problem: Problem, columns: Columns, *, recomputed: bool) -> Iterator[RowTerm]:
    """The charges of a load that are, or are not, of conversions that are recomputed."""
    for t, seconds in load.charges.items():
        if problem.fixed_charges[t].recomputed == recomputed and t in columns.paid:
            yield _term(columns.paid[t], np.array([seconds]))


__all__ = ["RegionColumns", "add_recomputed", "add_regions"]
