"""The run folder keeps what it was told, whatever happens to the process or the disk."""

import contextlib
import json
import os
import resource
import shutil

import pytest

from veritune.core.errors import CheckpointError, ConfigError, DataError
from veritune.core.run_folder import RunFolder, require_intact


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


# --- Names that are not ours -------------------------------------------------------------------------------------


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_copies_by_hand_disturb_nothing_and_are_never_deleted(run):
    first = run.save_checkpoint(2, fill, keep=1)
    checkpoints = first.parent
    for name in ("step-best", "step-000002-best", "step-000009", "step-2", "step-0000010"):
        shutil.copytree(first, checkpoints / name)
    (checkpoints / "step-000001").mkdir()
    for step in (3, 4):
        run.save_checkpoint(step, fill, keep=1)
    by_hand = ["step-000001", "step-0000010", "step-000002-best", "step-000009", "step-2", "step-best"]
    assert names(checkpoints) == sorted([*by_hand, "step-000004"])
    said = []
    assert run.latest_checkpoint(said.append).step == 4
    assert len(said) == 1 and "step-000009 is damaged" in said[0]
    assert all((checkpoints / name / "model.safetensors").exists() for name in by_hand[1:])


def test_a_copy_among_rollouts_is_no_step(run):
    run.write_rows("rollouts", 1, [{}])
    run.write_rows("rollouts", 1_000_000, [{}])
    for name in ("step-best.jsonl", "step-000001-old.jsonl", "notes.txt"):
        (run.path / "rollouts" / name).write_text("mine")
    assert run.steps("rollouts") == [1, 1_000_000]
    run.forget_after(5)
    assert names(run.path / "rollouts") == [
        "notes.txt",
        "step-000001-old.jsonl",
        "step-000001.jsonl",
        "step-best.jsonl",
    ]


def test_steps_are_sorted_as_numbers(run):
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        run.save_checkpoint(step, fill, keep=2)
        assert run.latest_checkpoint(pytest.fail).step == step
    assert run.checkpoint_steps() == [1_000_000, 1_000_001]


def test_the_newest_whole_checkpoint_outlives_a_damaged_later_one(run):
    run.save_checkpoint(2, fill, keep=1)
    later = run.save_checkpoint(4, fill, keep=2)
    (later / "model.safetensors").write_text("weightz")
    run.save_checkpoint(3, fill, keep=1)  # a resume from step 2
    assert run.checkpoint_steps() == [3, 4]
    assert run.latest_checkpoint(lambda line: None).step == 3
    run.save_checkpoint(4, fill, keep=1)
    assert run.checkpoint_steps() == [4] and run.latest_checkpoint(pytest.fail).step == 4


def test_what_lies_where_a_checkpoint_belongs_is_moved_aside(run):
    foreign = run.path / "checkpoints" / "step-000001"
    foreign.mkdir(parents=True)
    (foreign / "thesis.tex").write_text("years of work")
    run.save_checkpoint(1, fill, keep=1)
    assert run.latest_checkpoint(pytest.fail).step == 1
    assert (run.path / "discarded-1" / "step-000001" / "thesis.tex").read_text() == "years of work"


def test_what_a_user_puts_into_a_checkpoint_is_left_there(run):
    def fill_deeper(folder):
        fill(folder)
        (folder / "templates").mkdir()
        fill(folder / "templates")

    old = run.save_checkpoint(1, fill_deeper, keep=1)
    (old / "notes.txt").write_text("the good one")
    run.save_checkpoint(2, fill_deeper, keep=1)
    run.save_checkpoint(3, fill_deeper, keep=1)
    assert names(old) == ["notes.txt"] and names(old.parent) == ["step-000001", "step-000003"]


@pytest.mark.parametrize("name", ["../../../precious", "{tmp}/precious", "templates/../../../../precious"])
def test_a_manifest_deletes_nothing_outside_its_folder(run, tmp_path, name):
    (tmp_path / "precious").write_text("mine")
    old = run.save_checkpoint(1, fill, keep=1)
    manifest = json.loads((old / "manifest.json").read_text())
    manifest["sha256"][name.format(tmp=tmp_path)] = "0"
    (old / "manifest.json").write_text(json.dumps(manifest))
    run.save_checkpoint(2, fill, keep=1)
    assert (tmp_path / "precious").read_text() == "mine"
    assert run.checkpoint_steps() == [1, 2]  # not ours any more


def test_a_linked_checkpoint_is_read_and_not_deleted(run, tmp_path):
    moved = run.save_checkpoint(1, fill, keep=1).rename(tmp_path / "elsewhere")
    (run.path / "checkpoints" / "step-000001").symlink_to(moved)
    assert run.latest_checkpoint(pytest.fail).step == 1
    run.save_checkpoint(2, fill, keep=1)
    assert names(moved) == ["manifest.json", "model.safetensors"]


def test_what_a_kill_left_unfinished_goes_at_the_next_start(run):
    old = run.save_checkpoint(1, fill, keep=3)
    run.save_checkpoint(2, fill, keep=3)
    (old / "model.safetensors").unlink()  # killed while it deleted this one
    (old.parent / ".step-000003.partial").mkdir()
    run.write_rows("rollouts", 2, [{}])
    (run.path / "rollouts" / ".step-000003.jsonl.partial").write_text("{")
    run.prune_checkpoints(2, keep=1)
    run.forget_after(2)
    assert names(old.parent) == ["step-000002"] and names(run.path / "rollouts") == ["step-000002.jsonl"]


