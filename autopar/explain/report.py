"""The sections of a report that a plan alone gives: the same for a plan just made and for one read from its file.

assumptions   the mesh, the device and the figures that prices rest on
layouts       how every module runs and how its parameters are stored, repeated blocks as one
time          the step, split into computing and each kind of collective
memory        what the device holds at the peak
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping

from rich.table import Table

from autopar.explain.phrases import COLLECTIVE, figure, held, milliseconds, proof, runs, stored, together, use
from autopar.ir.mesh import Seconds
from autopar.operators.dim_labels import kind_of
from autopar.plan.breakdown import BUDGET, DEVICE, INPUT, OPTIMIZER, OUTPUT, WHOLE, CostParameter
from autopar.plan.plan import RUN, Collective, Plan
from autopar.plan.text import folded, paddings, size_text, wild

Part = str | Table
Lines = tuple[tuple[str, str], ...]  # (an op or parameters, what is done)


def report(plan: Plan) -> Iterator[Part]:
    """Every section, with an empty line between them."""
    yield from assumptions(plan)
    for section in (layouts, time, memory):
        yield ""
        yield from section(plan)


def assumptions(plan: Plan) -> Iterator[Part]:
    """What was planned for, the totals, and where each figure comes from."""
    cost_parameters = plan.breakdown.cost_parameters
    of: dict[str, list[CostParameter]] = defaultdict(list)
    for found in cost_parameters:
        of[found.of].append(found)
    (limit,), (optimizer,) = of[BUDGET], of[OPTIMIZER]
    told = ("strategy", "optimizer", "budget", "microbatches")
    asked = {name: text for name, text in plan.options.items() if text and name not in told}
    table = grid("", "")
    table.add_row("plan", f"{plan.hash}, strategy {plan.options['strategy']}")
    for name, text in asked.items():
        table.add_row(name, text)
    table.add_row("step", f"{milliseconds(plan.step_time)} predicted; {proof(plan.gap)}")
    if plan.microbatches > 1:
        table.add_row("micro-batches", f"{plan.microbatches} a step, one after the other; gradients add up")
    for varying in plan.dynamic:
        table.add_row("varies", str(varying))
    for place, line in enumerate(paddings(plan)):
        table.add_row("" if place else "padded", line)
    table.add_row("memory", f"{size_text(plan.peak_memory)} of {size_text(limit.value)} per device ({limit.source})")
    table.add_row("mesh", f"{plan.mesh.size} devices; those of the last axis stand next to each other")
    for axis, size, link in zip(plan.axes, plan.sizes, plan.links, strict=True):
        table.add_row(f"  {axis}={size}", f"{link}: {_figures(of[axis])}")
    table.add_row("device", f"{plan.device}: {_figures(of[DEVICE])}")
    state = f"{optimizer.value:g} tensors of state per parameter" if optimizer.value else "no state"
    table.add_row("optimizer", f"{optimizer.name}: {state} ({optimizer.source})")
    yield table


def _figures(found: list[CostParameter]) -> str:
    """Figures of one thing, with their source once."""
    sources = dict.fromkeys(entry.source for entry in found)
    return f"{', '.join(map(figure, found))} ({'; '.join(sources)})"


def layouts(plan: Plan) -> Iterator[Part]:
    """How every module runs and how its parameters are stored: one row for modules that are alike."""
    breakdown = plan.breakdown
    if all(word == WHOLE for words in (*breakdown.runs.values(), *breakdown.stored.values()) for word in words):
        yield "nothing is split: every device holds everything and does all of the work"
        return
    table = grid("module", "part", "how it runs or is stored")
    for name, words in _named(plan, INPUT):
        table.add_row("argument", name, stored(words, plan.axes))
    for module, lines in _rows(plan):
        for place, (what, text) in enumerate(lines):
            table.add_row("" if place else module or "(the model itself)", what, text)
    for name, words in _named(plan, OUTPUT):
        table.add_row("result", name, stored(words, plan.axes))
    yield table
    yield "split over an axis: each of its devices has a part of its own; what is not split is the same on all of them"


def _named(plan: Plan, prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The arguments or the results, and what is split of them."""
    for name, words in plan.breakdown.stored.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), words


def _rows(plan: Plan) -> Iterator[tuple[str, Lines]]:
    """Modules with their lines, repeated blocks together, and so neighbours of one parent: "attn.q, k, v"."""
    alike: dict[tuple[str, Lines], list[str]] = defaultdict(list)
    for module, found in _modules(plan).items():
        alike[wild(module), tuple(found)].append(module)
    rows = [(*folded(modules).rpartition("."), lines) for (_, lines), modules in alike.items()]
    for (parent, dot, lines), group in itertools.groupby(rows, key=lambda row: (row[0], row[1], row[3])):
        yield parent + dot + ", ".join(row[2] for row in group), lines


