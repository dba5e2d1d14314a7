"""Plots of one step: what every stream does, and what the memory holds."""

from __future__ import annotations

from collections.abc import Sequence

from bokeh.models import ColumnDataSource, HoverTool, Label
from bokeh.plotting import figure

from autopar.explain.html.palette import CYCLE, HATCHED, OF_KIND, OF_PURPOSE
from autopar.explain.html.plots import PlotItem, blank, legend_below
from autopar.explain.html.streams import StreamInterval
from autopar.explain.memory_curve import MemoryCurve
from autopar.plan.text import joined, milliseconds, size_text

TIPS = [("", "@name"), ("what", "@kind"), ("from", "@start{0.000} ms"), ("takes", "@took"), ("", "@more")]
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def timeline_plot(found: Sequence[StreamInterval]) -> PlotItem:
    """A row per stream, with intervals coloured by kind."""
    end = max((one.stop for one in found), default=0.0)
    streams = [*dict.fromkeys(one.stream for one in found)]
    kinds = [*dict.fromkeys(one.kind for one in found)]
    made = blank(170 + 34 * len(streams), "ms", rows=streams, to=end * 1e3, tips=TIPS)
    made.ygrid.grid_line_color = None
    for place, kind in enumerate(kinds):
        color = OF_KIND.get(kind, CYCLE[place % len(CYCLE)])
        hatch = {"hatch_pattern": "/", "hatch_color": "white", "hatch_alpha": 0.5} if kind in HATCHED else {}
        source = _intervals([one for one in found if one.kind == kind])
        made.hbar(
            y="stream", left="start", right="stop", height=0.8, source=source, color=color, line_width=0.3,
            line_color=color, legend_label=kind, **hatch,
        )  # fmt: skip
    legend_below(made)
    says = f"A step of {milliseconds(end)} ms, as it is simulated. Rows: {joined(streams)}. Colours: {joined(kinds)}."
    return PlotItem(id="plot-timeline", title="The step, stream by stream", says=says, model=made)


def _intervals(found: Sequence[StreamInterval]) -> ColumnDataSource:
    def more(one: StreamInterval) -> str:
        said = [f"{one.count} of these"] * (one.count > 1)
        said += [size_text(one.bytes), f"exposed {milliseconds(one.exposed)} ms"] if one.bytes else []
        return ", ".join(said)

    data = {
        "stream": [one.stream for one in found],
        "kind": [one.kind for one in found],
        "name": [one.name for one in found],
        "start": [round(one.start * 1e3, 6) for one in found],
        "stop": [round(one.stop * 1e3, 6) for one in found],
        "took": [f"{milliseconds(one.seconds)} ms" for one in found],
        "more": [more(one) for one in found],
    }
    return ColumnDataSource(data)


def memory_plot(curve: MemoryCurve) -> PlotItem:
    """What a device holds, by purpose, at the moments of a step."""
    total = curve.total
    top, place = float(total.max()), int(total.argmax())
    scale, unit = next(((size, name) for size, name in UNITS if top >= size), UNITS[-1])
    names = [*curve.purposes]
    made = blank(380, "operators of the step, in order", unit, to=curve.count - 1)
    data = {f"p{number}": curve.purposes[name] / scale for number, name in enumerate(names)}
    texts = {f"t{number}": [*map(size_text, curve.purposes[name])] for number, name in enumerate(names)}
    whole = {"total": total / scale, "sum": [*map(size_text, total)], "said": [*curve.said], "moment": [*curve.moments]}
    source = ColumnDataSource(data={**data, **texts, **whole})
    colors = [OF_PURPOSE[name] for name in names]
    made.varea_stack([*data], x="moment", source=source, color=colors, legend_label=names, fill_alpha=0.85)
    line = made.line("moment", "total", source=source, line_width=2, color=OF_PURPOSE["buffers"])
    tips = [("", "@said"), ("total", "@sum"), *((name, f"@t{number}") for number, name in enumerate(names))]
    made.add_tools(HoverTool(renderers=[line], mode="vline", tooltips=tips, visible=False))
    made.y_range.start, made.y_range.end = 0, 1.1 * top / scale
    _marks(made, curve, place, top / scale)
    legend_below(made)
    says = f"The peak is {size_text(top)}, in {curve.said[place]}. Filled by {joined(names)}."
    return PlotItem(id="plot-memory", title="Memory over the step", says=says, model=made)


def _marks(made: figure, curve: MemoryCurve, place: int, top: float) -> None:
    """Where the backward begins, and the peak."""
    made.vspan(x=[curve.forward], line_dash="dashed", line_color=OF_PURPOSE["buffers"])
    for x, text, align in ((curve.forward, "forward \u2190 ", "right"), (curve.forward, " \u2192 backward", "left")):
        made.add_layout(Label(x=x, y=4, y_units="screen", text=text, text_align=align, text_font_size="12px"))
    made.scatter([curve.moments[place]], [top], size=11, marker="inverted_triangle", color="#d55e00", legend_label="peak")


__all__ = ["memory_plot", "timeline_plot"]
