from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veritune.core.errors import ConfigError, DataError
from veritune.core.statistics import Estimate
from veritune.report.collect import (
    collect_run,
    collect_settings,
    curve,
    make_labels,
    number,
    setting_change,
    setting_estimate,
)

Make = Callable[..., Path]
Response = Callable[..., dict[str, Any]]


def test_mean_lowest_and_highest_over_seeds(make_run: Make) -> None:
    a = make_run(
        "a", [{"step": 1, "reward": 0.2, "seconds_elapsed": 10.0}, {"step": 2, "reward": 0.4, "seconds_elapsed": 20.0}]
    )
    b = make_run(
        "b",
        [{"step": 1, "reward": 0.4, "seconds_elapsed": 14.0}, {"step": 2, "reward": 0.8, "seconds_elapsed": 26.0}],
        seed=1,
    )
    (setting,) = collect_settings([a, b])
    each = curve(setting.runs, "reward")
    assert each.steps == (1, 2)
    assert each.seconds == pytest.approx((12.0, 23.0))
    assert each.mean == pytest.approx((0.3, 0.6))
    assert (each.low, each.high) == ((0.2, 0.4), (0.4, 0.8))
    assert each.complete == 2


def test_a_seed_that_stopped_early_ends_the_complete_part(make_run: Make) -> None:
    a = make_run("a", [{"step": s, "reward": 1.0} for s in (1, 2, 3)])
    b = make_run("b", [{"step": 1, "reward": 0.0}], seed=1)
    (setting,) = collect_settings([a, b])
    each = curve(setting.runs, "reward")
    assert each.mean == (0.5, 1.0, 1.0)
    assert each.complete == 1


