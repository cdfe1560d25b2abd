"""A budget of wall-clock time, on a clock of its own: the last validation and checkpoint end before it does."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from veritune.commands.leaderboard import LeaderboardConfig
from veritune.core.budget import Pace
from veritune.core.config import TrainingConfig
from veritune.core.errors import ConfigError, TrainingError
from veritune.core.run_folder import Checkpoint, RunFolder
from veritune.trainer import loop as training
from veritune.trainer.loop import train
from veritune.trainer.session import Session

VALIDATION, UPDATE, SAVING = 20.0, 7.0, 3.0


def test_updates_left_by_hand():
    pace = Pace(updates=[100.0, 4.0, 8.0, 4.0, 4.0, 4.0], validations=[40.0, 16.0], checkpoints=[8.0])
    # 1.25 * 8 = 10 s an update (the first is long ago), 1.25 * 40 = 50 s to validate, 1.25 * 8 = 10 s to save.
    assert [pace.updates_left(seconds) for seconds in (59, 69, 70, 79, 80, 160)] == [0, 0, 1, 1, 2, 10]
    assert pace.updates_left(math.inf) == math.inf
    assert Pace(validations=[40.0]).updates_left(51) == 1
    assert Pace(validations=[40.0]).updates_left(50) == 0


def test_the_pace_of_a_resumed_run_is_that_of_its_rows():
    rows = [
        {"step": 0, "seconds_validate": 9.0, "seconds_elapsed": 9.0},
        {"step": 1, "seconds_rollout": 2.0, "seconds_train": 3.0, "seconds_elapsed": 14.0},
        {"step": 2, "seconds_rollout": 1.0, "seconds_train": 3.0, "seconds_validate": 8.0, "seconds_elapsed": 26.0},
    ]
    assert Pace.of(rows) == Pace(updates=[5.0, 4.0], validations=[9.0, 8.0])


@dataclass
class Clock:
    now: float = 1000.0
    saved: list[tuple[int, float]] = field(default_factory=list)

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    def validate(session: Session, step: int) -> dict[str, Any]:
        clock.now += VALIDATION
        return {"validation_accuracy": 0.5, "seconds_validate": VALIDATION}

    def save(run: RunFolder, step: int, *_: Any, keep: int) -> None:
        clock.now += SAVING
        folder = run.path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        clock.saved.append((step, clock.now))

    monkeypatch.setattr(training, "time", clock)
    monkeypatch.setattr(training, "validate", validate)
    monkeypatch.setattr(training, "save_checkpoint", save)
    return clock


def follow(clock, run, budget, *, checkpoint=None, steps=10_000, kill_after=None):
    config = TrainingConfig(learning_rate=1.0, budget_seconds=budget, validate_every=4, checkpoint_every=5)
    taken = []

    class Killed(BaseException):
        pass

    def update(step):
        taken.append(step)
        clock.now += UPDATE
        if step == kill_after:
            raise Killed
        return {"seconds_train": UPDATE}

    session = Session(config, None, None, None, run, checkpoint, began=clock.now)
    if kill_after is None:
        train(session, None, steps=steps, update=update)
    else:
        with pytest.raises(Killed):
            train(session, None, steps=steps, update=update)
    return taken


@pytest.mark.parametrize("budget", [70, 100, 137.5, 250, 600, 1000])
def test_everything_ends_before_the_budget_and_little_of_it_is_left(tmp_path, clock, budget):
    run = RunFolder.create(tmp_path / "run", "", {})
    taken = follow(clock, run, budget)
    rows = run.metrics()
    assert rows[-1]["step"] == rows[-1]["steps"] == taken[-1] == clock.saved[-1][0]
    assert "validation_accuracy" in rows[-1]
    assert rows[-1]["seconds_elapsed"] <= budget and clock.saved[-1][1] - 1000.0 <= budget
    # One more update would have fitted at most with a scheduled validation and all the margins of what comes after it.
    assert budget - (clock.saved[-1][1] - 1000.0) < 1.25 * (UPDATE + 2 * VALIDATION + SAVING)
    assert all(row["steps"] > row["step"] for row in rows[:-1])
    assert run.is_finished()


def test_the_steps_end_a_run_that_has_time_left(tmp_path, clock):
    run = RunFolder.create(tmp_path / "run", "", {})
    assert follow(clock, run, 1e6, steps=6) == [1, 2, 3, 4, 5, 6]
    assert [row["steps"] for row in run.metrics()] == [6] * 7


def test_a_resumed_run_goes_on_with_the_time_that_is_left(tmp_path, clock):
    run = RunFolder.create(tmp_path / "run", "", {})
    follow(clock, run, 300, kill_after=8)  # 20 + 8 * 7 + 20 + 3 s: rows to step 7, a checkpoint after step 5
    spent = run.metrics()[-1]["seconds_elapsed"]
    assert spent == pytest.approx(VALIDATION + 7 * UPDATE + VALIDATION + SAVING)
    run.forget_after(5)
    assert run.metrics()[-1]["step"] == 5
    assert run.seconds_spent() == spent
    run.forget_after(5)  # killed again before its first row
    clock.now += 5000  # nobody was at work
    taken = follow(clock, run, 300, checkpoint=Checkpoint(5, run.path))
    rows = run.metrics()
    assert taken[0] == 6 and rows[6]["step"] == 6
    assert rows[6]["seconds_elapsed"] == pytest.approx(spent + UPDATE)
    assert rows[-1]["seconds_elapsed"] <= 300 and rows[-1]["step"] == rows[-1]["steps"]


def test_a_run_that_is_resumed_without_time_left_only_validates(tmp_path, clock):
    run = RunFolder.create(tmp_path / "run", "", {})
    follow(clock, run, 300, kill_after=8)
    run.forget_after(5)
    assert follow(clock, run, 130, checkpoint=Checkpoint(5, run.path)) == []
    row = run.metrics()[-1]
    assert row["step"] == row["steps"] == 5 and "validation_accuracy" in row
    assert run.is_finished()


def test_a_budget_that_the_first_validation_spends_is_refused(tmp_path, clock):
    run = RunFolder.create(tmp_path / "run", "", {})
    with pytest.raises(TrainingError, match="budget_seconds is 40, but loading and the first validation took 20 s"):
        follow(clock, run, 40)


def test_a_leaderboard_has_its_rules():
    assert LeaderboardConfig(hours=4).budget_seconds == 14400
    assert LeaderboardConfig(minutes=10).budget_seconds == 600
    assert LeaderboardConfig(minutes=10).prompt == "r1_zero"
    for settings, said in (
        ({}, "hours is None and minutes is None"),
        ({"hours": 1, "minutes": 2}, "give one of them"),
        ({"minutes": 1, "budget_seconds": 61}, "budget_seconds is 61"),
        ({"minutes": 0}, "minutes is 0; it must be positive and finite"),
        ({"minutes": float("nan")}, "minutes is nan; it must be positive and finite"),
        ({"hours": float("inf")}, "hours is inf; it must be positive and finite"),
        ({"hours": 1, "validation_examples": 5}, "validation_examples is 5; it must be left alone: the whole split"),
        ({"minutes": 1, "temperature": 0.7}, "temperature is 0.7"),
        ({"minutes": 1, "prompt": "compact"}, "prompt is 'compact'"),
        ({"minutes": 1, "reward": "question_only"}, "reward is 'question_only'"),
        ({"minutes": 1, "schedule": "linear"}, "schedule is 'linear'"),
    ):
        with pytest.raises(ConfigError, match=said):
            LeaderboardConfig(**settings)
