"""What the hub trial found, as a table by family, with what was refused and why below it."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table

STAGES = ("built", "captured", "same", "planned", "equal")  # how far an architecture came
WIDTH = 128
Record = dict[str, Any]  # of one architecture


def report(records: list[Record], packages: Sequence[str] = ("transformers", "torch")) -> str:
    """The table, with the versions of packages above, and what is to be said of single architectures."""
    ran = [one for one in records if reached(one, "built")]
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in packages)
    lines = [*textwrap.wrap(versions, WIDTH), "", *_table(ran)]
    for title, chosen in _SECTIONS.items():
        held = [one for one in ran if not reached(one, "equal") and _section(one) is chosen]
        if held:
            lines += ["", f"{title}: {len(held)}", *itertools.chain(*map(_said, held))]
    coarse = [one for one in ran if reached(one, "equal") and one.get("digits")]
    if coarse:
        names = ", ".join(f"{one['kind']} {one['digits']:.0e}" for one in coarse)
        lines += ["", f"equal to as many digits as the user's own module has where its weights move by 1e-15: {len(coarse)}"]
        lines += _wrapped(names)
    unbuilt = [one["kind"] for one in records if not reached(one, "built")]
    lines += ["", f"not tried, as no small configuration and inputs of ours ran in the user's own module: {len(unbuilt)}"]
    lines += _wrapped(" ".join(unbuilt))
    equal = [one["kind"] for one in ran if reached(one, "equal")]
    return "\n".join([*lines, "", f"equal: {len(equal)}", *_wrapped(" ".join(equal))])


def reached(record: Record, stage: str) -> bool:
    """Whether an architecture came as far as this stage."""
    return record["stage"] in STAGES[STAGES.index(stage) :]


def _table(ran: list[Record]) -> Iterator[str]:
    table = Table("family", "tried", "refused by both", "left", "captured", "planned", "equal", box=None)
    rows = defaultdict(list)
    for record in ran:
        rows[record["family"]].append(record)
    for name, held in [*sorted(rows.items()), ("all", ran)]:
        left = [one for one in held if not _by_both(one)]
        counts = [sum(reached(one, stage) for one in left) for stage in ("captured", "planned", "equal")]
        table.add_row(name, *map(str, (len(held), len(held) - len(left), len(left), *counts)))
    console = Console(width=WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return (line.strip() for line in capture.get().splitlines())


def _by_both(record: Record) -> bool:
    """Whether torch.export refuses it as well."""
    return bool(record.get("exported"))


def _wrong(record: Record) -> bool:
    return bool(record.get("wrong"))


def _tied(record: Record) -> bool:
    return bool(record.get("tied"))


def _traced(record: Record) -> bool:
    return bool(record.get("traced"))


def _limit(record: Record) -> bool:
    return bool(record.get("limit")) or "allocate memory" in record.get("reason", "")


def _refused(record: Record) -> bool:
    return True


_SECTIONS: dict[str, Callable[[Record], bool]] = {  # the first that holds
    "refused by torch.export as well": _by_both,
    "a number is WRONG": _wrong,
    "not decided: topk takes one of several that are equal": _tied,
    "the library computes something else while it is traced, as torch.export's own module does": _traced,
    "ended at a limit": _limit,
    "refused, though torch.export takes it": _refused,
}


def _section(record: Record) -> Callable[[Record], bool]:
    return next(one for one in _SECTIONS.values() if one(record))


def _said(record: Record) -> list[str]:
    """One architecture, its head, and the reason with the line of the model, without the folders of this machine."""
    parts = [" ".join(part.split()) for part in record.get("reason", "").split("|")]
    kept = [re.sub(r"\S*site-packages/", "", part) for part in parts if not part.startswith(("fix", "error "))]
    return _wrapped(f"{record['kind']} ({record['head']}): {', '.join(kept)}", "    ")


def _wrapped(text: str, more: str = "  ") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent=more, break_on_hyphens=False)


__all__ = ["STAGES", "Record", "reached", "report"]
