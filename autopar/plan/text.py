"""A plan as a person reads it: totals first, then what is stored how, then what is sent.

transformer.h.0-11.mlp.c_fc.weight   I   S(1)        one row for layers that are stored alike
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from autopar.plan.plan import Collective, Plan

WIDTH = 128  # of the plain text
LEGEND = "I whole on every device of the axis; S(d) split along dim d, S(d/k) within each of its k blocks"


def tables(plan: Plan) -> Iterator[str | Table]:
    """The lines and tables of `Plan.tables`."""
    mesh = ", ".join(f"{a}={n} ({link})" for a, n, link in zip(plan.axes, plan.sizes, plan.links, strict=True))
    options = ", ".join(f"{name}={value}" for name, value in plan.options.items() if value)
    yield f"plan {plan.hash} for mesh {mesh} on {plan.device}"
    yield f"asked   {options}"
    sent = sum(entry.seconds for entry in plan.collectives)
    proven = "proven optimal" if plan.status == "optimal" else f"within {plan.gap:.2%} of the optimum"
    parts = f"{(plan.step_time - sent) * 1e3:.3f} computing, {sent * 1e3:.3f} sending"
    yield f"step    {plan.step_time * 1e3:.3f} ms: {parts}; {proven}"
    if plan.microbatches > 1:
        yield f"        {plan.microbatches} micro-batches, one after the other"
    yield from (f"varies  {size}" for size in plan.dynamic)
    yield f"memory  {size_text(plan.peak_memory)} per device at the peak"
    for place, line in enumerate(paddings(plan)):
        yield f"{'' if place else 'padded':<8}{line}"
    yield ""
    yield _layouts(plan)
    yield LEGEND
    if plan.collectives:
        yield ""
        yield _collectives(plan.collectives)


def paddings(plan: Plan) -> Iterator[str]:
    """What is padded, from what to what: repeated blocks as one."""
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, shapes in plan.padded.items():
        names[wild(name), shapes].append(name)
    return (f"{folded(found)}: {shapes}" for (_, shapes), found in names.items())


def _layouts(plan: Plan) -> Table:
    """The layouts of inputs, parameters, buffers and outputs."""
    table = Table("stored", *plan.axes, box=None, padding=(0, 2, 0, 0))
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, layout in plan.layouts.items():
        if ":" not in name or name.startswith("output:"):
            names[wild(name), layout].append(name)
    for (_, layout), found in names.items():
        table.add_row(folded(found), *(entry.strip() for entry in layout.split(",")))
    return table


def _collectives(collectives: Iterable[Collective]) -> Table:
    """Totals by kind, axis and pass, the most expensive first, with the values that take most of each."""
    groups: dict[tuple[str, str, str], list[Collective]] = defaultdict(list)
    for entry in collectives:
        groups[entry.kind, entry.axis, entry.where].append(entry)
    table = Table("sent", "axis", "pass", box=None, padding=(0, 2, 0, 0))
    for column in ("number", "bytes", "ms"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("mostly", overflow="ellipsis", no_wrap=True)
    for key, found in sorted(groups.items(), key=lambda item: -_seconds(item[1])):
        table.add_row(*key, *_totals(found), _mostly(found))
    if len(groups) > 1:
        table.add_row("all", "", "", *_totals([entry for found in groups.values() for entry in found]))
    return table


def _seconds(entries: Iterable[Collective]) -> float:
    return sum(entry.seconds for entry in entries)


def _totals(entries: Sequence[Collective]) -> tuple[str, str, str]:
    return str(len(entries)), size_text(sum(entry.bytes for entry in entries)), f"{_seconds(entries) * 1e3:.3f}"


def _mostly(entries: Iterable[Collective]) -> str:
    """The values, those of repeated blocks together, that take the most time of some collectives."""
    groups: dict[str, list[Collective]] = defaultdict(list)
    for entry in entries:
        groups[wild(entry.value)].append(entry)
    return folded([entry.value for entry in max(groups.values(), key=_seconds)])


def wild(name: str) -> str:
    """A name without its block numbers; the number of an op is kept."""
    return re.sub(r"(?<![^.:])\d+(?![^.:])", "*", name)


def folded(names: Sequence[str]) -> str:
    """One name for names that differ in block numbers only: the numbers as ranges.

    >>> folded(["h.0.w", "h.1.w", "h.2.w", "h.7.w"])
    'h.0-2,7.w'
    """
    split = [re.split(r"([.:])", name) for name in dict.fromkeys(names)]
    return "".join(_together(parts) for parts in zip(*split, strict=True))


def _together(parts: Sequence[str]) -> str:
    if len(set(parts)) == 1:
        return parts[0]
    runs: list[list[int]] = []
    for number in sorted({int(part) for part in parts}):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def plain(parts: Iterable[str | Table]) -> str:
    """Lines and tables as plain text, the same everywhere."""
    console = Console(width=WIDTH, color_system=None, force_terminal=False, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def size_text(size: float) -> str:
    """Bytes as a person reads them.

    >>> size_text(3 * 2**20)
    '3.00 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


__all__ = ["WIDTH", "folded", "paddings", "plain", "size_text", "tables", "wild"]
