from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from veritune.core.statistics import Estimate
from veritune.report import remarks
from veritune.report.collect import Curve, collect_run, collect_settings


def course(mean: Sequence[float], steps: Sequence[int] | None = None, spread: float = 0.0) -> Curve:
    steps = range(1, len(mean) + 1) if steps is None else steps
    low, high = (tuple(value + sign * spread for value in mean) for sign in (-1, 1))
    return Curve(tuple(steps), tuple(10.0 * step for step in steps), tuple(mean), low, high, len(mean))


def test_accuracy_rose_fell_or_neither() -> None:
    low, high = Estimate(0.2, 0.17, 0.23), Estimate(0.6, 0.56, 0.64)
    assert remarks.accuracy_changed(low, high, Estimate(0.4, 0.35, 0.45), "40") == (
        "Held-out accuracy rose from 20% to 60% after 40 steps (+40.0 points, 95% interval +35.0 to +45.0)."
    )
    assert remarks.accuracy_changed(high, low, Estimate(-0.4, -0.45, -0.35), "40") == (
        "Held-out accuracy fell from 60% to 20% after 40 steps (-40.0 points, 95% interval -45.0 to -35.0)."
    )
    assert remarks.accuracy_changed(low, Estimate(0.22), Estimate(0.02, -0.022, 0.062), "5") == (
        "Held-out accuracy did not change measurably: from 20% to 22% after 5 steps "
        "(+2.0 points, 95% interval -2.2 to +6.2)."
    )


def test_entropy_collapse_names_the_step_after_which_it_stayed_low() -> None:
    entropy = course([0.5, 0.04, 0.2, 0.04, 0.03, 0.02])
    flat = course([0.1, 0.60, 0.61], steps=[0, 3, 6])
    assert remarks.entropy_collapsed(entropy, flat) == (
        "Entropy fell below 0.05 nats at step 4 and stayed there; held-out accuracy has been flat since (60% to 61%)."
    )
    fallen = course([0.6, 0.4], steps=[3, 6])
    assert remarks.entropy_collapsed(entropy, fallen) == (
        "Entropy fell below 0.05 nats at step 4 and stayed there; held-out accuracy has fallen since, from 60% to 40%."
    )
    assert (
        remarks.entropy_collapsed(entropy, course([], [])) == "Entropy fell below 0.05 nats at step 4 and stayed there."
    )


@pytest.mark.parametrize("entropy", [[0.5, 0.04, 0.06], [0.04, 0.03, 0.02], [0.5, 0.3, 0.05]])
def test_no_entropy_collapse(entropy: list[float]) -> None:
    assert remarks.entropy_collapsed(course(entropy), course([0.5, 0.5], [0, 3])) is None


def test_responses_cut_off_counts_the_last_ten_steps() -> None:
    # Ten steps at 20% after ten at 0: the share at the end is 20%, not 10%.
    assert remarks.responses_cut_off(course([0.0] * 10 + [0.2] * 10), 200) == (
        "20% of the responses were cut off at max_tokens (200) in the last 10 steps."
    )
    assert remarks.responses_cut_off(course([0.0625, 0.075]), 64) == (
        "6.9% of the responses were cut off at max_tokens (64) in the last 2 steps."
    )
    assert remarks.responses_cut_off(course([0.9] + [0.04] * 10), 200) is None


def test_length_changed() -> None:
    assert remarks.length_changed(course([40.0] * 10 + [80.0] * 10)) == (
        "Responses grew from 40 to 80 tokens (first and last 10 steps)."
    )
    assert remarks.length_changed(course([80.0] * 10 + [40.0] * 10)) == (
        "Responses shrank from 80 to 40 tokens (first and last 10 steps)."
    )
    assert remarks.length_changed(course([40.0] * 10 + [59.0] * 10)) is None
    assert remarks.length_changed(course([40.0, 400.0])) is None


def test_accuracy_past_its_peak_needs_intervals_apart() -> None:
    assert remarks.accuracy_past_its_peak(course([0.2, 0.7, 0.5], [0, 10, 20], spread=0.04)) == (
        "Held-out accuracy was best at step 10 (70%) and has fallen since, to 50%."
    )
    assert remarks.accuracy_past_its_peak(course([0.2, 0.7, 0.65], [0, 10, 20], spread=0.04)) is None


def test_accuracy_still_rising_looks_at_the_last_quarter() -> None:
    # The last quarter of steps 0 to 40 begins at 30: 0.60 - 0.55 = 5 points.
    assert remarks.accuracy_still_rising(course([0.2, 0.4, 0.5, 0.55, 0.6], [0, 10, 20, 30, 40])) == (
        "Held-out accuracy was still rising: 5.0 points came in the last quarter of the run."
    )
    assert remarks.accuracy_still_rising(course([0.2, 0.4, 0.5, 0.59, 0.6], [0, 10, 20, 30, 40])) is None
    assert remarks.accuracy_still_rising(course([0.2, 0.7, 0.5, 0.55, 0.6], [0, 10, 20, 30, 40])) is None


def test_format_learned_and_lost() -> None:
    assert remarks.format_learned(course([0.1, 0.96, 0.9, 0.97])) == (
        "The answer format was learned: its reward first reached 0.95 at step 2."
    )
    assert remarks.format_learned(course([0.96, 0.99])) is None
    assert remarks.format_learned(course([0.1, 0.96, 0.5])) is None
    assert remarks.format_lost(course([1.0] * 10 + [0.9] * 10)) == (
        "The format reward fell from 1.00 to 0.90 (first and last 10 steps)."
    )
    assert remarks.format_lost(course([1.0] * 10 + [0.96] * 10)) is None


