from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veritune.core.statistics import Estimate
from veritune.report import tables
from veritune.report.collect import collect_settings

Make = Callable[..., Path]
Response = Callable[..., dict[str, Any]]
NAME = "validation_accuracy"


def held_out(step: int, value: float, low: float, high: float, **more: float) -> dict[str, float]:
    return {"step": step, NAME: value, f"{NAME}_low": low, f"{NAME}_high": high, **more}


def test_written() -> None:
    share, plain = tables.ACCURACY, tables.REWARD
    assert tables.written(None, share) == "–"
    assert tables.written(Estimate(0.631, 0.589, 0.672), share) == "63.1% [58.9, 67.2]"
    assert tables.written(Estimate(0.0004), plain, signed=True) == "+0.000"
    assert tables.written(Estimate(-0.0004, -0.5, 0.25), plain, signed=True) == "+0.000 [-0.500, +0.250]"
    assert tables.written(Estimate(0.05, -0.01, 0.11), share, signed=True) == "+5.0 points [-1.0, +11.0]"


def test_results_of_one_run_have_intervals_from_its_responses(make_run: Make, response: Response) -> None:
    before = [
        response(str(i), "x", reward, tokens=n) for i, (reward, n) in enumerate([(0, 4), (0.1, 6), (0.1, 8), (1, 10)])
    ]
    after = [response(str(i), "x", 1.0, tokens=10, cut=i == 0) for i in range(4)]
    rows = [
        held_out(0, 0.25, 0.05, 0.7, validation_reward=0.3, validation_length=7.0, validation_truncated=0.0),
        held_out(2, 1.0, 0.51, 1.0, validation_reward=1.0, validation_length=10.0, validation_truncated=0.25),
    ]
    (setting,) = collect_settings([make_run("a", rows, validation={0: before, 2: after})])
    table = {row[0]: row[1:] for row in tables.result_table(setting).rows}
    # The row's own interval; change by Newcombe: sqrt(0.49^2 + 0.45^2) = 0.6653 down, sqrt(0 + 0.2^2) = 0.2 up.
    assert table["Problems solved"] == ("25.0% [5.0, 70.0]", "100.0% [51.0, 100.0]", "+75.0 points [+8.5, +95.0]")
    # Rewards 0, 0.1, 0.1, 1: mean 0.3, deviation 0.469042, t(3) = 3.1824: half width 0.746341.
    assert table["Reward"][0] == "0.300 [-0.446, 1.046]"
    # Lengths 4, 6, 8, 10: mean 7, deviation 2.581989, half width 4.108502.
    assert table["Response length (tokens)"][:2] == ("7.0 [2.9, 11.1]", "10.0 [10.0, 10.0]")
    # Wilson's interval of 0 of 4 and of 1 of 4.
    assert table["Cut off at max_tokens"][:2] == ("0.0% [0.0, 49.0]", "25.0% [4.6, 69.9]")


def test_results_over_seeds_compare_each_seed_with_itself(make_run: Make) -> None:
    paths = []
    for seed, (first, last) in enumerate([(0.10, 0.60), (0.20, 0.71), (0.15, 0.64)]):
        rows = [held_out(0, first, 0, 1), held_out(2, last, 0, 1, seconds_elapsed=60.0 * (seed + 1))]
        paths.append(make_run(f"{seed}", rows, seed=seed))
    settings = collect_settings(paths)
    (row,) = tables.result_table(settings[0]).rows
    # Changes 0.50, 0.51, 0.49: mean 0.5, deviation 0.01, half width 4.3027 * 0.01 / sqrt(3) = 0.024842.
    assert row[3] == "+50.0 points [+47.5, +52.5]"
    # Before: mean 0.15, deviation 0.05, half width 0.124208. After: mean 0.65, deviation 0.055678, half width 0.138312.
    assert row[1:3] == ("15.0% [2.6, 27.4]", "65.0% [51.2, 78.8]")
    (line,) = tables.settings_table(settings).rows
    assert line[:3] == ("this run", "0, 1, 2", "2")
    assert line[-1] == "120 seconds"
    runs = tables.runs_table(settings).rows
    assert [(Path(run[0]).name, run[2], run[3], run[5], run[6]) for run in runs] == [
        ("0", "0", "2 of 2", "60.0% [0.0, 100.0]", "60 seconds"),
        ("1", "1", "2 of 2", "71.0% [0.0, 100.0]", "120 seconds"),
        ("2", "2", "2 of 2", "64.0% [0.0, 100.0]", "3.0 minutes"),
    ]


