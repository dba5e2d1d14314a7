"""Plots of plans side by side: named strategies, budgets, and numbers of devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bokeh.models import BasicTickFormatter, ColumnDataSource, FixedTicker, LabelSet
from bokeh.plotting import figure

from autopar.explain.budget_sweep import SweepStep
from autopar.explain.comparison import Compared
from autopar.explain.html.palette import BLUE, GREEN, GREY, ORANGE, VERMILION
from autopar.explain.html.plots import PlotItem, blank, legend_below
from autopar.explain.scaling import ScalingStep
from autopar.ir.device import Seconds
from autopar.plan.text import joined, milliseconds, size_text

GIB = 2**30
LONG = 3.0  # times the fastest step: longer bars are cut off
CORNERS = (7, -14, "left"), (7, 2, "left"), (-7, -14, "right"), (-7, 2, "right")  # of a label: offsets in pixels
FAR = 2.0  # times the fastest step: what is slower is out of sight at first


def strategy_plots(found: Sequence[Compared]) -> Iterator[PlotItem]:
    """Step time and memory of every strategy that has a plan."""
    planned = [(entry, entry.plan) for entry in found if entry.plan]
    names, height = [entry.strategy for entry, _ in planned], 130 + 26 * len(planned)
    tips = [("", "@name"), ("computing", "@computing{0.000} ms"), ("exposed messages", "@exposed{0.000} ms")]
    made = blank(height, "ms per step", rows=names, tips=tips)
    data = {
        "name": names,
        "computing": [(plan.step_time - entry.exposed) * 1e3 for entry, plan in planned],
        "exposed": [entry.exposed * 1e3 for entry, _ in planned],
    }
    labels = ["computing", "exposed messages"]
    made.hbar_stack(
        ["computing", "exposed"], y="name", height=0.7, source=ColumnDataSource(data), color=[BLUE, ORANGE], legend_label=labels
    )
    legend_below(made)
    says = _fastest(made, [(entry.strategy, plan.step_time) for entry, plan in planned])
    yield PlotItem(id="plot-strategies", title="Step time of the strategies", says=says, model=made)
    sizes = [plan.peak_memory for _, plan in planned]
    made = blank(height, "GiB per device", rows=names, tips=[("", "@name"), ("peak", "@said")])
    source = ColumnDataSource({"name": names, "size": [size / GIB for size in sizes], "said": [*map(size_text, sizes)]})
    made.hbar(y="name", right="size", height=0.7, source=source, color=GREEN, legend_label="peak memory")
    made.x_range.start = 0
    legend_below(made)
    least = min(range(len(sizes)), key=sizes.__getitem__)
    says = f"{names[least]} needs the least memory, {size_text(sizes[least])} per device."
    yield PlotItem(id="plot-strategy-memory", title="Memory of the strategies", says=says, model=made)


def _fastest(made: figure, times: Sequence[tuple[str, Seconds]]) -> str:
    """Limit the axis to `LONG` times the fastest step, and say which strategies exceed it."""
    name, least = min(times, key=lambda pair: pair[1])
    beyond = [other for other, seconds in times if seconds > LONG * least > 0]
    made.x_range.start, made.x_range.end = 0, 1.05e3 * min(LONG * least, max(seconds for _, seconds in times)) or 1.0
    more = f" Beyond the edge: {joined(beyond)}." if beyond else ""
    return f"{len(times)} strategies; {name} is the fastest, {milliseconds(least)} ms.{more}"


def tradeoff_plot(found: Sequence[Compared], sweep: Sequence[SweepStep]) -> PlotItem:
    """Time against memory: the strategies as points, and the fastest plan within each budget as a line."""
    tips = [("", "@name"), ("peak", "@said"), ("step", "@time{0.000} ms")]
    made = blank(360, "GiB per device", "ms per step", tips=tips)
    planned = [(entry.strategy, entry.plan.peak_memory, entry.plan.step_time) for entry in found if entry.plan]
    if sweep:
        steps = [(f"within {size_text(step.budget)}", step.peak_memory, step.step_time) for step in sweep]
        source = _points(steps)
        made.line("memory", "time", source=source, color=BLUE, line_width=2, legend_label="fastest within a budget")
        made.scatter("memory", "time", source=source, color=BLUE, size=8, legend_label="fastest within a budget")
    if planned:
        source = _points(planned)
        made.scatter("memory", "time", source=source, color=VERMILION, size=10, marker="diamond", legend_label="strategies")
        made.add_layout(
            LabelSet(
                x="memory",
                y="time",
                text="name",
                source=source,
                x_offset="aside",
                y_offset="above",
                text_align="align",
                text_font_size="11px",
            )
        )
        _near(made, planned + (steps if sweep else []))
    legend_below(made)
    counted = joined(f"{len(known)} {what}" for known, what in ((sweep, "budgets"), (planned, "strategies")) if known)
    says = f"{counted}: less memory to the left, faster plans below."
    return PlotItem(id="plot-budget", title="Step time against memory", says=says, model=made)


def _near(made: figure, known: Sequence[tuple[str, int, Seconds]]) -> None:
    """Show the plans that take at most `FAR` times the least step; zooming out shows the others."""
    fastest = min(seconds for _, _, seconds in known)
    near = [(size / GIB, seconds * 1e3) for _, size, seconds in known if seconds <= FAR * fastest]
    for data, among in zip((made.x_range, made.y_range), zip(*near, strict=True), strict=True):
        room = 0.15 * (max(among) - min(among)) or 0.1 * max(among)
        data.start, data.end = max(0.0, min(among) - room), max(among) + 2 * room


def _points(found: Sequence[tuple[str, int, Seconds]]) -> ColumnDataSource:
    names, sizes, times = zip(*found, strict=True)
    order = sorted(range(len(found)), key=lambda place: (sizes[place], times[place]))
    corners = [CORNERS[order.index(place) % len(CORNERS)] for place in range(len(found))]  # labels of neighbours lie apart
    aside, above, align = map(list, zip(*corners, strict=True))
    data = {
        "name": [*names],
        "aside": aside,
        "above": above,
        "align": align,
        "memory": [size / GIB for size in sizes],
        "said": [*map(size_text, sizes)],
    }
    return ColumnDataSource({**data, "time": [seconds * 1e3 for seconds in times]})


def scaling_plots(steps: Sequence[ScalingStep], price: float | None, watts: float | None) -> Iterator[PlotItem]:
    """Step time, cost and energy against the number of devices, for the numbers that have a plan."""
    planned = [step for step in steps if not step.refusal]
    if not planned:
        return
    first, counts = planned[0], [step.devices for step in planned]
    made = _against_devices(counts, "ms per step", [step.step_time * 1e3 for step in planned], BLUE, "planned")
    ideal = [first.step_time * first.devices / count * 1e3 for count in counts]
    made.line(counts, ideal, color=GREY, line_dash="dashed", legend_label="ideal")
    legend_below(made)
    times = joined(f"{step.devices} take {milliseconds(step.step_time)} ms" for step in planned)
    yield PlotItem(id="plot-devices", title="Step time against devices", says=f"Devices: {times}.", model=made)
    kind = "tokens" if first.tokens else "samples"
    if price is not None and (first.tokens or first.samples):
        costs = [price * step.per_million / 3600 for step in planned]
        made = _against_devices(counts, f"price of 1M {kind}", costs, GREEN, f"at {price:g} per device hour")
        legend_below(made)
        says = _each(counts, costs, f"per 1M {kind}")
        yield PlotItem(id="plot-cost", title="Cost against devices", says=says, model=made)
    if watts is not None and (first.tokens or first.samples):
        energy = [watts * step.per_million / 3.6e6 for step in planned]
        made = _against_devices(counts, f"kWh for 1M {kind}", energy, ORANGE, f"at most, {watts:g} W a device")
        legend_below(made)
        yield PlotItem(
            id="plot-energy", title="Energy against devices", says=_each(counts, energy, f"kWh per 1M {kind}"), model=made
        )


def _against_devices(counts: Sequence[int], y: str, values: Sequence[float], color: str, label: str) -> figure:
    made = blank(320, "devices", y, log=True, tips=[("devices", "@x"), (y, "@y{0.0000}")])
    made.line(counts, values, color=color, line_width=2, legend_label=label)
    made.scatter(counts, values, color=color, size=9, legend_label=label)
    made.xaxis.ticker = FixedTicker(ticks=[*counts])
    made.yaxis.formatter = BasicTickFormatter(use_scientific=False)
    return made


def _each(counts: Sequence[int], values: Sequence[float], unit: str) -> str:
    return f"{joined(f'{count} devices: {value:.4g}' for count, value in zip(counts, values, strict=True))} {unit}."


__all__ = ["scaling_plots", "strategy_plots", "tradeoff_plot"]
