"""How panels are drawn, with matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from PIL import Image

from veritune.report.panels import Comparison, Panel

COLOURS = ("#1f4e79", "#d9822b", "#3d8f7c", "#a63d57", "#7a6bb0", "#8a8f45", "#5aa2d6", "#6e6e6e")
"""Distinct to colour-blind readers; the first three also differ in lightness, for grey prints."""
QUIET_COLOUR = "#a9afb5"
DASHES = ("solid", (0, (5, 1.5)), (0, (1, 1.2)))
"""Line styles once the colours are used up."""
STYLE: Any = mpl.rc_params_from_file(Path(__file__).with_suffix(".mplstyle"), use_default_template=False)
WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 3.9, 2.75, 160
LEGEND_ROW_INCHES = 0.17
LEGEND_LINE_CHARACTERS = 52
ROW_LABEL_CHARACTERS = 24
COMPARISON_MARGIN_INCHES = 0.75
MOST_MARKED_POINTS = 25
NOTE: Any = {"textcoords": "offset points", "fontsize": 7.5}
"""The look of a number or a word beside a mark."""


def render(panel: Panel | Comparison) -> bytes:
    """A panel as PNG."""
    with mpl.rc_context(STYLE):
        return _as_png(_comparison_figure(panel) if isinstance(panel, Comparison) else _lines_figure(panel))


def _figure(height: float) -> Figure:
    return Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")


def _comparison_figure(comparison: Comparison) -> Figure:
    wrapper = textwrap.TextWrapper(ROW_LABEL_CHARACTERS, break_on_hyphens=False)
    labels = [wrapper.fill(outcome.label) for outcome in comparison.outcomes]
    lines = sum(max(2, label.count("\n") + 1) for label in labels)
    figure = _figure(COMPARISON_MARGIN_INCHES + LEGEND_ROW_INCHES * lines)
    # Over the labels, which may take half of the width.
    figure.suptitle(comparison.title, x=0.01, ha="left", fontsize=STYLE["axes.titlesize"], weight="bold")
    draw_comparison(figure.add_subplot(), comparison, labels)
    return figure


def _lines_figure(panel: Panel) -> Figure:
    labels = [textwrap.fill(line.label, LEGEND_LINE_CHARACTERS) for line in panel.lines]
    columns = legend_columns(labels)
    legend = [labels[start : start + columns] for start in range(0, len(labels), columns)]
    rows = sum(max(label.count("\n") + 1 for label in row) for row in legend)
    figure = _figure(HEIGHT_INCHES + LEGEND_ROW_INCHES * rows)
    handles = draw(figure.add_subplot(), panel)
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower left", ncols=columns, handlelength=1.8, columnspacing=1.4)
    return figure


def draw_comparison(axes: Axes, comparison: Comparison, labels: Sequence[str]) -> None:
    """A row for each setting, first above: a pale dot for each run, a strong one with its interval for their mean."""
    for row, outcome in enumerate(comparison.outcomes):
        colour = COLOURS[row % len(COLOURS)]
        estimate, (low, high) = outcome.estimate, outcome.estimate.interval
        axes.plot(outcome.runs, [row] * len(outcome.runs), "o", color=colour, markersize=3.2, alpha=0.45)
        spread = [[estimate.value - low], [high - estimate.value]]
        axes.errorbar([estimate.value], [row], xerr=spread, fmt="o", color=colour, markersize=5, capsize=3)
        place = (estimate.value, row)
        axes.annotate(f"{100 * estimate.value:.1f}", place, xytext=(0, 4.5), ha="center", color="#3a3f45", **NOTE)
    axes.set_xlabel(comparison.x_label)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.6)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    top = max(max(*outcome.runs, outcome.estimate.interval[1]) for outcome in comparison.outcomes)
    axes.set_xlim(0, min(1.05 * top or 0.1, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")


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
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
        place: Any = {"xycoords": ("axes fraction", "data"), "xytext": (0, 2.5), "ha": "right"}
        axes.annotate(label, (1.0, value), color="#6b7177", bbox=box, **place, **NOTE)
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
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")


def vertical_range(panel: Panel) -> tuple[float, float]:
    """From zero, or from the lowest value below it, to a little above the highest; a share ends at 100%."""
    bottom = min(0.0, *(value for line in panel.lines for value in line.low))
    limit = panel.limit[0] if panel.limit else 0.0
    top = max(0.0, limit, *(value for line in panel.lines for value in line.high))
    if top == bottom:
        return 0.0, 0.1 if panel.share else 1.0
    margin = 0.07 * (top - bottom)
    return bottom - (margin if bottom < 0 else 0.0), min(top + margin, 1.02) if panel.share else top + margin
