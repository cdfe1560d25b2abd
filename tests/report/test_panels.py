from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veritune.report.collect import collect_settings
from veritune.report.panels import Panel, block_means, compare_settings, make_panels

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


def test_settings_are_compared_by_where_their_runs_ended(make_run: Make) -> None:
    def validated(step: int, accuracy: float) -> dict[str, Any]:
        return {"step": step, "validation_accuracy": accuracy}

    paths = [
        make_run(f"{rate}-{seed}", [validated(0, 0.1), validated(5, end)], seed=seed, learning_rate=rate)
        for rate, ends in ((0.01, (0.5, 0.7)), (0.02, (0.3,)))
        for seed, end in enumerate(ends)
    ]
    paths.append(make_run("untrained", [validated(0, 0.25)], learning_rate=0.03))
    comparison = compare_settings(collect_settings(paths))
    assert comparison is not None
    several, lone, untrained = comparison.outcomes
    assert (several.label, several.runs) == ("learning_rate 0.01", (0.5, 0.7))
    # Student's t with one degree of freedom: 0.6 ± 12.706 × 0.1414 / √2, far beyond what the axis of a share holds
    assert several.estimate.value == pytest.approx(0.6)
    assert several.estimate.interval[0] < 0.0
    assert (lone.runs, lone.estimate.value) == ((0.3,), 0.3)
    assert (untrained.runs, untrained.estimate.value) == ((0.25,), 0.25)
    assert compare_settings(collect_settings(paths[:2])) is None  # two seeds of one setting


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


def test_a_metric_that_nobody_knows_is_drawn_if_it_changes(make_run: Make) -> None:
    rows = [training(1, margin=0.5, epoch=1, margin_low=0.1), training(2, margin=0.7, epoch=1, margin_low=0.2)]
    panels = panels_of([make_run("a", rows)])
    assert panels["margin"].lines[0].y == (0.5, 0.7)
    assert panels["margin"].detail and not panels["reward_steps"].detail
    assert not {"epoch", "steps", "step", "margin_low", "seconds_elapsed"} & set(panels)


def best_of_n(**values: float) -> dict[str, Any]:
    measured = {"pass_unbiased_at_1": 0.3, "pass_unbiased_low_at_1": 0.2, "pass_unbiased_high_at_1": 0.4}
    return {"step": 0, "steps": 0, **measured, "pass_unbiased_at_16": 0.8, "pass_unbiased_at_4": 0.6, **values}


def test_samples_are_drawn_against_their_number(make_run: Make) -> None:
    panel = panels_of([make_run("a", [best_of_n(best_at_1=0.3, best_at_4=0.4)])])["samples"]
    assert (panel.x_label, panel.across) == ("samples per problem (N)", "samples")
    assert [(line.label, line.x, line.y) for line in panel.lines] == [
        ("pass@N", (1.0, 4.0, 16.0), (0.3, 0.6, 0.8)),
        ("Best@N", (1.0, 4.0), (0.3, 0.4)),
    ]
    assert (panel.lines[0].low[0], panel.lines[0].high[0]) == (0.2, 0.4)
    two = [make_run("b", [best_of_n()], policy="x"), make_run("c", [best_of_n(pass_unbiased_at_16=0.9)])]
    lines = panels_of(two)["samples_pass_at_N"].lines
    assert [(line.label, line.y[-1]) for line in lines] == [("policy x", 0.8), ("policy embedded", 0.9)]
