"""Tasks and rewards from outside: a module beside the user, an installed package, the published file of a course."""

import json
import re
import sys
from pathlib import Path
from statistics import fmean

import pytest

from veritune.cli import main
from veritune.commands.experiment.plan import load_experiment, plan_cells
from veritune.core.run_folder import RunFolder

TASK = '''
from dataclasses import dataclass
from veritune.core.types import Example, Score

@dataclass(frozen=True)
class EvenTask:
    """Say an even number of characters."""

    count: int = 4
    """Problems of a split."""
    letter: str = "q"
    """What the question asks for."""

    name = "even"
    stop = ("z",)

    def examples(self, split):
        return [Example(f"{split}-{n}", f"Say {self.letter} {n}", n) for n in range(self.count)]

    def prompt(self, example):
        return example.question + ":"

    def rewards(self, pairs):
        return [Score(float(len(response) % 2 == 0), 1.0, float(len(response) % 2 == 0)) for response, _ in pairs]
'''
COURSE = '''
def r1_zero_reward_fn(response, ground_truth, fast=True):
    """In the form in which the course publishes it."""
    if "</think> <answer>" not in response:
        return {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0}
    answer = response.split("<answer>")[-1].replace("</answer>", "").strip()
    right = float(answer == str(ground_truth))
    return {"format_reward": 1.0, "answer_reward": right, "reward": right}

def brevity(response, ground_truth):
    return 1 / (1 + len(response))

def broken(response, ground_truth):
    return float("nan")

def never(response, ground_truth):
    raise LookupError("no judge")

not_a_function = 3
'''
SMALL = ["--validation-examples", "4", "--max-tokens", "6", "--threads", "1"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a task and rewards of the user's."""
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "my_rewards.py").write_text(COURSE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_task", "my_rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code or 0, *capsys.readouterr()


def last_validation(path):
    run = RunFolder.open(path)
    return run.metrics()[0], run.read_rows("validation", 0)


def test_a_task_of_a_module_beside_the_user(folder, capsys):
    arguments = ["--task", "my_task:EvenTask", "--task-count", "3", "--task-letter", "w", "--run", "run"]
    code, _, error = call(capsys, "eval", *SMALL, *arguments)
    assert code == 0, error
    metrics, rows = last_validation(folder / "run")
    assert [row["question"] for row in rows] == ["Say w 0", "Say w 1", "Say w 2"]
    expected = [float(len(row["response"]) % 2 == 0) for row in rows]
    assert [row["score"]["reward"] for row in rows] == expected
    assert metrics["validation_reward"] == pytest.approx(fmean(expected))
    written = (folder / "run" / "config.toml").read_text()
    assert '\n[task]\nname = "my_task:EvenTask"\ncount = 3\nletter = "w"\n' in written
    code, _, error = call(capsys, "eval", *SMALL, "--config", "run/config.toml", "--run", "again")
    assert code == 0 and last_validation(folder / "again")[0]["validation_reward"] == metrics["validation_reward"]


def test_a_task_trains(folder, capsys):
    sizes = ["--rollout-batch-size", "4", "--group-size", "2", "--train-batch-size", "4", "--steps", "1"]
    code, _, error = call(capsys, "grpo", *SMALL, *sizes, "--task", "my_task:EvenTask", "--run", "run")
    assert code == 0, error
    assert len(RunFolder.open(folder / "run").read_rows("rollouts", 1)) == 4
    code, out, error = call(capsys, "resume", "run")
    assert code == 0 and "has already taken all of its 1 steps" in out, error


@pytest.fixture
def readme(folder):
    """The blocks of the README's part "Make it yours", written as the files that they name."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = re.findall(r"```(?:python|toml)\n# (\w+\.\w+)\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in blocks] == ["squares.py", "rewards.py", "my_loss.py", "echo.py", "deviation.toml"]
    for name, block in blocks:
        assert sum(bool(line) for line in block.splitlines()) <= 15
        (folder / name).write_text(block)
    return folder


SIZES = ["--rollout-batch-size", "4", "--group-size", "2", "--train-batch-size", "4", "--steps", "1"]


def test_the_readmes_task_reward_and_loss_train(readme, capsys):
    arguments = ["--task", "squares:SquareTask", "--task-largest", "30", "--loss-type", "my_loss:squared"]
    arguments += ["--reward", "task=1.0", "--reward", "rewards:brevity=0.2", "--no-skip-zero-advantages"]
    code, _, error = call(capsys, "grpo", *SMALL, *SIZES, *arguments, "--run", "run")
    assert code == 0, error
    row = RunFolder.open(readme / "run").metrics()[1]
    assert row["reward"] == pytest.approx(row["reward_task"] + 0.2 * row["reward_brevity"])
    assert 0 < row["reward_brevity"] <= 1
    assert row["ratio"] == pytest.approx(1, abs=1e-5)  # the only update is on-policy


def test_the_readmes_engine_samples(readme, capsys):
    arguments = ["--engine", "echo:EchoSettings", "--engine-text", "7", "--run", "run"]
    code, _, error = call(capsys, "eval", *SMALL, *arguments)
    assert code == 0, error
    assert [row["response"] for row in RunFolder(readme / "run").read_rows("validation", 0)] == ["7"] * 4


def test_the_readmes_experiment_has_two_cells_a_seed(readme):
    experiment = load_experiment("deviation.toml", "embedded")
    cells = plan_cells(experiment, readme / "runs", seeds=3, threads=None)
    assert sorted((cell.config.normalize_by_std, cell.config.seed) for cell in cells) == [
        *((False, 0), (False, 1), (False, 2)),
        *((True, 0), (True, 1), (True, 2)),
    ]


def test_the_runs_own_name_holds_the_class_alone(folder, capsys):
    code, _, error = call(capsys, "eval", *SMALL, "--task", "my_task:EvenTask")
    assert code == 0, error
    (run,) = (folder / "runs").iterdir()
    assert run.name.startswith("eval-EvenTask-seed0-")


def test_a_task_of_an_installed_package_has_a_name(folder, capsys, monkeypatch):
    installed = folder / "site" / "evens-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: evens\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[veritune.tasks]\neven = my_task:EvenTask\n")
    monkeypatch.syspath_prepend(str(folder / "site"))
    code, _, error = call(capsys, "eval", *SMALL, "--task", "even", "--task-count", "2", "--run", "run")
    assert code == 0, error
    assert len(last_validation(folder / "run")[1]) == 2
    code, _, error = call(capsys, "eval", *SMALL, "--task", "evne")
    assert code == 2 and "task is 'evne'; allowed are countdown, gsm8k, math, file, even" in error


def test_the_published_reward_of_a_course_plugs_in_as_it_is(folder, capsys):
    answers = [("so </think> <answer> 4 </answer>", 1.0), ("so </think> <answer> 5 </answer>", 0.0), ("4", 0.0)]
    rows = [{"response": response, "ground_truth": "4"} for response, _ in answers]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--task", "gsm8k", "--reward", "my_rewards:r1_zero_reward_fn"]
    code, out, error = call(capsys, "grade", "--file", "answers.jsonl", *arguments)
    assert code == 0 and "reward: my_rewards:r1_zero_reward_fn;" in out, error
    scored = [json.loads(line)["score"] for line in (folder / "scored-answers.jsonl").read_text().splitlines()]
    assert [(each["format_reward"], each["reward"]) for each in scored] == [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0)]
    code, _, error = call(capsys, "eval", *SMALL, *arguments, "--prompt", "r1_zero", "--run", "run")
    assert code == 0, error


def test_several_rewards_are_weighted_and_each_is_logged(folder, capsys):
    rewards = ["--reward", "task=1.0", "--reward", "my_rewards:brevity=0.2"]
    code, _, error = call(capsys, "eval", *SMALL, "--task", "my_task:EvenTask", *rewards, "--run", "run")
    assert code == 0, error
    metrics, rows = last_validation(folder / "run")
    even = [float(len(row["response"]) % 2 == 0) for row in rows]
    brevity = [1 / (1 + len(row["response"])) for row in rows]
    assert len(rows) == 4
    for row, first, second in zip(rows, even, brevity, strict=True):
        assert row["score"]["reward"] == pytest.approx(first + 0.2 * second)
        assert row["score"]["answer_reward"] == first  # the first one says what is right
        assert row["score"]["parts"] == {"task": first, "brevity": pytest.approx(second)}
    assert metrics["validation_reward_task"] == pytest.approx(fmean(even))
    assert metrics["validation_reward_brevity"] == pytest.approx(fmean(brevity))
    assert metrics["validation_reward"] == pytest.approx(fmean(even) + 0.2 * fmean(brevity))
    assert 'reward = ["task=1.0", "my_rewards:brevity=0.2"]\n' in (folder / "run" / "config.toml").read_text()


@pytest.mark.parametrize(
    "rewards, reason",
    [
        (["my_rewards:never"], "LookupError: no judge"),
        (["my_rewards:broken"], "ValueError: reward is nan; it must be finite"),
        (["task", "my_rewards:never=0.5"], "never: LookupError: no judge"),
    ],
)
def test_a_run_whose_rewards_all_fail_ends_with_one_line(folder, capsys, rewards, reason):
    flags = [part for name in rewards for part in ("--reward", name)]
    code, _, error = call(capsys, "eval", *SMALL, "--task", "my_task:EvenTask", *flags, "--run", "run")
    assert code == 1
    assert error == f"error: step 0: all 4 rewards failed; most often by: reward failed: {reason}\n"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--task", "my_task:Odd"], "task is 'my_task:Odd', but my_task has no Odd"),
        (["--task", "no_such:Task"], "task is 'no_such:Task', but no_such cannot be imported: ModuleNotFoundError"),
        (["--task", "my_rewards:brevity"], "task is 'my_rewards:brevity', which cannot be made: TypeError"),
        (["--task", "collections:Counter"], "task is 'collections:Counter', which has no name; a task has name, stop"),
        (["--task", "my_task:EvenTask", "--task-count", "many"], "task.count is 'many'; it must be of type int"),
        (["--task", "my_task:EvenTask", "--prompt", "compact"], "task my_task:EvenTask states its own; leave prompt"),
        (
            ["--reward", "r1_one"],
            "reward is 'r1_one'; allowed are task, r1_zero, r1_zero_strict, question_only",
        ),
        (["--reward", "my_rewards:none"], "reward is 'my_rewards:none', but my_rewards has no none"),
        (["--reward", "my_rewards:not_a_function"], "reward is 'my_rewards:not_a_function', which is no function"),
        (["--reward", "task=much"], "reward is 'task=much'; it must be a name, or name=weight with a finite weight"),
        (["--reward", "task=0"], "reward is 'task=0'; it must be a name, or name=weight with a finite weight"),
        (["--reward", "task", "--reward", "task=2"], "reward is task, task=2; two of these have the same name"),
        (["--reward-seconds", "0"], "reward_seconds is 0.0; it must be positive and finite"),
        (["--reward-workers", "17"], "reward_workers is 17; it must be between 1 and 16"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(folder, capsys, arguments, said):
    code, _, error = call(capsys, "eval", *SMALL, *arguments, "--run", "run")
    assert code == 2 and said in error and error.count("\n") == 1, error
    assert not (folder / "run").exists()