def test_a_validation_keeps_its_interval_and_a_rollout_has_none(make_run: Make) -> None:
    row = {"step": 1, "accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}
    row |= {f"validation_{name}": value for name, value in row.items() if name != "step"}
    run = collect_run(make_run("a", [row]))
    assert (curve([run], "validation_accuracy").low, curve([run], "validation_accuracy").high) == ((0.4,), (0.6,))
    assert (curve([run], "accuracy").low, curve([run], "accuracy").high) == ((0.5,), (0.5,))


def test_missing_and_non_finite_numbers_are_left_out(make_run: Make) -> None:
    rows = [
        {"step": 1, "length_correct": None},
        {"step": 2, "length_correct": float("nan")},
        {"step": 3, "length_correct": 7},
    ]
    each = curve([collect_run(make_run("a", rows))], "length_correct")
    assert (each.steps, each.mean) == ((3,), (7.0,))
    assert number({"flag": True}, "flag") is None
    assert number({"far": float("inf")}, "far") is None


def test_runs_that_differ_in_seed_alone_are_one_setting(make_run: Make) -> None:
    paths = [
        make_run(f"{lr}-{seed}", [], seed=seed, learning_rate=lr, run=f"{lr}-{seed}")
        for lr in (3e-4, 1e-4)
        for seed in (1, 0)
    ]
    settings = collect_settings(paths)
    assert [setting.label for setting in settings] == ["learning_rate 0.0003", "learning_rate 0.0001"]
    assert [[run.seed for run in setting.runs] for setting in settings] == [["0", "1"], ["0", "1"]]
    assert settings[1].difference == {"learning_rate": "0.0001"}


def test_a_key_that_only_another_recipe_has_is_no_difference_of_its_own(make_run: Make) -> None:
    grpo = [make_run(f"g{clip}", [], cliprange=clip) for clip in (0.1, 0.2)]
    sft = make_run("s", [], environment={"recipe": "sft"}, dataset_size=128, steps=9)
    labels = [setting.label for setting in collect_settings([*grpo, sft])]
    assert labels == [
        "recipe grpo, steps 2, cliprange 0.1",
        "recipe grpo, steps 2, cliprange 0.2",
        "recipe sft, steps 9, cliprange unset",
    ]


def test_labels_that_grow_too_long_name_the_fewest_keys() -> None:
    long = "x" * 80
    differences = [
        {"a": "1", "b": "1", "c": long},
        {"a": "1", "b": "2", "c": long + "y"},
        {"a": "2", "b": "2", "c": "z"},
    ]
    assert make_labels(differences) == ["a 1, b 1", "a 1, b 2", "a 2, b 2"]
    assert make_labels(differences[:2]) == ["b 1", "b 2"]
    assert make_labels([{}]) == [""]
    assert make_labels([{"recipe": "sft", "b": "1"}, {"recipe": "grpo", "b": "2"}]) == ["sft", "grpo"]
    assert make_labels([{"recipe": "sft", "b": "1"}, {"recipe": "sft", "b": "2"}]) == [
        "recipe sft, b 1",
        "recipe sft, b 2",
    ]


def test_labels_that_grow_too_long_become_numbers(make_run: Make) -> None:
    paths = [make_run(name, [], policy=name * 90) for name in "ab"]
    assert [setting.label for setting in collect_settings(paths)] == ["setting 1", "setting 2"]


def test_planned_steps_come_from_the_rows(make_run: Make) -> None:
    assert collect_run(make_run("a", [{"step": 0, "steps": 7}], steps=2)).planned_steps == 7
    assert collect_run(make_run("b", [], steps=2)).planned_steps == 2
    assert collect_run(make_run("c", [{"step": 0}], steps=3)).planned_steps == 3
    assert collect_run(make_run("d", [{"step": 0}], steps="many")).planned_steps is None


def test_a_run_given_twice_counts_once(make_run: Make) -> None:
    path = make_run("a", [{"step": 0}])
    (setting,) = collect_settings([path, path.parent / "." / path.name])
    assert len(setting.runs) == 1


def test_first_and_last_validation_over_seeds(make_run: Make) -> None:
    def rows(first: float, last: float) -> list[dict[str, float]]:
        name = "validation_accuracy"
        return [{"step": k, name: v, f"{name}_low": 0.0, f"{name}_high": 1.0} for k, v in ((0, first), (2, last))]

    (setting,) = collect_settings([make_run(f"{s}", rows(0.1, last), seed=s) for s, last in enumerate((0.5, 0.7))])
    first = setting_estimate(setting, "validation_accuracy", last=False)
    last = setting_estimate(setting, "validation_accuracy", last=True)
    assert first is not None and last is not None
    assert (first.value, last.value) == (pytest.approx(0.1), pytest.approx(0.6))
    # t(1) = 12.7062 times 0.1 is past both bounds of a proportion.
    assert (last.low, last.high) == (0.0, 1.0)
    moved = setting_change(setting, "validation_accuracy")
    assert moved is not None and moved.low is not None
    assert (moved.value, moved.low) == (pytest.approx(0.5), pytest.approx(0.5 - 12.7062 * 0.1))


def test_a_seed_with_one_validation_counts_before_and_not_after(make_run: Make) -> None:
    done = make_run("a", [{"step": 0, "validation_reward": 0.1}, {"step": 2, "validation_reward": 0.9}])
    begun = make_run("b", [{"step": 0, "validation_reward": 0.3}], seed=1)
    (setting,) = collect_settings([done, begun])
    first = setting_estimate(setting, "validation_reward", last=False)
    assert first is not None and first.value == pytest.approx(0.2)
    assert setting_estimate(setting, "validation_reward", last=True) == Estimate(0.9)
    assert setting_change(setting, "validation_reward") == Estimate(pytest.approx(0.8))


def test_a_torn_last_row_is_no_row(make_run: Make) -> None:
    path = make_run("a", [{"step": 0, "validation_accuracy": 0.5}, {"step": 1, "reward": 0.3}])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    assert [row["step"] for row in collect_run(path).rows] == [0, 1]


def test_a_broken_row_in_the_middle_is_named(make_run: Make) -> None:
    path = make_run("a", [{"step": 0}])
    (path / "metrics.jsonl").write_text('{"step": 0}\n{"step"\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl has a broken row"):
        collect_run(path)
    (path / "metrics.jsonl").write_text('{"step": 0}\n{"reward": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl row 2 has no step"):
        collect_run(path)


def test_damaged_samples_are_passed_over_and_named(make_run: Make, response: Response) -> None:
    path = make_run("a", [{"step": 0}], validation={0: [response("1", "x", 1.0)], 2: [response("1", "y", 0.1)]})
    (path / "validation" / "step-000002.jsonl").write_text('{"id": "1", "que')
    (path / "rollouts").mkdir()
    (path / "rollouts" / "step-000001.jsonl").write_text(json.dumps({"id": "1"}) + "\n")
    (path / "environment.json").write_text("{")
    run = collect_run(path)
    assert run.before is not None and run.before.responses[0].text == "x"
    assert run.after is None and run.rollouts == ()
    assert [fault.split(" ")[0] for fault in run.faults] == [
        "validation/step-000002.jsonl",
        "rollouts/step-000001.jsonl",
        "environment.json",
    ]


def test_first_middle_and_last_rollouts(make_run: Make, response: Response) -> None:
    batches = {step: [response(f"{step}", "x", 1.0, advantage=0.5)] for step in (1, 2, 3, 4, 5, 6)}
    run = collect_run(make_run("a", [], rollouts=batches))
    assert [batch.step for batch in run.rollouts] == [1, 4, 6]
    assert run.rollouts[0].responses[0].advantage == 0.5


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.toml"):
        collect_run(tmp_path)