def test_gradient_spikes_and_clipping() -> None:
    assert remarks.gradient_spikes(course([0.2, 0.2, 5.0, 0.2])) == (
        "The gradient norm spiked to 5 at step 3, 25 times its median."
    )
    assert remarks.gradient_spikes(course([0.2, 0.2, 1.9])) is None
    assert (
        remarks.gradients_clipped(course([2.0, 2.0, 2.0, 0.5]), 1.0)
        == "The gradient was clipped to 1 in 75% of the steps."
    )
    assert remarks.gradients_clipped(course([2.0, 0.5]), 1.0) is None
    assert remarks.gradients_clipped(course([2.0]), None) is None


def test_groups_ratios_and_engines() -> None:
    assert remarks.groups_teach_nothing(course([0.75, 0.85])) == (
        "In 80% of the groups of the last 2 steps every response was paid the same, so they had no gradient."
    )
    assert remarks.groups_teach_nothing(course([0.5])) is None
    assert remarks.ratios_clipped(course([0.3])) == (
        "30% of the response tokens were clipped at the end: updates are far off-policy."
    )
    assert remarks.ratios_clipped(course([0.2])) is None
    assert remarks.engine_disagrees(course([1e-9, 0.25, 0.02])) == (
        "Engine and trainer disagree on log-probabilities: mismatch KL reached 0.25 nats at step 2."
    )
    assert remarks.engine_disagrees(course([1e-9, 0.009])) is None


def test_training_ahead_of_validation() -> None:
    assert remarks.training_ahead(course([0.9, 0.8]), course([0.2, 0.6], [0, 2])) == (
        "Training problems are solved more often than held-out ones: 85% over the last 2 steps against 60%."
    )
    assert remarks.training_ahead(course([0.7]), course([0.6], [1])) is None


def test_seeds_and_settings() -> None:
    assert remarks.seeds_disagree([0.5, 0.7, 0.6]) == "Seeds end far apart: from 50% to 70% held-out accuracy."
    assert remarks.seeds_disagree([0.5, 0.55]) is None
    assert remarks.seeds_disagree([0.5]) is None
    clear = {"a": Estimate(0.5, 0.45, 0.55), "b": Estimate(0.7, 0.65, 0.75), "c": Estimate(0.6, 0.5, 0.7)}
    assert remarks.best_setting(clear) == (
        "Highest held-out accuracy at the end: b (70%); its interval overlaps with that of c."
    )
    many = clear | {"d": clear["c"], "e": clear["c"]}
    assert remarks.best_setting(many) == (
        "Highest held-out accuracy at the end: b (70%); its interval overlaps with those of 3 others."
    )
    del clear["c"]
    assert remarks.best_setting(clear) == (
        "Highest held-out accuracy at the end: b (70%); its interval lies above those of all other settings."
    )
    del clear["b"]
    assert remarks.best_setting(clear) is None


def test_time_spent() -> None:
    assert remarks.time_spent({"rollout": 60.0, "train": 35.0, "validate": 4.9, "grade": 0.1}) == (
        "Time went to rollout 60%, train 35%, validate 4.9%."
    )
    assert remarks.time_spent({"validate": 5.0}) is None


def test_unfinished() -> None:
    assert remarks.unfinished(0, 10, 0) == "No step has been recorded yet."
    assert remarks.unfinished(4, 10, 5) == "The run stands at step 4 of 10; these are its numbers so far."
    assert remarks.unfinished(10, 10, 11) is None
    assert remarks.unfinished(4, None, 5) is None


def test_remarks_of_a_run(make_run: Callable[..., Path]) -> None:
    path = make_run("a", [{"step": 0}, {"step": 1, "entropy": float("nan")}])
    (path / "refused").mkdir()
    (path / "refused" / "step-000002.jsonl").write_text("")
    assert list(remarks.run_remarks(collect_run(path))) == [
        "The run stands at step 1 of 2; these are its numbers so far.",
        "entropy is nan at step 1.",
        f"Step 2 was refused; its batch is in {path / 'refused'}.",
    ]


def test_remarks_of_a_setting(make_run: Callable[..., Path]) -> None:
    def held_out(value: float, low: float, high: float) -> dict[str, float]:
        name = "validation_accuracy"
        return {name: value, f"{name}_low": low, f"{name}_high": high, "seconds_validate": 5.0}

    steady = {"zero_variance": 0.1, "grad_norm": 0.5, "seconds_rollout": 30.0}
    rows = [
        {"step": 0, **held_out(0.2, 0.17, 0.23)},
        {"step": 1, "accuracy": 0.3, "truncated": 0.25, "seconds_train": 20.0, **steady},
        {"step": 2, "accuracy": 0.5, "truncated": 0.35, "seconds_train": 10.0, **steady, **held_out(0.6, 0.56, 0.64)},
    ]
    (setting,) = collect_settings([make_run("a", rows)])
    # Half widths of 0.03 and 0.04 make sqrt(0.0009 + 0.0016) = 0.05.
    assert list(remarks.setting_remarks(setting)) == [
        "Held-out accuracy rose from 20% to 60% after 2 steps (+40.0 points, 95% interval +35.0 to +45.0).",
        "30% of the responses were cut off at max_tokens (64) in the last 2 steps.",
        "Time went to rollout 60%, train 30%, validate 10%.",
    ]
