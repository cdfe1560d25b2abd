"""`veritune resume`: what it locks, what it asks, what it refuses, and that it loses nothing unasked."""

import json
import os
import shutil

import pytest

from veritune.cli import main
from veritune.commands import launch
from veritune.core.errors import CheckpointError, ConfigError
from veritune.core.run_folder import RunFolder
from veritune.model.policy import save_policy
from veritune.recipes.config import GRPOConfig

STEPS = 3


def call(capsys, *arguments):
    """Exit code, standard output and standard error of a call."""
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    code = exit_info.value.code
    return (0 if code is None else code), *capsys.readouterr()


@pytest.fixture(scope="module")
def policy_folder(random_policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    save_policy(random_policy, folder)
    return folder


@pytest.fixture(scope="module")
def finished(policy_folder, tmp_path_factory):
    """A run of three steps with a checkpoint after each, the last two of which are kept."""
    config = GRPOConfig(
        policy=str(policy_folder), run=tmp_path_factory.mktemp("runs") / "run", steps=STEPS, checkpoint_every=1,
        rollout_batch_size=4, group_size=2, train_batch_size=4, max_tokens=6, validation_examples=2, threads=1,
    )  # fmt: skip
    return launch.launch("grpo", config)


@pytest.fixture
def run(finished, tmp_path):
    return RunFolder.open(shutil.copytree(finished, tmp_path / "run"))


def tree(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damage(run):
    for step in run.checkpoint_steps():
        (run.path / "checkpoints" / f"step-{step:06d}" / "model.safetensors").write_bytes(b"")


def steady(run):
    return [{key: value for key, value in row.items() if "second" not in key} for row in run.metrics()]


def test_a_run_is_locked_before_any_of_it_is_read(run, monkeypatch):
    """While the policy loads, another process cannot finish the run; rows that it wrote before are seen."""
    (run.path / "checkpoints" / "step-000003" / "model.safetensors").write_bytes(b"")  # so that there is work left
    looked = []

    def load(*_, **__):
        with pytest.raises(ConfigError, match="another process"):
            RunFolder.open(run.path).lock()
        looked.append(True)
        raise ConfigError("seen enough")

    monkeypatch.setattr(launch, "load_policy", load)
    with pytest.raises(ConfigError, match="seen enough"):
        launch.resume(run.path)
    assert looked
    run.lock()  # and it is let go

    def read(*_):
        raise AssertionError("read without the lock")

    for name in ("latest_checkpoint", "metrics", "environment", "forget_after", "discard"):
        monkeypatch.setattr(RunFolder, name, read)
    for restart in (False, True):
        with pytest.raises(ConfigError, match="another process"):
            launch.resume(run.path, restart=restart)
    run.unlock()


def test_without_a_readable_checkpoint_nothing_is_touched_until_it_is_asked_for(capsys, run, finished):
    damage(run)
    before = tree(run.path)
    code, _, error = call(capsys, "resume", run.path)
    assert code == 1 and error.count("\n") == 1
    assert "has no checkpoint that can be read" in error and "--restart" in error
    assert tree(run.path) == before

    code, out, _ = call(capsys, "resume", run.path, "--restart")
    assert code == 0 and "discarded-1" in out
    kept = tree(run.path / "discarded-1")
    assert kept == {
        path: data for path, data in before.items() if path.name not in ("config.toml", "environment.json", ".lock")
    }
    assert steady(run) == steady(RunFolder.open(finished))
    weights = "checkpoints/step-000003/model.safetensors"
    assert (run.path / weights).read_bytes() == (finished / weights).read_bytes()


def test_a_run_that_was_killed_before_it_did_anything_just_begins(capsys, run, finished):
    run.discard()
    shutil.rmtree(run.path / "discarded-1")
    code, *_ = call(capsys, "resume", run.path)
    assert code == 0 and steady(run) == steady(RunFolder.open(finished))


def test_a_finished_run_begins_again_only_if_asked(capsys, run):
    rows = (run.path / "metrics.jsonl").read_bytes()
    assert "has already taken all of its 3 steps" in call(capsys, "resume", run.path)[1]
    assert (run.path / "metrics.jsonl").read_bytes() == rows
    assert call(capsys, "resume", run.path, "--restart")[0] == 0
    assert (run.path / "discarded-1" / "metrics.jsonl").read_bytes() == rows
    assert run.checkpoint_steps() == [2, 3]


def test_copies_of_checkpoints_do_not_end_a_resume(capsys, run, finished):
    checkpoints = run.path / "checkpoints"
    for name in ("step-best", "step-000002-best", "step-000007"):
        shutil.copytree(checkpoints / "step-000002", checkpoints / name)
    shutil.rmtree(checkpoints / "step-000003")
    code, out, error = call(capsys, "resume", run.path)
    assert code == 0, error
    assert "checkpoint step-000007 is damaged" in out
    assert steady(run) == steady(RunFolder.open(finished))
    assert {"step-best", "step-000002-best", "step-000007", "step-000002", "step-000003"} == set(
        os.listdir(checkpoints)
    )


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("config.toml", "", 2),
        ("config.toml", "steps = 3\n", 2),
        ("config.toml", "steps = ", 2),
        ("environment.json", "", 1),
        ("environment.json", "{}", 1),
        ("environment.json", '{"recipe": ["grpo"]}', 1),
        ("environment.json", '{"recipe": "chess"}', 1),
        ("metrics.jsonl", '{"step": 0}\nrust\n', 1),
        ("spent.json", "[]", 1),
    ],
)
def test_a_damaged_file_of_a_run_is_one_line_that_names_it(capsys, run, file, text, code):
    shutil.rmtree(run.path / "checkpoints" / "step-000003")
    (run.path / file).write_text(text)
    before = tree(run.path)
    exit_code, out, error = call(capsys, "resume", run.path)
    assert exit_code == code and error.count("\n") == 1
    assert str(run.path / file) in error and "see --debug" not in error and "Traceback" not in out
    assert tree(run.path) == before