def test_a_run_before_its_first_step_has_no_after(make_run: Make) -> None:
    (setting,) = collect_settings([make_run("a", [held_out(0, 0.25, 0.2, 0.3)])])
    assert tables.result_table(setting).rows == (("Problems solved", "25.0% [20.0, 30.0]"),)
    assert tables.result_table(setting).header == ("Held-out problems", "at step 0")
    (setting,) = collect_settings([make_run("b", [])])
    assert tables.result_table(setting).rows == ()
    assert tables.validated_steps(setting) == "–"


def test_the_steps_of_uneven_seeds_are_told(make_run: Make) -> None:
    a = make_run("a", [held_out(0, 0.1, 0, 1), held_out(30, 0.1, 0, 1, seconds_elapsed=10.0)], steps=80)
    b = make_run("b", [held_out(0, 0.1, 0, 1), held_out(80, 0.1, 0, 1, seconds_elapsed=30.0)], steps=80, seed=1)
    (setting,) = collect_settings([a, b])
    assert tables.validated_steps(setting) == "30 to 80"
    assert tables.validated_after(setting) == "20 seconds"


def test_several_samples(make_run: Make) -> None:
    values = {"pass_unbiased": 0.5, "pass": 0.45, "best": 0.3, "majority": 0.25}
    row: dict[str, float] = {"step": 0}
    for name, value in values.items():
        row |= {f"{name}_at_4": value, f"{name}_low_at_4": value - 0.1, f"{name}_high_at_4": value + 0.1}
    settings = collect_settings([make_run("a", [row])])
    assert tables.samples_table(settings).rows == (
        ("4", "50.0% [40.0, 60.0]", "45.0% [35.0, 55.0]", "30.0% [20.0, 40.0]", "25.0% [15.0, 35.0]"),
    )
    assert tables.samples_table(collect_settings([make_run("b", [])])).rows == ()


def test_siblings_give_no_interval(make_run: Make, response: Response) -> None:
    responses = [response("1", "x", 1.0), response("1", "y", 0.1), response("2", "z", 0.1)]
    (setting,) = collect_settings([make_run("a", [], validation={0: responses})])
    assert tables.batch_estimate(setting.runs[0].before, "validation_reward", 0) is None


def test_difference_configuration_and_environment(make_run: Make) -> None:
    paths = [make_run(f"{rate}", [], learning_rate=rate, schedule="linear", run="x") for rate in (1e-4, 3e-4)]
    settings = collect_settings(paths)
    assert tables.difference_table(settings) == tables.Table(
        ("Key", "learning_rate 0.0001", "learning_rate 0.0003"), (("learning_rate", "0.0001", "0.0003"),)
    )
    common = dict(tables.config_table(settings).rows)
    assert common["schedule"] == "linear" and common["seed"] == "0"
    assert "learning_rate" not in common and "run" not in common
    environment = dict(tables.environment_table([run for setting in settings for run in setting.runs]).rows)
    assert environment == {
        "recipe": "grpo", "python": "3.12.1", "gpus": "–", "versions: torch": "2.13.0", "git_revision": "–",
    }  # fmt: skip


@pytest.mark.parametrize(("metric", "step"), [("validation_reward", 7), ("validation_entropy", 0)])
def test_no_interval_where_the_responses_do_not_say_it(
    make_run: Make, response: Response, metric: str, step: int
) -> None:
    (setting,) = collect_settings([make_run("a", [], validation={0: [response("1", "x", 1.0)]})])
    assert tables.batch_estimate(setting.runs[0].before, metric, step) is None