# --- Damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "manifest",
    [
        "[]", "3", "null", "{}", '{"step": 2}', '{"step": 2, "sha256": {}}', '{"step": 2, "sha256": []}',
        '{"step": 2, "sha256": {"model.safetensors": 7}}', '{"step": true, "sha256": {"a": "b"}}',
        '{"step": "2", "sha256": {"a": "b"}}', '{"step": 2, "sha256": {"": "b"}}', "[" * 100_000, "\xff",
    ],
)  # fmt: skip
def test_a_manifest_of_another_shape_vouches_for_nothing(run, manifest):
    run.save_checkpoint(1, fill, keep=2)
    newest = run.save_checkpoint(2, fill, keep=2)
    (newest / "manifest.json").write_text(manifest, encoding="latin-1")
    said = []
    assert run.latest_checkpoint(said.append).step == 1
    assert len(said) == 1 and "step-000002 is damaged" in said[0] and "\n" not in said[0]


@pytest.mark.parametrize(
    ("file", "text", "read"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"st\n{"step": 3}\n', RunFolder.metrics),
        ("metrics.jsonl", "[1]\n", RunFolder.metrics),
        ("metrics.jsonl", '{"loss": 1}\n', RunFolder.metrics),
        ("metrics.jsonl", '{"step": "1"}\n', RunFolder.metrics),
        ("metrics.jsonl", '{"step": 1, "steps": null}\n', RunFolder.is_finished),
        ("metrics.jsonl", '{"step": 1, "seconds_elapsed": "long"}\n', RunFolder.seconds_spent),
        ("metrics.jsonl", "\x00\x00\n", RunFolder.metrics),
        ("metrics.jsonl", "\xff\n", RunFolder.metrics),
        ("metrics.jsonl", "[" * 100_000 + "\n", RunFolder.metrics),
        ("environment.json", "", RunFolder.environment),
        ("environment.json", "[]", RunFolder.environment),
        ("spent.json", "", RunFolder.seconds_spent),
        ("spent.json", '{"seconds": "ten"}', RunFolder.seconds_spent),
        ("spent.json", "7", RunFolder.seconds_spent),
        ("diverged.json", "{", RunFolder.divergence),
        ("validation/step-000001.jsonl", '{"id": 1}\n{"id', lambda run: run.read_rows("validation", 1)),
        ("validation/step-000001.jsonl", "null\n", lambda run: run.read_rows("validation", 1)),
    ],
)
def test_a_damaged_file_is_named_in_one_line(run, file, text, read):
    (run.path / "validation").mkdir()
    (run.path / file).write_text(text, encoding="latin-1")
    with pytest.raises(DataError) as raised:
        read(run)
    assert str(run.path / file) in str(raised.value) and "\n" not in str(raised.value)


def test_a_policy_that_has_changed_since_it_was_saved_is_refused(run, tmp_path):
    def fill_all(folder):
        fill(folder)
        (folder / "optimizer.safetensors").write_text("moments")

    saved = run.save_checkpoint(1, fill_all, keep=1)
    require_intact(saved)
    copy = shutil.copytree(saved, tmp_path / "copy")
    (copy / "optimizer.safetensors").unlink()
    require_intact(copy)  # nothing that a policy is loaded from
    (copy / "model.safetensors").write_text("weightz")
    with pytest.raises(CheckpointError, match=r"copy is damaged: model\.safetensors does not match its checksum"):
        require_intact(copy)
    (copy / "manifest.json").write_text('{"files": []}')  # another program's
    require_intact(copy)


# --- A full disk -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def largest_file(size):
    """No file can grow beyond `size` bytes, as if the disk were full there: a write of a part, then an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 1, 10, 30, 70, 90, 150, 400, 900, 1500, 3000, 8000])
def test_a_full_disk_loses_nothing_that_was_there(run, size):
    def take_step(step):
        run.write_rows("rollouts", step, [{"text": "x" * 100 * step}])
        run.append_metrics({"step": step, "steps": 9})
        run.save_checkpoint(step, lambda folder: fill(folder, "w" * 1000 * step), keep=2)

    take_step(1)
    last = 1
    with largest_file(size), pytest.raises(CheckpointError, match=r"cannot write .*File too large"):
        for step in range(2, 10):
            take_step(step)
            last = step
    assert run.latest_checkpoint(pytest.fail).step == last
    assert [row["step"] for row in run.metrics()][:last] == list(range(1, last + 1))
    assert not list(run.path.rglob("*.partial"))
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with largest_file(0), pytest.raises(CheckpointError):
        run.forget_after(last)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    run.forget_after(last)
    for step in range(last + 1, 10):
        take_step(step)
    assert run.is_finished() and [row["step"] for row in run.metrics()] == list(range(1, 10))
    assert run.steps("rollouts") == list(range(1, 10)) and run.checkpoint_steps() == [8, 9]


# --- Beginning -----------------------------------------------------------------------------------------------------


def test_a_run_that_appears_while_another_is_made_is_not_overwritten(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    lock = RunFolder.lock

    def lock_late(self):
        (folder / "config.toml").write_text("theirs")
        lock(self)

    monkeypatch.setattr(RunFolder, "lock", lock_late)
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder.create(folder, "ours", {})
    assert (folder / "config.toml").read_text() == "theirs"


def test_what_is_discarded_is_numbered_and_settings_stay(run):
    assert run.discard() is None and not run.holds_work()
    for number in (1, 2):
        run.append_metrics({"step": number})
        run.save_checkpoint(number, fill, keep=1)
        assert run.holds_work() and run.discard() == run.path / f"discarded-{number}"
        assert names(run.path / f"discarded-{number}") == ["checkpoints", "metrics.jsonl"]
    assert names(run.path) == [".lock", "config.toml", "discarded-1", "discarded-2", "environment.json"]
    assert run.metrics() == [] and run.latest_checkpoint(pytest.fail) is None