def test_a_run_of_an_earlier_version_is_refused_in_one_line_and_left_as_it_is(capsys, run):
    flat = (run.path / "config.toml").read_text().partition("\n[")[0]
    (run.path / "config.toml").write_text(f'engine_dtype = "auto"\ncountdown_numbers = 3\n{flat}\n')
    before = tree(run.path)
    code, _, error = call(capsys, "resume", run.path)
    assert code == 2 and error.count("\n") == 1 and len(error) < 300
    assert f"{run.path} was made with other settings than this version has" in error and "'engine_dtype'" in error
    assert {path: data for path, data in tree(run.path).items() if path in before} == before
    assert call(capsys, "report", run.path)[0] == 0


def test_a_report_on_damaged_files_names_them(capsys, run):
    (run.path / "environment.json").write_text("[")
    assert call(capsys, "report", run.path)[0] == 0
    assert "environment.json could not be read" in (run.path / "report.html").read_text()
    (run.path / "config.toml").write_text("")
    code, _, error = call(capsys, "report", run.path)
    assert code == 2 and str(run.path / "config.toml") in error and error.count("\n") == 1


def test_a_changed_checkpoint_is_no_policy(capsys, run, tmp_path, monkeypatch):
    checkpoint = run.path / "checkpoints" / "step-000003"
    settings = ["--validation-examples", 1, "--max-tokens", 2]
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    code, _, error = call(capsys, "eval", "--policy", checkpoint, "--run", tmp_path / "eval", *settings)
    assert code == 1 and "model.safetensors does not match its checksum" in error
    assert not (tmp_path / "eval").exists()
    monkeypatch.setenv("HOME", str(run.path))
    with pytest.raises(CheckpointError):
        launch.launch("grpo", GRPOConfig(policy="~/checkpoints/step-000003", run=tmp_path / "eval"))


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--max-tokens", 1025, "max_tokens is 1025; it must be at most 1024, the context of the policy"),
        ("--processes", 4097, f"processes is 4097; it must be at most {launch.count_cores()}, the CPU cores here"),
    ],
)
def test_what_cannot_fit_is_refused_with_both_numbers(capsys, policy_folder, tmp_path, flag, value, said):
    arguments = ["--policy", policy_folder, "--run", tmp_path / "run", "--validation-examples", 1]
    code, _, error = call(capsys, "eval", *arguments, flag, value)
    assert code == 2 and said in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_whose_name_is_no_text(capsys, run, tmp_path):
    """Settings cannot say such a name; a run that was moved there is resumed and reported all the same."""
    code, _, error = call(capsys, "grpo", "--run", tmp_path / "\udcff")
    assert code == 2 and "run is" in error and "UTF-8" in error and not (tmp_path / "\udcff").exists()
    moved = run.path.rename(tmp_path / "a\udcff\x1b[31m")
    environment = json.loads((moved / "environment.json").read_text())
    environment["arguments"], environment["machine\x07"] = ["\ud800", "\x1b[2J"], "\udc80"
    (moved / "environment.json").write_text(json.dumps(environment))
    for command in ("resume", "report"):
        code, _, error = call(capsys, command, moved)
        assert code == 0, ascii(error)
    page = (moved / "report.html").read_bytes().decode("utf-8")
    assert not set(page) & {"\x1b", "\x07"} and "a\ufffd\ufffd[31m" in page
