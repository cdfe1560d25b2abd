"""How panels are drawn, with matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from veritune.report.panels import Comparison, Panel

COLOURS = ("#1f4e79", "#d9822b", "#3d8f7c", "#a63d57", "#7a6bb0", "#8a8f45", "#5aa2d6", "#6e6e6e")
"""Distinct to colour-blind readers; the first three also differ in lightness, for grey prints."""
QUIET_COLOUR = "#a9afb5"
DASHES = ("solid", (0, (5, 1.5)), (0, (1, 1.2)))
"""Line styles once the colours are used up."""
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelsize": 9,
    "axes.labelcolor": "#3a3f45",
    "axes.edgecolor": "#9aa0a6",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e4e6e9",
    "grid.linewidth": 0.8,
    "xtick.color": "#9aa0a6",
    "ytick.color": "#9aa0a6",
    "xtick.labelcolor": "#3a3f45",
    "ytick.labelcolor": "#3a3f45",
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 3.9, 2.75, 160
LEGEND_ROW_INCHES = 0.17
LEGEND_LINE_CHARACTERS = 52
ROW_LABEL_CHARACTERS = 24
COMPARISON_MARGIN_INCHES = 0.75
MOST_MARKED_POINTS = 25


def render(panel: Panel | Comparison) -> bytes:
    """A panel as PNG."""
    return _render_comparison(panel) if isinstance(panel, Comparison) else _render_lines(panel)


def _render_comparison(comparison: Comparison) -> bytes:
    with mpl.rc_context(STYLE):
        wrapper = textwrap.TextWrapper(ROW_LABEL_CHARACTERS, break_on_hyphens=False)
        labels = [wrapper.fill(outcome.label) for outcome in comparison.outcomes]
        lines = sum(max(2, label.count("\n") + 1) for label in labels)
        height = COMPARISON_MARGIN_INCHES + LEGEND_ROW_INCHES * lines
        figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")
        # Over the labels, which may take half of the width.
        figure.suptitle(comparison.title, x=0.01, ha="left", fontsize=STYLE["axes.titlesize"], weight="bold")
        draw_comparison(figure.add_subplot(), comparison, labels)
        return _as_png(figure)


def draw_comparison(axes: Axes, comparison: Comparison, labels: Sequence[str]) -> None:
    """A row for each setting, first above: a pale dot for each run, a strong one with its interval for their mean."""
    for row, outcome in enumerate(comparison.outcomes):
        colour = COLOURS[row % len(COLOURS)]
        estimate, (low, high) = outcome.estimate, outcome.estimate.interval
        axes.plot(outcome.runs, [row] * len(outcome.runs), "o", color=colour, markersize=3.2, alpha=0.45)
        spread = [[estimate.value - low], [high - estimate.value]]
        axes.errorbar([estimate.value], [row], xerr=spread, fmt="o", color=colour, markersize=5, capsize=3)
        axes.annotate(
            f"{100 * estimate.value:.1f}",
            (estimate.value, row),
            xytext=(0, 4.5),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            color="#3a3f45",
        )
    axes.set_xlabel(comparison.x_label)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.6)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    top = max(max(*outcome.runs, outcome.estimate.interval[1]) for outcome in comparison.outcomes)
    axes.set_xlim(0, min(1.05 * top or 0.1, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}"))


def _render_lines(panel: Panel) -> bytes:
    with mpl.rc_context(STYLE):
        labels = [textwrap.fill(line.label, LEGEND_LINE_CHARACTERS) for line in panel.lines]
        columns = legend_columns(labels)
        rows = sum(
            max(label.count("\n") + 1 for label in labels[start : start + columns])
            for start in range(0, len(labels), columns)
        )
        figure = Figure(
            figsize=(WIDTH_INCHES, HEIGHT_INCHES + LEGEND_ROW_INCHES * rows), dpi=DOTS_PER_INCH, layout="constrained"
        )
        axes = figure.add_subplot()
        handles = draw(axes, panel)
        if len(labels) > 1:
            figure.legend(handles, labels, loc="outside lower left", ncols=columns, handlelength=1.8, columnspacing=1.4)
        return _as_png(figure)


def _as_png(figure: Figure) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    # A palette holds all that a few lines need, at a third of the bytes. The method keeps rare colours, such as the
    # legend's key of a line that lies beneath another, which a median cut would merge into others.
    small = io.BytesIO()
    coloured = Image.open(drawn).convert("RGB")
    few = coloured.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    return small.getvalue()


def legend_columns(labels: Sequence[str]) -> int:
    """As many columns as fit side by side, at most four."""
    longest = max(len(part) for label in labels for part in label.split("\n"))
    return max(1, min(len(labels), 4, LEGEND_LINE_CHARACTERS // (longest + 5)))


def draw(axes: Axes, panel: Panel) -> list[Line2D]:
    """Draw a panel's lines, bands and limit; returns one legend handle a line."""
    handles: list[Line2D] = []
    for index, line in enumerate(panel.lines):
        colour = QUIET_COLOUR if line.quiet else COLOURS[index % len(COLOURS)]
        dashes = DASHES[index // len(COLOURS) % len(DASHES)]
        look: dict[str, Any] = {
            "color": colour,
            "marker": "o" if len(line.x) <= MOST_MARKED_POINTS else "",
            "markersize": 3.2,
            "zorder": 3.0 if line.quiet else 4.0 - index / 100,
        }
        if line.quiet:
            look["linewidth"] = 0.9
        elif line.low != line.high:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.16, linewidth=0)
            if len(line.x) == 1:  # the interval of a single point is no band
                spread = [[line.y[0] - line.low[0]], [line.high[0] - line.y[0]]]
                axes.errorbar(line.x, line.y, spread, color=colour, capsize=3)
        (handle,) = axes.plot(line.x[: line.complete], line.y[: line.complete], linestyle=dashes, **look)
        if line.complete < len(line.x):
            rest = slice(max(line.complete - 1, 0), None)
            axes.plot(line.x[rest], line.y[rest], linestyle=(0, (2, 2)), **look)
        handles.append(handle)
    if panel.limit:
        value, label = panel.limit
        axes.axhline(value, color="#6b7177", linewidth=0.9, linestyle=(0, (4, 3)), zorder=2)
        axes.annotate(
            label,
            (1.0, value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2.5),
            textcoords="offset points",
            ha="right",
            fontsize=7.5,
            color="#6b7177",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
        )
    _axes_style(axes, panel)
    return handles


def _axes_style(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.margins(x=0.02)
    if panel.across == "samples":  # sizes are powers of two as a rule
        sizes = sorted({int(x) for line in panel.lines for x in line.x})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=panel.across == "steps"))
    if panel.log:
        axes.set_yscale("log")
        return
    axes.set_ylim(*vertical_range(panel))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    if panel.share:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}"))


def vertical_range(panel: Panel) -> tuple[float, float]:
    """From zero, or from the lowest value below it, to a little above the highest; a share ends at 100%."""
    bottom = min(0.0, *(value for line in panel.lines for value in line.low))
    limit = panel.limit[0] if panel.limit else 0.0
    top = max(0.0, limit, *(value for line in panel.lines for value in line.high))
    if top == bottom:
        return 0.0, 0.1 if panel.share else 1.0
    margin = 0.07 * (top - bottom)
    return bottom - (margin if bottom < 0 else 0.0), min(top + margin, 1.02) if panel.share else top + margin
