"""The terms of memory rows that need variables of their own: what is retained of an edge, and what is on its way.

(keep) and (step) of `integer_program`, which lists the indices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from autopar.solver.matrix import Matrix
from autopar.solver.problem import PRODUCER, Edge, Floats, InFlightTerm, Ints, Problem, RetainedTerm

if TYPE_CHECKING:
    from autopar.solver.integer_program import Columns


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RowTerm:
    """A part of a memory row: columns and their bytes."""

    columns: Ints
    values: Floats


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LayoutColumns:
    """Columns that stand for layouts of an edge: column i for layout `layouts[i]`, times `values[i]`."""

    layouts: Ints
    columns: Ints
    values: Floats

    def times(self, factor: float) -> LayoutColumns:
        """These columns with their values multiplied."""
        return replace(self, values=factor * self.values)


def retained_columns(problem: Problem, columns: Columns, matrix: Matrix, term: RetainedTerm) -> RowTerm:
    """(keep): the columns for what is retained of an edge, and their bytes."""
    edge = problem.edges[term.edge]
    read, saved = ([_picked(columns, edge, end) for end in ends] for ends in (term.read_by, term.saved_by))
    recomputed = [one.times(1 / term.first_share) for one in _recomputed(problem, columns, term.edge)]
    rerun = [one for end in term.rerun_by if (one := _rerun(problem, columns, edge, end)) is not None]
    rerun += _reconverted(problem, columns, term.edge, edge.source)
    free = [_picked(columns, edge, PRODUCER)] if term.free_as_produced else []
    replaced = recomputed + free if term.droppable else free
    if len(read) + len(saved) == 1 and not rerun and not replaced:
        (only,) = (*read, *saved)
        return RowTerm(columns=only.columns, values=term.bytes[term.storage(only.layouts)])
    layouts = np.arange(edge.nodes)
    keep = matrix.add_columns(np.zeros(edge.nodes)) + layouts
    for ends, less in ((read, free), (saved, replaced), (rerun, recomputed + free)):
        for end in ends:
            parts = [LayoutColumns(layouts=layouts, columns=keep, values=np.ones(edge.nodes)), end.times(-1.0), *less]
            rows = term.storage(np.concatenate([part.layouts for part in parts]))
            column = np.concatenate([part.columns for part in parts])
            matrix.add_rows(rows, column, np.concatenate([part.values for part in parts]), edge.nodes, 0.0, np.inf)
    return RowTerm(columns=keep, values=term.bytes)


def in_flight_columns(problem: Problem, columns: Columns, matrix: Matrix, term: InFlightTerm) -> RowTerm:
    """(step): the columns for the least bytes in flight, and the bytes of each step up."""
    edge = problem.edges[term.edge]
    ends = [_picked(columns, edge, end) for end in range(PRODUCER, len(edge.consumers))]
    sizes = np.unique(np.concatenate([term.bytes[end.layouts] for end in ends]))
    most = min(float(term.bytes[end.layouts].max()) for end in ends)
    steps = sizes[(sizes > sizes[0]) & (sizes <= most)]
    first = matrix.add_columns(np.zeros(len(steps)))
    for number, size in enumerate(steps):
        larger = [end.columns[term.bytes[end.layouts] >= size] for end in ends]
        column = np.concatenate([np.array([first + number]), *larger])
        values = np.concatenate([np.ones(1), -np.ones(len(column) - 1)])
        matrix.add_row(column, values, 1.0 - len(ends), np.inf)
    always = np.full(len(ends[0].columns), sizes[0])
    return RowTerm(
        columns=np.concatenate([ends[0].columns, first + np.arange(len(steps))]),
        values=np.concatenate([always, np.diff(np.concatenate([sizes[:1], steps]))]),
    )


def ends(edge: Edge, end: int) -> tuple[int, Ints]:
    """The choice at one end of an edge, and the layout there of each of its candidates."""
    if end == PRODUCER:
        return edge.producer, edge.produced
    return edge.consumers[end].choice, edge.consumers[end].wants


def _picked(columns: Columns, edge: Edge, end: int) -> LayoutColumns:
    """The picks at one end of an edge."""
    choice, layouts = ends(edge, end)
    column = columns.pick[choice] + np.arange(len(layouts))
    return LayoutColumns(layouts=layouts, columns=column, values=np.ones(len(layouts)))


def _rerun(problem: Problem, columns: Columns, edge: Edge, end: int) -> LayoutColumns | None:
    """The reruns at one end of an edge; None if the choice there must not run again."""
    choice, layouts = ends(edge, end)
    if choice not in columns.rerun:
        return None
    column, share = columns.rerun[choice] + np.arange(len(layouts)), 1.0 / problem.choices[choice].count
    return LayoutColumns(layouts=layouts, columns=column, values=np.full(len(layouts), share))


def _recomputed(problem: Problem, columns: Columns, number: int) -> list[LayoutColumns]:
    """What restores a layout of an edge: its producer rerun, a conversion recomputed, the host."""
    edge = problem.edges[number]
    produced = _rerun(problem, columns, edge, PRODUCER)
    found = ([] if produced is None else [produced]) + _reconverted(problem, columns, number, edge.target)
    if number in columns.offload:
        first, layouts = columns.offload[number]
        column, share = first + np.arange(len(layouts)), 1.0 / edge.count
        found.append(LayoutColumns(layouts=layouts, columns=column, values=np.full(len(layouts), share)))
    return found


def _reconverted(problem: Problem, columns: Columns, number: int, layouts: Ints) -> list[LayoutColumns]:
    """Conversions that are recomputed, at their sources or at their targets; one that only aliases makes nothing."""
    if number not in columns.reconvert:
        return []
    edge = problem.edges[number]
    assert edge.recompute is not None
    moved = np.flatnonzero(~edge.free & np.isfinite(edge.recompute))
    column, share = columns.reconvert[number] + moved, 1.0 / edge.count
    return [LayoutColumns(layouts=layouts[moved], columns=column, values=np.full(len(moved), share))]
