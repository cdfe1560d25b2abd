"""The run folder keeps what it was told, whatever happens to the process or the disk."""

import json
import os

import pytest

from veritune.core.errors import CheckpointError, ConfigError
from veritune.core.run_folder import RunFolder


@pytest.fixture
def run(tmp_path):
    made = RunFolder.create(tmp_path / "run", "steps = 3\n", {"python": "3.11"})
    yield made
    made.unlock()


def fill(folder, text="weights"):
    (folder / "model.safetensors").write_text(text)


def test_a_new_run_has_its_config_and_environment(run):
    assert (run.path / "config.toml").read_text() == "steps = 3\n"
    assert json.loads((run.path / "environment.json").read_text()) == {"python": "3.11"}


def test_nothing_is_overwritten_and_a_second_writer_is_refused(run):
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder.create(run.path, "", {})
    with pytest.raises(ConfigError, match="another process"):
        RunFolder.open(run.path).lock()


def test_a_row_that_a_killed_process_left_unfinished_is_not_a_row(run):
    run.append_metrics({"step": 1, "loss": 0.5})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert run.metrics() == [{"step": 1, "loss": 0.5}]
    run.forget_after(1)
    run.append_metrics({"step": 2, "loss": 0.25})
    assert [row["step"] for row in run.metrics()] == [1, 2]


def test_resuming_forgets_what_came_after_the_checkpoint(run):
    for step in range(4):
        run.append_metrics({"step": step})
        run.write_rows("rollouts", step, [{"text": "½"}])
    run.forget_after(2)
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]
    assert run.steps("rollouts") == [0, 1, 2]
    assert run.read_rows("rollouts", 2) == [{"text": "½"}]


def test_only_the_newest_checkpoints_are_kept(run):
    for step in (1, 2, 3):
        run.save_checkpoint(step, fill, keep=2)
    assert run.checkpoint_steps() == [2, 3]
    checkpoint = run.latest_checkpoint(pytest.fail)
    assert checkpoint.step == 3
    assert (checkpoint.folder / "model.safetensors").read_text() == "weights"


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "no manifest", "half manifest"])
def test_a_damaged_checkpoint_is_passed_over_in_one_line(run, damage):
    run.save_checkpoint(1, fill, keep=2)
    newest = run.save_checkpoint(2, fill, keep=2)
    weights, manifest = newest / "model.safetensors", newest / "manifest.json"
    {
        "flip": lambda: weights.write_text("weightz"),
        "truncate": lambda: weights.write_text("weig"),
        "remove": weights.unlink,
        "no manifest": manifest.unlink,
        "half manifest": lambda: manifest.write_text(manifest.read_text()[:20]),
    }[damage]()
    said = []
    assert run.latest_checkpoint(said.append).step == 1
    assert len(said) == 1 and "step-000002 is damaged" in said[0] and "\n" not in said[0]


def test_a_checkpoint_that_cannot_be_finished_leaves_the_last_one(run):
    run.save_checkpoint(1, fill, keep=1)

    def disk_full(folder):
        fill(folder)
        raise OSError(28, os.strerror(28))

    with pytest.raises(CheckpointError, match=r"step-000002.*No space left on device"):
        run.save_checkpoint(2, disk_full, keep=1)
    assert run.checkpoint_steps() == [1]
    assert run.latest_checkpoint(pytest.fail).step == 1
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == ["step-000001"]


def test_an_unwritable_place_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        RunFolder.create(tmp_path / "file" / "run", "", {})


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run folder"):
        RunFolder.open(tmp_path)


def test_a_lone_surrogate_is_written_and_read_back(tmp_path):
    run = RunFolder.create(tmp_path / "run", "", {})
    rows = [{"response": "half a pair \udc80 \ud83d, a whole one \U0001f600, é"}, {"response": "\\udc80"}]
    run.write_rows("rollouts", 1, rows)
    assert run.read_rows("rollouts", 1) == rows
    (tmp_path / "run" / "rollouts" / "step-000001.jsonl").read_bytes().decode("utf-8")


def test_a_run_is_finished_when_its_last_step_is_saved(tmp_path):
    run = RunFolder.create(tmp_path / "run", "", {})
    assert not run.is_finished()
    run.append_metrics({"step": 0, "steps": 2})
    run.append_metrics({"step": 1, "steps": 2})
    run.save_checkpoint(1, lambda folder: None, keep=2)
    assert not run.is_finished()
    run.append_metrics({"step": 2, "steps": 2})
    assert not run.is_finished()  # killed before its checkpoint was written
    run.save_checkpoint(2, lambda folder: None, keep=2)
    assert run.is_finished()
    measured = RunFolder.create(tmp_path / "measured", "", {})
    measured.append_metrics({"step": 0, "steps": 0})
    assert measured.is_finished()  # nothing was trained, so there is no checkpoint


def test_the_time_of_forgotten_steps_is_not_forgotten(tmp_path):
    run = RunFolder.create(tmp_path / "run", "", {})
    assert run.seconds_spent() == 0
    for step, seconds in ((0, 4.0), (1, 9.0), (2, 15.0)):
        run.append_metrics({"step": step, "steps": 5, "seconds_elapsed": seconds})
    for _ in range(2):
        run.forget_after(1)
        assert (run.metrics()[-1]["seconds_elapsed"], run.seconds_spent()) == (9.0, 15.0)
    run.append_metrics({"step": 2, "steps": 5, "seconds_elapsed": 21.0})
    assert run.seconds_spent() == 21.0


def test_a_divergence_is_kept_with_its_reason(tmp_path):
    run = RunFolder.create(tmp_path / "run", "", {})
    assert run.divergence() is None
    run.mark_diverged("the loss is nan")
    assert RunFolder.open(tmp_path / "run").divergence() == "the loss is nan"
