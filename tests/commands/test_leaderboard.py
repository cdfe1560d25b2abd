"""The leaderboard's rules on run folders that keep them, and on ones that break one each."""

import dataclasses
import shutil

import pytest

from veritune.commands.leaderboard import LeaderboardConfig, check_rules, print_leaderboard
from veritune.core.config import to_toml
from veritune.core.run_folder import RunFolder
from veritune.tasks import load_task

CONFIG = LeaderboardConfig(minutes=1)
ACCURACY = {"validation_accuracy": 0.75, "validation_accuracy_low": 0.7, "validation_accuracy_high": 0.8}


@pytest.fixture(scope="module")
def split():
    return [{"id": example.id} for example in load_task(CONFIG).examples("validation")]


@pytest.fixture
def run(tmp_path, split):
    run = RunFolder.create(tmp_path / "run", to_toml(CONFIG), {})
    run.append_metrics({"step": 0, "steps": 9, "seconds_elapsed": 9.0, **ACCURACY})
    run.append_metrics({"step": 1, "steps": 2, "seconds_elapsed": 30.0})
    run.append_metrics({"step": 2, "steps": 2, "seconds_elapsed": 59.9, **ACCURACY})
    run.write_rows("validation", 0, split)
    run.write_rows("validation", 2, split)
    run.save_checkpoint(2, lambda folder: None, keep=2)
    return run


def broken(run):
    return [rule.text for rule in check_rules(run.path) if not rule.kept]


def test_a_run_that_keeps_the_rules(run, capsys):
    assert broken(run) == []
    assert print_leaderboard(run.path) == 0
    told = capsys.readouterr().out
    assert "75.0% (95% 70.0% to 80.0%) at step 2" in told and "59.9 of 60 s" in told and "broken" not in told


def test_a_run_that_ends_late(run, capsys):
    run.append_metrics({"step": 2, "steps": 2, "seconds_elapsed": 60.1, **ACCURACY})
    assert broken(run) == ["ends in time, validations included"]
    assert print_leaderboard(run.path) == 1
    assert "60.1 of 60 s" in capsys.readouterr().out


def test_a_part_of_the_split(run, split):
    run.write_rows("validation", 2, split[:-1])
    assert broken(run) == ["validated on the whole split"]
    run.write_rows("validation", 2, [*split[:-1], split[0]])  # as many, but one of them twice
    assert broken(run) == ["validated on the whole split"]


def test_a_checkpoint_that_is_not_the_final_one(run):
    shutil.move(run.path / "checkpoints" / "step-000002", run.path / "checkpoints" / "step-000001")
    assert broken(run) == ["the final checkpoint counts, not the best"]
    run.save_checkpoint(2, lambda folder: None, keep=2)
    run.append_metrics({"step": 3, "steps": 3, "seconds_elapsed": 59.95})  # not validated
    assert broken(run) == ["the final checkpoint counts, not the best"]


def test_a_resumed_run_is_charged_for_what_it_lost(run):
    run.append_metrics({"step": 3, "steps": 4, "seconds_elapsed": 90.0})
    run.forget_after(2)
    assert broken(run) == ["ends in time, validations included"]


def test_the_files_settings_are_read_again(run):
    other = dataclasses.replace(CONFIG, minutes=2, budget_seconds=None)
    (run.path / "config.toml").write_text(to_toml(other))
    assert check_rules(run.path)[0].evidence == "59.9 of 120 s"
