"""Formats text for people: tables, sizes and times with units, and one name for repeated blocks.

transformer.h.0.mlp.c_fc.weight ... transformer.h.11.mlp.c_fc.weight   ->   transformer.h.0-11.mlp.c_fc.weight
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from autopar.errors import printable
from autopar.ir.device import Seconds

Part = str | Table  # a line, or a table
T = TypeVar("T", bound=Hashable)
WIDTH = 128  # columns of the plain text


class Grid(Table):
    """A table whose cells print literally, each on one line."""

    def add_row(self, *cells: str) -> None:  # type: ignore[override]
        super().add_row(*map(printable, cells))


def grid(*columns: str | tuple[str, ...], right: Sequence[int] = ()) -> Table:
    """A table without rules; columns in `right` are aligned right, and a header may have several lines."""
    table = Grid(box=None, padding=(0, 2, 0, 0), show_header=any(columns))
    for place, column in enumerate(columns):
        last = place == len(columns) - 1
        justify, overflow = "right" if place in right else "left", "fold" if last else "ellipsis"
        head = "\n".join(map(printable, [column] if isinstance(column, str) else column))
        table.add_column(head, justify=justify, no_wrap=not last, overflow=overflow)  # type: ignore[arg-type]
    return table


def plain(parts: Iterable[Part]) -> str:
    """Lines and tables as plain text, the same on every terminal."""
    console = Console(width=WIDTH, color_system=None, force_terminal=False, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        for part in parts:
            console.print(literal_part(part))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def literal_part(part: Part) -> Part:
    """A part ready for the console: text stays on one line, whatever names it contains; table cells are literal already."""
    return printable(part) if isinstance(part, str) else part


def wild(name: str) -> str:
    """A name without its block numbers; the number of an op is kept.

    >>> wild("h.3.mlp:add#0")
    'h.*.mlp:add#0'
    """
    return re.sub(r"(?<![^.:])[0-9]+(?![^.:])", "*", name)


def folded(names: Sequence[str]) -> str:
    """One name for names that differ in block numbers only, with the numbers as ranges.

    >>> folded(["h.0.w", "h.1.w", "h.2.w", "h.7.w"])
    'h.0-2,7.w'
    """
    split = [re.split(r"([.:])", name) for name in dict.fromkeys(names)]
    return "".join(_ranges(parts) for parts in zip(*split, strict=True))


def _ranges(parts: Sequence[str]) -> str:
    """The text that all parts share, or their numbers as ranges."""
    if len(set(parts)) == 1:
        return parts[0]
    runs: list[list[int]] = []
    for number in sorted({int(part) for part in parts}):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def alike(entries: Mapping[str, T]) -> list[tuple[list[str], T]]:
    """The names that differ in block numbers only and have equal entries, with that entry.

    >>> alike({"h.0.w": "I", "h.1.w": "I", "h.2.w": "S(0)"})
    [(['h.0.w', 'h.1.w'], 'I'), (['h.2.w'], 'S(0)')]
    """
    groups: dict[tuple[tuple[str | None, ...], T], list[str]] = defaultdict(list)
    for name, entry in entries.items():
        parts = re.split(r"([.:])", name)
        groups[tuple(None if re.fullmatch("[0-9]+", part) else part for part in parts), entry].append(name)
    return [(names, entry) for (_, entry), names in groups.items()]


def by_block(names: Iterable[str]) -> list[list[str]]:
    """Names grouped by their text without block numbers."""
    return [group for group, _ in alike(dict.fromkeys(names, ""))]


def joined(names: Iterable[str]) -> str:
    """A list in words; at least one name.

    >>> joined(["dp", "tp"])
    'dp and tp'
    """
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def size_text(size: float) -> str:
    """Format bytes in the largest unit that gives a number of at least one.

    >>> size_text(3 * 2**20)
    '3.00 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def milliseconds(seconds: Seconds) -> str:
    """Seconds as milliseconds, without the unit.

    >>> milliseconds(0.0012345)
    '1.234'
    """
    return f"{seconds * 1e3:.3f}"
