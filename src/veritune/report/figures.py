"""What is drawn (panels, made of plain numbers) and how (matplotlib)."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from veritune.report.collect import Curve, Run, Setting, curve
from veritune.report.estimates import time_scale

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
MOST_MARKED_POINTS = 25
MOST_POINTS = 250
"""A line of more steps is drawn as means of consecutive steps."""
LOG_SCALE_ABOVE = 30.0
"""A positive quantity whose largest value is this many times its median is drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Quantity:
    """One thing to look at: a file name, a title, and the metrics that say it, each with its label."""

    name: str
    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    share: bool = False
    """Whether the values are shares of 1, to be drawn as percentages."""
    against_time: bool = False
    limit: tuple[str, str] | None = None
    """A setting that bounds the quantity, and what to call it."""
    only_if_nonzero: bool = False
    quiet: tuple[str, ...] = ()
    """Labels of metrics that stand in the background."""


ACCURACY = Quantity(
    "accuracy",
    "Accuracy",
    "problems solved (%)",
    (("validation_accuracy", "held-out problems"), ("accuracy", "training rollouts")),
    share=True,
    against_time=True,
    quiet=("training rollouts",),
)
VALIDATION_REWARD = Quantity(
    "validation_reward",
    "Reward on held-out problems",
    "mean reward per response",
    (("validation_reward", "total"), ("validation_format_reward", "format")),
    against_time=True,
)
REWARD = Quantity(
    "reward",
    "Reward of training rollouts",
    "mean reward per response",
    (("reward", "total"), ("format_reward", "format"), ("accuracy", "answer")),
    against_time=True,
)
QUANTITIES = (
    ACCURACY,
    VALIDATION_REWARD,
    REWARD,
    Quantity("entropy", "Entropy of the sampling distribution", "nats per token", (("entropy", "training rollouts"),)),
    Quantity(
        "length",
        "Response length",
        "tokens per response",
        (("length", "all"), ("length_correct", "correct"), ("length_incorrect", "incorrect")),
        limit=("max_tokens", "max_tokens"),
    ),
    Quantity(
        "gradient_norm",
        "Gradient norm before clipping",
        "L2 norm",
        (("grad_norm", "gradient norm"),),
        limit=("clip_grad_norm", "clipped above"),
    ),
    Quantity(
        "clip_fraction",
        "Tokens whose ratio was clipped",
        "response tokens (%)",
        (("clip_fraction", "clipped"),),
        share=True,
        only_if_nonzero=True,
    ),
    Quantity("truncation", "Responses cut off at max_tokens", "responses (%)", (("truncated", "cut off"),), share=True),
    Quantity(
        "throughput",
        "Throughput",
        "tokens per second",
        (("rollout_tokens_per_second", "rollout"), ("train_tokens_per_second", "training")),
    ),
    Quantity(
        "seconds",
        "Time of each stage",
        "seconds per step",
        tuple((f"seconds_{stage}", stage) for stage in ("rollout", "grade", "train", "validate")),
    ),
)


@dataclass(frozen=True)
class Line:
    """A line to draw, with its band; entries from `complete` on are means over fewer runs than the rest."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    complete: int
    quiet: bool = False
    """Drawn thin and grey behind the others, without its band."""


@dataclass(frozen=True)
class Panel:
    """One figure: everything that is handed to matplotlib."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    share: bool
    log: bool
    limit: tuple[float, str] | None


# --- What is drawn -----------------------------------------------------------------------------------------------


