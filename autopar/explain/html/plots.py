"""Shared parts of all plots: colours only for data, and a sentence that describes what is shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from bokeh.embed import json_item
from bokeh.models import FactorRange, HoverTool, InlineStyleSheet, LayoutDOM, Range1d
from bokeh.plotting import figure

TOOLS = "pan,box_zoom,wheel_zoom,reset"
LONG = 20  # characters of a legend's entry of which a phone has room for two beside each other


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotItem:
    """A plot with its place on the page, its title, and what it shows in a sentence, for those who cannot see it."""

    id: str
    title: str
    says: str
    model: LayoutDOM

    @property
    def item(self) -> object:
        """The plot as data for `Bokeh.embed.embed_item`."""
        return renumbered(json_item(self.model, self.id))


def renumbered(item: Mapping[str, object]) -> Mapping[str, object]:
    """A plot's data with ids numbered from its start: Bokeh's continue from those made earlier in the process."""
    ids: dict[str, str] = {}

    def named(held: dict[str, object]) -> dict[str, object]:
        return {key: ids.setdefault(str(of), f"p{len(ids)}") if key in ("id", "root_id") else of for key, of in held.items()}

    found: Mapping[str, object] = json.loads(json.dumps(item), object_hook=named)
    return found


def blank(
    height: int,
    x: str,
    y: str = "",
    *,
    rows: list[str] | None = None,
    to: float | None = None,
    log: bool = False,
    tips: list[tuple[str, str]] | None = None,
) -> figure:
    """An empty figure as wide as the page; its lines and letters take the page's colours, by CSS variables.

    Args:
        height: in pixels.
        x, y: what the axes measure, with the unit.
        rows: names of the rows, if y has names, from the top.
        to: the end of x, which begins at 0.
        log: whether both axes are logarithmic.
        tips: the tooltip of a glyph: pairs of a name and a field.
    """
    ranges = {"x_range": Range1d(0, to, bounds="auto")} if to is not None else {}
    scale = "log" if log else "linear"
    made = figure(
        height=height, sizing_mode="stretch_width", tools=TOOLS, active_drag=None, active_scroll=None, toolbar_location="above",
        x_axis_label=x, y_axis_label=y, output_backend="canvas", background_fill_color=None, border_fill_color=None,
        outline_line_color=None, x_axis_type=scale, y_axis_type=scale if rows is None else "auto",
        **ranges, **({"y_range": FactorRange(factors=rows[::-1])} if rows else {}),
    )  # fmt: skip
    made.toolbar.logo = None
    made.xgrid.grid_line_alpha = made.ygrid.grid_line_alpha = 0.4
    if tips:
        made.add_tools(HoverTool(tooltips=tips, visible=False))
    return made


def legend_below(made: figure) -> None:
    """Put the legend under the plot, in as many columns as fit on a phone; a click on an entry hides what it names."""
    legend = made.legend[0]
    longest = max(len(str(item.label.value)) for item in legend.items)
    legend.ncols, legend.click_policy = 2 if longest > LONG else 3, "hide"
    legend.background_fill_color = legend.border_line_color = None
    legend.label_text_font_size, legend.spacing, legend.padding, legend.margin = "12px", 4, 4, 0
    legend.location = "left"
    legend.stylesheets = [InlineStyleSheet(css=".bk-label { color: var(--ink) !important; }")]
    made.add_layout(legend, "below")


__all__ = ["PlotItem", "blank", "legend_below", "renumbered"]