def _modules(plan: Plan) -> Mapping[str, list[tuple[str, str]]]:
    """Per module, in the order in which they run, lines of (op or parameters, what is done)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for op, words in plan.breakdown.runs.items():
        line = kind_of(op), runs(words, plan.axes)
        lines = found.setdefault(op.rpartition(":")[0], [])
        if line not in lines:
            lines.append(line)
    backward: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for entry in plan.collectives:
        for name in (entry.value, *entry.more) if entry.where == "backward" else ():
            backward[name].append((entry.kind, entry.axis))
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, words in plan.breakdown.stored.items():
        if ":" in name:
            continue
        module, _, leaf = name.rpartition(".")
        text = "; ".join([f"stored {stored(words, plan.axes)}", *use(plan, name, backward)])
        alike[module, text].append(leaf)
    for name, own in plan.breakdown.tied.items():
        module, _, leaf = name.rpartition(".")
        alike[module, f"the same tensor as {own}"].append(leaf)
    for (module, text), names in alike.items():
        found.setdefault(module, []).append((together(names), text))
    return found


def time(plan: Plan) -> Iterator[Part]:
    """The predicted step, the longest parts first within computing and within sending."""
    breakdown = plan.breakdown
    table = grid("a step", "ms", "share", "number", "bytes", "mostly", right=(1, 2, 3, 4))
    parts = {
        "computing, forward": breakdown.forward,
        "computing, backward": breakdown.backward,
        "computing again": breakdown.recomputed,
        "to the host and back": breakdown.offloaded,
        "optimizer": breakdown.optimizer,
        "slicing and padding": breakdown.conversions,
    }

    def row(name: str, seconds: float, *more: str) -> None:
        share = seconds / plan.step_time if plan.step_time else 0.0
        table.add_row(name, f"{seconds * 1e3:.3f}", f"{share:.1%}", *more)

    for name, seconds in parts.items():
        if seconds:
            row(name, seconds)
    groups: dict[tuple[str, str, str], list[Collective]] = defaultdict(list)
    for entry in plan.collectives:
        groups[entry.kind, entry.axis, entry.where].append(entry)
    for (kind, axis, where), found in sorted(groups.items(), key=lambda item: -seconds_of(item[1])):
        size = size_text(sum(entry.bytes for entry in found))
        row(f"{COLLECTIVE[kind]} over {axis}, {where}", seconds_of(found), str(len(found)), size, _mostly(found))
    size = size_text(sum(entry.bytes for entry in plan.collectives))
    row("together", plan.step_time, str(len(plan.collectives)), size)
    yield table
    if plan.collectives:
        yield "bytes: the larger buffer of each on one device, what a gather gathers; computing and sending are not overlapped"


def seconds_of(entries: list[Collective]) -> float:
    """Seconds of some collectives."""
    return sum(entry.seconds for entry in entries)


def _mostly(entries: list[Collective]) -> str:
    """The values, those of repeated blocks together, that take the most time of some collectives."""
    groups: dict[str, list[Collective]] = defaultdict(list)
    for entry in entries:
        groups[wild(entry.value)].append(entry)
    most = max(groups.values(), key=seconds_of)
    return folded([entry.value for entry in most]) + (" and others" if any(entry.more for entry in most) else "")


def memory(plan: Plan) -> Iterator[Part]:
    """Bytes by what they are for when most are held, and what takes most of them."""
    breakdown = plan.breakdown
    table = grid("memory of a device", "bytes", "share", right=(1, 2))
    for kind, size in breakdown.memory.items():
        table.add_row(kind, size_text(size), f"{size / plan.peak_memory:.1%}")
    table.add_row("together, at the peak", size_text(plan.peak_memory), "100.0%")
    yield table
    yield f"the peak is in {breakdown.moment}; most of it is"
    for entry in breakdown.fullest:
        yield f"  {size_text(entry.bytes):>10}  {held(entry)}"
    yield from _again(plan)


def _again(plan: Plan) -> Iterator[Part]:
    """What the backward computes again, or has from the host, instead of keeping it."""
    rerun = {name: plan.breakdown.recompute.get(name, 0.0) for name, lines in plan.recompute.items() if RUN in lines}
    yield from _dearest("computed again for the backward", rerun)
    yield from _dearest("held by the host for the backward", plan.breakdown.offload)


def _dearest(title: str, seconds: Mapping[str, Seconds]) -> Iterator[Part]:
    """A table of what takes so long, the dearest first, repeated blocks as one."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in seconds:
        groups[wild(name)].append(name)
    if not groups:
        return
    table, total = grid(title, "ms", "times", right=(1, 2)), {key: sum(map(seconds.__getitem__, groups[key])) for key in groups}
    for key in sorted(groups, key=lambda key: -total[key]):
        table.add_row(folded(groups[key]), f"{total[key] * 1e3:.3f}", str(len(groups[key])))
    yield ""
    yield table


def grid(*columns: str, right: tuple[int, ...] = ()) -> Table:
    """A table without rules; `right` columns are aligned at the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=any(columns))
    for place, column in enumerate(columns):
        last = place == len(columns) - 1
        table.add_column(
            column, justify="right" if place in right else "left", no_wrap=not last, overflow="ellipsis" if not last else "fold"
        )
    return table
