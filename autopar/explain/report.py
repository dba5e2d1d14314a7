"""The report of a plan, the same for a plan just made and for one read from a file.

headline  what the plan does, and what it wastes, in users' terms
totals    what was planned for, the step time and the memory, and the cost parameters with their sources
modules   how every module runs and how its parameters are stored, with repeated blocks merged
time      the step, split into compute and each kind of communication
memory    what the device holds at the peak, and what is recomputed or offloaded to keep the peak low
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping

from autopar.explain.headline import headline, waste
from autopar.explain.phrases import held, runs, stored, use
from autopar.ir.device import Bytes, Seconds
from autopar.ir.program import OUTPUT
from autopar.operators.dim_labels import kind_of
from autopar.plan.assignment_text import RUN
from autopar.plan.breakdown import INPUT, WHOLE
from autopar.plan.pipeline_tables import pipeline_tables
from autopar.plan.plan import Plan
from autopar.plan.tables import time, totals
from autopar.plan.text import Part, alike, by_block, folded, grid, joined, milliseconds, size_text

Lines = tuple[tuple[str, str], ...]  # (an op or parameters, what is done)


def report(plan: Plan) -> Iterator[Part]:
    """All sections, separated by empty lines; for a pipeline its schedule and the sections of each stage."""
    yield headline(plan)
    yield from waste(plan)
    yield ""
    yield from totals(plan)
    if plan.pipeline:
        yield ""
        yield from pipeline_tables(plan, plan.pipeline)
    for number, part in enumerate(plan.stages or (plan,)):
        if plan.pipeline:
            yield ""
            yield plan.pipeline.title(number)
        yield ""
        yield from modules(part, "stage" if plan.pipeline else "model")
        for section in (time, memory):
            yield ""
            yield from section(part)


def modules(plan: Plan, whole: str = "model") -> Iterator[Part]:
    """How every module runs and how its parameters are stored: one row for modules that are alike.

    Args:
        plan: of a model or of one of its stages.
        whole: which of them.
    """
    breakdown = plan.breakdown
    if all(word == WHOLE for words in (*breakdown.runs.values(), *breakdown.stored.values()) for word in words):
        yield f"nothing is split: every device holds the whole {whole} and does all of the work"
        return
    table = grid("module", "part", "how it runs or is stored")
    for name, words in _named(plan, INPUT):
        table.add_row("input", name, stored(words, plan.axes))
    for module, lines in _rows(plan):
        for place, (what, text) in enumerate(lines):
            table.add_row("" if place else module or "(root module)", what, text)
    for name, words in _named(plan, OUTPUT):
        table.add_row("output", name, stored(words, plan.axes))
    yield table
    yield "split over an axis: each of its devices has one part; replicated: each has the whole"


def _named(plan: Plan, prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The inputs or the outputs, and what is split of them."""
    for name, words in plan.breakdown.stored.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), words


def _rows(plan: Plan) -> Iterator[tuple[str, Lines]]:
    """Modules with their lines; repeated blocks share a row, as do neighbours under one parent: "attn.q, k, v"."""
    lines_of = {module: tuple(lines) for module, lines in _lines(plan).items()}
    rows = [(*folded(names).rpartition("."), lines) for names, lines in alike(lines_of)]
    for (parent, dot, lines), group in itertools.groupby(rows, key=lambda row: (row[0], row[1], row[3])):
        yield parent + dot + ", ".join(row[2] for row in group), lines


def _lines(plan: Plan) -> Mapping[str, list[tuple[str, str]]]:
    """Per module, in execution order, lines of (op or parameters, what is done)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for op, words in plan.breakdown.runs.items():
        line = kind_of(op), runs(words, plan.axes)
        lines = found.setdefault(op.rpartition(":")[0], [])
        if line not in lines:
            lines.append(line)
    leaves: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, text in _parameters(plan):
        module, _, leaf = name.rpartition(".")
        leaves[module, text].append(leaf)
    for (module, text), names in leaves.items():
        found.setdefault(module, []).append((joined(names), text))
    return found


def _parameters(plan: Plan) -> Iterator[tuple[str, str]]:
    """Every name of a parameter, and how it is stored and used."""
    backward: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for entry in plan.collectives:
        for name in (entry.value, *entry.more) if entry.where == "backward" else ():
            backward[name] += [(entry.kind, plan.axes[axis]) for axis in plan.mesh.axes_named(entry.axis)]
    for name, words in plan.breakdown.stored.items():
        if ":" not in name:
            yield name, "; ".join([f"stored {stored(words, plan.axes)}", *use(plan, name, backward)])
    for name, own in plan.breakdown.tied.items():
        yield name, f"tied to {own}"


def memory(plan: Plan) -> Iterator[Part]:
    """Bytes by purpose at the peak, what takes most of them, and what is recomputed or offloaded instead of kept."""
    breakdown = plan.breakdown
    table = grid("memory per device", "bytes", "share", right=(1, 2))
    for kind, size in breakdown.memory.items():
        table.add_row(kind, size_text(size), f"{size / plan.peak_memory:.1%}")
    table.add_row("total at the peak", size_text(plan.peak_memory), "100.0%")
    if plan.peak_reserved > plan.peak_memory:
        table.add_row("reserved for it, about", size_text(plan.peak_reserved), f"{plan.peak_reserved / plan.peak_memory:.1%}")
    yield table
    for where, sizes in (("host", breakdown.host), ("disk", breakdown.disk)):
        if sizes:
            yield from elsewhere(where, sizes)
    yield f"the peak is in {breakdown.moment}; the largest contributors are"
    for entry in breakdown.fullest:
        yield f"  {size_text(entry.bytes):>10}  {held(entry)}"
    rerun = {name: breakdown.recompute.get(name, 0.0) for name, lines in plan.recompute.items() if RUN in lines}
    yield from _most_expensive("recomputed in the backward", rerun)
    yield from _most_expensive("offloaded to the host", breakdown.offload)


def elsewhere(where: str, sizes: Mapping[str, Bytes]) -> Iterator[Part]:
    """Bytes on the host or on the disk by purpose."""
    table, total = grid(f"memory on the {where} per device", "bytes", "share", right=(1, 2)), sum(sizes.values())
    for kind, size in sizes.items():
        table.add_row(kind, size_text(size), f"{size / total:.1%}")
    table.add_row("total", size_text(total), "100.0%")
    yield ""
    yield table


def _most_expensive(title: str, seconds: Mapping[str, Seconds]) -> Iterator[Part]:
    """A table of times, the most expensive first, with repeated blocks merged."""
    if not seconds:
        return
    groups = [(sum(seconds[name] for name in names), names) for names in by_block(seconds)]
    table = grid(title, "ms", "blocks", right=(1, 2))
    for total, names in sorted(groups, key=lambda group: -group[0]):
        table.add_row(folded(names), milliseconds(total), str(len(names)))
    yield ""
    yield table
