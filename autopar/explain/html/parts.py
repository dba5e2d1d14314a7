"""Converts lines and tables of the text report to HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.table import Table

from autopar.plan.text import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmlTable:
    """A printed table for HTML: its head, its rows, and the columns that are aligned right."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int]


HtmlPart = str | HtmlTable


def converted(parts: Iterable[Part]) -> Iterator[HtmlPart]:
    """Convert parts of the text report to HTML: adjacent lines are joined, and kept as they are."""
    lines: list[str] = []
    for part in parts:
        if isinstance(part, Table):
            yield from ("\n".join(lines),) * bool(lines)
            lines = []
            yield _table(part)
        elif part:
            lines.append(part)
    yield from ("\n".join(lines),) * bool(lines)


def _table(part: Table) -> HtmlTable:
    columns = part.columns
    rows = zip(*([str(cell) for cell in column.cells] for column in columns), strict=True)
    return HtmlTable(
        head=tuple(str(column.header) for column in columns) if part.show_header else (),
        rows=tuple(rows),
        right=frozenset(place for place, column in enumerate(columns) if column.justify == "right"),
    )


__all__ = ["HtmlPart", "HtmlTable", "converted"]
