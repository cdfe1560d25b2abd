from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from veritune.report.collect import collect_settings
from veritune.report.figures import (
    COLOURS,
    STYLE,
    Line,
    Panel,
    block_means,
    draw,
    legend_columns,
    make_panels,
    render,
)

Make = Callable[..., Path]


def training(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "reward": 0.1 * step,
        "format_reward": 1.0,
        "accuracy": 0.05 * step,
        "seconds_elapsed": 60.0 * step,
        **more,
    }


def panels_of(paths: list[Path]) -> dict[str, Panel]:
    return {panel.name: panel for panel in make_panels(collect_settings(paths))}


def test_reward_is_split_and_drawn_against_steps_and_time(make_run: Make) -> None:
    panels = panels_of([make_run("a", [training(1), training(2), training(3), training(4)])])
    steps, clock = panels["reward_steps"], panels["reward_time"]
    assert [line.label for line in steps.lines] == ["total", "format", "answer"]
    assert steps.lines[0].x == (1.0, 2.0, 3.0, 4.0)
    assert steps.lines[0].y == pytest.approx((0.1, 0.2, 0.3, 0.4))
    assert steps.lines[2].y == pytest.approx((0.05, 0.1, 0.15, 0.2))
    assert clock.lines[0].x == pytest.approx((1.0, 2.0, 3.0, 4.0))  # 60 to 240 seconds, in minutes
    assert (steps.x_label, clock.x_label) == ("step", "wall-clock time (minutes)")
    assert steps.y_label == "mean reward per response"


def test_validation_has_its_interval_as_band(make_run: Make) -> None:
    rows = [
        {
            "step": step,
            "validation_accuracy": v,
            "validation_accuracy_low": v - 0.1,
            "validation_accuracy_high": v + 0.1,
        }
        for step, v in ((0, 0.2), (10, 0.6))
    ]
    panel = panels_of([make_run("a", rows)])["accuracy_steps"]
    (line,) = panel.lines
    assert (line.low, line.high) == (pytest.approx((0.1, 0.5)), pytest.approx((0.3, 0.7)))
    assert "accuracy_time" not in panels_of([make_run("b", rows)])  # no row says when


def test_several_settings_have_a_line_each_and_a_panel_for_each_part(make_run: Make) -> None:
    paths = [
        make_run(
            f"{rate}-{seed}",
            [training(1, reward=rate * 100 + seed), training(2, reward=1.0)],
            seed=seed,
            learning_rate=rate,
        )
        for rate in (0.01, 0.02)
        for seed in (0, 1)
    ]
    panels = panels_of(paths)
    total = panels["reward_total_steps"]
    assert total.title == "Reward of training rollouts: total"
    assert [line.label for line in total.lines] == ["learning_rate 0.01", "learning_rate 0.02"]
    assert [(line.y[0], line.low[0], line.high[0]) for line in total.lines] == [(1.5, 1.0, 2.0), (2.5, 2.0, 3.0)]
    assert {"reward_format_steps", "reward_answer_time"} <= set(panels)


def test_clip_fraction_is_drawn_only_if_something_was_clipped(make_run: Make) -> None:
    never = panels_of([make_run("a", [training(1, clip_fraction=0.0), training(2, clip_fraction=0.0)])])
    once = panels_of([make_run("b", [training(1, clip_fraction=0.0), training(2, clip_fraction=0.01)])])
    assert "clip_fraction" not in never
    assert once["clip_fraction"].lines[0].y == (0.0, 0.01)


def test_single_points_and_empty_runs_have_no_panels(make_run: Make) -> None:
    assert panels_of([make_run("a", [{"step": 0, "validation_accuracy": 0.2}])]) == {}
    assert panels_of([make_run("b", [])]) == {}


def test_limits_are_drawn_where_they_are_near(make_run: Make) -> None:
    rows = [training(1, length=50.0, grad_norm=0.1), training(2, length=60.0, grad_norm=0.2)]
    panels = panels_of([make_run("a", rows)])
    assert panels["length"].limit == (64.0, "max_tokens = 64")
    assert panels["gradient_norm"].limit is None  # 1.0 is far above 0.2
    both = panels_of([make_run("b", rows), make_run("c", rows, max_tokens=70)])
    assert both["length_all"].limit is None  # the runs do not share it


def test_spikes_make_the_axis_logarithmic(make_run: Make) -> None:
    spiky = panels_of([make_run("a", [training(s, grad_norm=100.0 if s == 2 else 1.0) for s in (1, 2, 3)])])
    calm = panels_of([make_run("b", [training(s, grad_norm=20.0 if s == 2 else 1.0) for s in (1, 2, 3)])])
    assert (spiky["gradient_norm"].log, calm["gradient_norm"].log) == (True, False)


def test_long_runs_are_drawn_as_means_of_blocks(make_run: Make) -> None:
    assert block_means((1.0, 3.0, 5.0, 7.0, 9.0), 2) == (2.0, 6.0, 9.0)
    panel = panels_of([make_run("a", [{"step": s, "entropy": float(s)} for s in range(1, 502)])])["entropy"]
    (line,) = panel.lines
    assert len(line.x) == 167  # 501 steps in blocks of 3
    assert line.y[:2] == (2.0, 5.0)
    assert line.complete == 167


def line(
    label: str, y: tuple[float, ...], complete: int | None = None, spread: float = 0.1, quiet: bool = False
) -> Line:
    low, high = (tuple(value + sign * spread for value in y) for sign in (-1, 1))
    return Line(label, tuple(map(float, range(len(y)))), y, low, high, len(y) if complete is None else complete, quiet)


def panel(*lines: Line, share: bool = True, limit: tuple[float, str] | None = None) -> Panel:
    return Panel("name", "Title", "step", "unit", lines, share, False, limit)


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


def test_shares_are_labelled_in_percent() -> None:
    figure = Figure()
    axes = figure.add_subplot()
    draw(axes, panel(line("a", (0.0, 0.4))))
    assert axes.yaxis.get_major_formatter()(0.25, 0) == "25"


def test_legend_lies_below_the_axes_and_inside_the_picture() -> None:
    from veritune.report import figures

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


def test_pictures_are_small_and_keep_every_colour() -> None:
    rng = np.random.default_rng(0)
    lines = [line(f"setting number {i}", tuple(rng.uniform(0.2, 0.8, 200)), spread=0.05) for i in range(6)]
    png = render(panel(*lines))
    assert len(png) < 60_000
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    for colour in COLOURS[:6]:
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels - wanted).max(axis=-1) <= 4).sum() > 50, colour