def make_panels(settings: Sequence[Setting]) -> list[Panel]:
    """Every panel that has something to show.

    One setting has a line for each metric of a quantity; several settings have a panel for each metric, with a line for
    each setting.
    """
    panels = []
    for quantity in QUANTITIES:
        if len(settings) == 1:
            curves = [(label, curve(settings[0].runs, metric)) for metric, label in quantity.metrics]
            panels += _panels(quantity, quantity.name, quantity.title, curves, settings)
            continue
        shown = quantity.metrics[:1] if quantity is ACCURACY else quantity.metrics
        for metric, label in shown:
            curves = [(setting.label, curve(setting.runs, metric)) for setting in settings]
            alone = len(shown) == 1
            name = quantity.name if alone else f"{quantity.name}_{label}"
            title = quantity.title if alone and quantity is not ACCURACY else f"{quantity.title}: {label}"
            panels += _panels(quantity, name, title, curves, settings)
    return panels


def _panels(
    quantity: Quantity, name: str, title: str, curves: Sequence[tuple[str, Curve]], settings: Sequence[Setting]
) -> list[Panel]:
    curves = [(label, each) for label, each in curves if each]
    values = [value for _, each in curves for value in each.mean]
    if all(len(each.steps) < 2 for _, each in curves) or (quantity.only_if_nonzero and not any(values)):
        return []  # a single point is no course; the tables have its number
    runs = [run for setting in settings for run in setting.runs]
    limit = _limit(quantity, runs, max(high for _, each in curves for high in each.high))
    log = not quantity.share and min(values) > 0 and max(values) > LOG_SCALE_ABOVE * median(values)

    def panel(suffix: str, x_label: str, lines: list[Line]) -> Panel:
        return Panel(name + suffix, title, x_label, quantity.unit, tuple(lines), quantity.share, log, limit)

    by_step = [_line(quantity, label, tuple(map(float, each.steps)), each) for label, each in curves]
    panels = [panel("_steps" if quantity.against_time else "", "step", by_step)]
    timed = [(label, each, [x for x in each.seconds if x is not None]) for label, each in curves]
    timed = [(label, each, seconds) for label, each, seconds in timed if len(seconds) == len(each.steps)]
    if quantity.against_time and timed:
        divisor, unit = time_scale(max(max(seconds) for _, _, seconds in timed))
        by_time = [_line(quantity, label, tuple(x / divisor for x in seconds), each) for label, each, seconds in timed]
        panels.append(panel("_time", f"wall-clock time ({unit})", by_time))
    return panels


def _line(quantity: Quantity, label: str, x: tuple[float, ...], each: Curve) -> Line:
    block = math.ceil(len(x) / MOST_POINTS)
    x, mean, low, high = (block_means(values, block) for values in (x, each.mean, each.low, each.high))
    return Line(label, x, mean, low, high, math.ceil(each.complete / block), quiet=label in quantity.quiet)


def block_means(values: Sequence[float], block: int) -> tuple[float, ...]:
    """Means of `block` consecutive values, the last of what remains: a long run's course without its noise."""
    return tuple(fmean(values[start : start + block]) for start in range(0, len(values), block))


def _limit(quantity: Quantity, runs: Sequence[Run], largest: float) -> tuple[float, str] | None:
    """The setting that bounds a quantity, if all runs share it and it is near enough to what is drawn."""
    if quantity.limit is None:
        return None
    key, label = quantity.limit
    values = {run.config.get(key) for run in runs}
    value = values.pop()
    if values or not isinstance(value, (int, float)) or value > 1.5 * largest:
        return None
    return float(value), f"{label} {value:g}" if label != key else f"{key} = {value:g}"


# --- How it is drawn ---------------------------------------------------------------------------------------------


def render(panel: Panel) -> bytes:
    """A panel as PNG."""
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
        )
    _axes_style(axes, panel)
    return handles


def _axes_style(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.margins(x=0.02)
    if panel.log:
        axes.set_yscale("log")
        return
    top = max(max(line.high) for line in panel.lines)
    bottom = min(min(line.low) for line in panel.lines)
    top = max(top, panel.limit[0]) if panel.limit else top
    axes.set_ylim(min(0.0, 1.06 * bottom), min(1.06 * top, 1.02) if panel.share and top <= 1 else 1.08 * top or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    if panel.share:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=panel.x_label == "step"))
