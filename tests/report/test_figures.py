from __future__ import annotations

import io
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from veritune.core.statistics import Estimate
from veritune.report import figures
from veritune.report.figures import COLOURS, STYLE, draw, draw_comparison, legend_columns, render, vertical_range
from veritune.report.panels import Comparison, Line, Outcome, Panel


def line(
    label: str, y: tuple[float, ...], complete: int | None = None, spread: float = 0.1, quiet: bool = False
) -> Line:
    low, high = (tuple(value + sign * spread for value in y) for sign in (-1, 1))
    return Line(label, tuple(map(float, range(len(y)))), y, low, high, len(y) if complete is None else complete, quiet)


def panel(*lines: Line, share: bool = True, limit: tuple[float, str] | None = None) -> Panel:
    return Panel("name", "Title", "step", "unit", lines, share, False, limit, "steps", False)


def test_what_is_handed_to_matplotlib() -> None:
    axes = Figure().add_subplot()
    handles = draw(
        axes,
        panel(line("a", (0.2, 0.4, 0.6), complete=2), line("b", (0.1, 0.1, 0.1), quiet=True), limit=(0.5, "limit")),
    )
    solid, rest, quiet, limit = axes.lines
    assert (list(solid.get_xdata()), list(solid.get_ydata())) == ([0.0, 1.0], [0.2, 0.4])
    assert (list(rest.get_xdata()), list(rest.get_ydata())) == ([1.0, 2.0], [0.4, 0.6])
    assert list(quiet.get_ydata()) == [0.1, 0.1, 0.1]
    assert list(limit.get_ydata()) == [0.5, 0.5]
    (band,) = axes.collections  # the quiet line has none
    top = {round(float(y), 6) for _, y in band.get_paths()[0].vertices}
    assert {0.1, 0.3, 0.5, 0.7} <= top
    assert handles == [solid, quiet]
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (
        "Title",
        "step",
        "unit",
    )


def test_a_comparison_has_a_row_for_each_setting() -> None:
    axes = Figure().add_subplot()
    outcomes = (Outcome("a", (0.5, 0.7), Estimate(0.6, 0.4, 0.8)), Outcome("b", (0.3,), Estimate(0.3)))
    draw_comparison(axes, Comparison(outcomes), ["a", "b"])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    bottom, top = axes.get_ylim()
    assert bottom > top  # the first setting stands above
    runs, mean = axes.lines[0], axes.lines[1]
    assert (list(runs.get_xdata()), list(runs.get_ydata())) == ([0.5, 0.7], [0, 0])
    assert (list(mean.get_xdata()), list(mean.get_ydata())) == ([0.6], [0])
    (bar,) = axes.collections[0].get_segments()
    assert bar.tolist() == [[0.4, 0.0], [0.8, 0.0]]
    assert [text.get_text() for text in axes.texts] == ["60.0", "30.0"]
    assert axes.get_xlim() == pytest.approx((0.0, 0.84))


def test_shares_are_labelled_in_percent() -> None:
    figure = Figure()
    axes = figure.add_subplot()
    draw(axes, panel(line("a", (0.0, 0.4))))
    assert axes.yaxis.get_major_formatter()(0.25, 0) == "25"


def test_legend_lies_below_the_axes_and_inside_the_picture() -> None:
    labels = ["loss_type grpo_clip, epochs_per_rollout_batch 4", "loss_type no_baseline, epochs_per_rollout_batch 1"]
    drawn = []
    with mpl.rc_context({**STYLE}), pytest.MonkeyPatch.context() as patch:
        save = Figure.savefig

        def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
            save(figure, *arguments, **options)
            drawn.append(figure)

        patch.setattr(Figure, "savefig", keep)
        figures.render(panel(*(line(label, (0.2, 0.4)) for label in labels)))
    (figure,) = drawn
    (legend,) = figure.legends
    box, axes = legend.get_window_extent(), figure.axes[0].get_tightbbox()
    assert box.y1 <= axes.y0 + 1
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= -1


def test_legend_columns() -> None:
    assert legend_columns(["all", "correct", "incorrect"]) == 3
    assert legend_columns(["learning_rate 0.0003", "learning_rate 0.0001"]) == 2
    assert legend_columns(["x" * 40, "y"]) == 1


def strokes(png: bytes, colour: str) -> int:
    """Pixels of a picture in a line's colour."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(pixels - wanted).max(axis=-1) <= 4).sum())


def test_pictures_are_small_and_keep_every_colour() -> None:
    rng = np.random.default_rng(0)
    lines = [line(f"setting number {i}", tuple(rng.uniform(0.2, 0.8, 200)), spread=0.05) for i in range(6)]
    png = render(panel(*lines))
    assert len(png) < 60_000
    assert all(strokes(png, colour) > 50 for colour in COLOURS[:6])


def test_a_line_beneath_another_keeps_its_colour_in_the_legend() -> None:
    rng = np.random.default_rng(0)
    flat = [line(label, (0.0,) * 80, spread=0.0) for label in ("above", "beneath")]
    noisy = tuple(rng.uniform(0.0, 0.1, 80))
    png = render(panel(*flat, Line("noisy", flat[0].x, noisy, tuple(y / 2 for y in noisy), (0.1,) * 80, 80)))
    assert strokes(png, COLOURS[1]) > 50


def test_vertical_range() -> None:
    assert vertical_range(panel(line("a", (0.5, 0.6), spread=0.0), share=False)) == (0.0, pytest.approx(0.642))
    assert vertical_range(panel(line("a", (0.5, 0.98), spread=0.0))) == (0.0, 1.02)
    assert vertical_range(panel(line("a", (0.0, 0.0), spread=0.0))) == (0.0, 0.1)
    assert vertical_range(panel(line("a", (0.0, 0.0), spread=0.0), share=False)) == (0.0, 1.0)
    low, high = vertical_range(panel(line("a", (-1.0, 1.0), spread=0.0), share=False))
    assert (low, high) == (pytest.approx(-1.14), pytest.approx(1.14))
    assert vertical_range(panel(line("a", (5.0, 6.0), spread=0.0), share=False, limit=(8.0, "x"))) == (0.0, 8.56)
