"""Experiments: every shipped file resolves, cells have the settings they say, and a killed sweep goes on."""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from veritune.commands.experiment.command import best_settings
from veritune.commands.experiment.plan import (
    _shipped_folder,
    load_experiment,
    plan_cells,
    plan_focused_cells,
    shipped_experiments,
)
from veritune.commands.experiment.sweep import Outcome, blocked, collapse, refuse_other_run
from veritune.core.config import read_toml
from veritune.core.errors import ConfigError
from veritune.core.run_folder import RunFolder
from veritune.engines.native.settings import NativeSettings
from veritune.engines.vllm_settings import VLLMServerSettings
from veritune.model.policy import save_policy
from veritune.report.collect import collect_settings

NAMES = [
    *("math_baseline", "sft_dataset_size", "sft_filtered", "expert_iteration", "grpo_learning_rate", "grpo_baselines"),
    *("grpo_length_normalization", "grpo_group_std", "grpo_off_policy_sweep", "grpo_off_policy_clip", "grpo_prompt"),
    *("countdown_lengths", "best_of_n", "leaderboard"),
]
PUBLISHED = {
    "steps": 200,
    "learning_rate": 1e-5,
    "rollout_batch_size": 256,
    "group_size": 8,
    "temperature": 1.0,
    "max_tokens": 1024,
    "epochs_per_rollout_batch": 1,
    "train_batch_size": 256,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "clip_grad_norm": 1.0,
    "engine": "vllm",
    "policy": "Qwen/Qwen2.5-Math-1.5B",
    "task": "math",
}


# --- Files -------------------------------------------------------------------------------------------------------


def test_every_experiment_is_shipped_in_a_few_lines():
    assert set(NAMES) <= set(shipped_experiments())
    for name in shipped_experiments():
        lines = (_shipped_folder() / f"{name}.toml").read_text().splitlines()
        assert len(lines) <= 8 and all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize("scale", ["embedded", "paper"])
@pytest.mark.parametrize("name", shipped_experiments())
def test_every_experiment_resolves_at_both_scales(name, scale):
    experiment = load_experiment(name, scale)
    assert experiment.question.endswith("?")
    cells = plan_cells(experiment, Path("out"), seeds=2, threads=1)
    settings = [cell.setting for cell in cells]
    assert all(settings.count(setting) == 2 for setting in settings)
    assert len({cell.path for cell in cells}) == len(cells)
    if name not in ("leaderboard",):
        assert len(set(settings)) > 1  # something is compared
    differing = {dataclasses.replace(cell.config, run=None, seed=0) for cell in cells if cell.recipe == cells[0].recipe}
    assert len(differing) == len({cell.setting for cell in cells if cell.recipe == cells[0].recipe})
    for cell in cells:
        assert cell.config.engine == ("native" if scale == "embedded" else "vllm")
        assert cell.config.policy.startswith(("embedded" if scale == "embedded" else "Qwen/", "cell:"))


def test_the_paper_scale_is_the_published_setting():
    cells = plan_cells(load_experiment("grpo_group_std", "paper"), Path("out"), seeds=1, threads=None)
    assert [cell.config.normalize_by_std for cell in cells] == [True, False]
    for cell in cells:
        assert {name: getattr(cell.config, name) for name in PUBLISHED} == PUBLISHED
    problems = {name: load_experiment(name, "paper") for name in ("best_of_n", "countdown_lengths")}
    assert problems["best_of_n"].base["grpo"]["policy"] == "Qwen/Qwen3-0.6B"
    assert problems["countdown_lengths"].base["grpo"]["policy"] == "Qwen/Qwen3-1.7B"
    sweep = load_experiment("grpo_off_policy_sweep", "paper")
    broad = plan_cells(sweep, Path("out"), seeds=1, threads=None)
    assert all(cell.config.steps <= 50 for cell in broad)
    focused = plan_focused_cells(sweep, ["on_policy"], Path("out"), seeds=1, threads=None)
    assert [(cell.setting, cell.config.steps) for cell in focused] == [("focused-on_policy", 200)]


@pytest.mark.parametrize(("scale", "seconds"), [("embedded", 600), ("paper", 4 * 3600)])
def test_the_leaderboard_keeps_its_rules(scale, seconds):
    experiment = load_experiment("leaderboard", scale)
    (cell,) = plan_cells(experiment, Path("out"), seeds=1, threads=None)
    assert experiment.jobs == 1 and cell.config.budget_seconds == seconds
    assert cell.config.validation_examples >= 5000  # MATH's whole validation split
    assert (cell.config.prompt, cell.config.temperature) == ("r1_zero", 1.0)


# --- Cells -------------------------------------------------------------------------------------------------------


def written(folder, text):
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_grids_cells_and_scales_by_hand(tmp_path):
    path = written(
        tmp_path,
        """
        question = "?"
        recipe = "grpo"
        settings = { max_tokens = 7 }
        grid = { group_size = [2, 4], normalize_by_std = [true, false] }
        cells.zero = { recipe = "eval", grid = { prompt = ["compact", "a/b"] } }
        cells.other = { max_tokens = 9 }
        embedded.cells.other = { seed = 1 }
        embedded.settings = { temperature = 0.5 }
        paper.settings = { max_tokens = 11 }
        """,
    )
    with pytest.raises(ConfigError, match="mine: cell other sets seed, which the sweep sets itself"):
        plan_cells(load_experiment(path, "embedded"), tmp_path, seeds=1, threads=1)
    changed = load_experiment(path, "paper").settings
    assert list(changed) == [
        "group_size=2,normalize_by_std=true",
        "group_size=2,normalize_by_std=false",
        "group_size=4,normalize_by_std=true",
        "group_size=4,normalize_by_std=false",
        "zero,prompt=compact",
        "zero,prompt=a-b",
        "other",
    ]
    assert changed["group_size=4,normalize_by_std=false"] == {
        "max_tokens": 11,
        "group_size": 4,
        "normalize_by_std": False,
    }
    assert changed["zero,prompt=a-b"] == {"max_tokens": 11, "recipe": "eval", "prompt": "a/b"}
    assert changed["other"] == {"max_tokens": 9}
    assert load_experiment(path, "embedded").settings["other"] == {"max_tokens": 7, "temperature": 0.5, "seed": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipe = 'grpo'", "'question' is missing"),
        ("question = '?'\nrecipe = 'ppo'", "recipe is 'ppo'"),
        ("question = '?'\nrecipe = 'grpo'\nseeds = 3", "unknown key 'seeds'"),
        ("question = '?'\nrecipe = 'grpo'\nproblems = 'chess'", "problems is 'chess'"),
        ("question = '?'\nrecipe = 'grpo'\ngrid = { group_size = 8 }", "grid.group_size is 8; it must be a list"),
        ("question = '?'\nrecipe = 'grpo'\ncells = { a = { group = 8 } }", "cell a: unknown setting 'group'"),
        ("question = '?'\nrecipe = 'grpo'\ncells = { a = { policy = 'cell:b' } }", "cell a needs cell 'b'"),
        (
            "question = '?'\nrecipe = 'grpo'\ncells = { a = { policy = 'cell:b' }, b = { policy = 'cell:a' } }",
            "cells a, b need one another in a circle",
        ),
        ("question = '?'\nrecipe = 'grpo'\ngrid = { group_size = [3] }", "rollout_batch_size is 128"),
        ("question = '?'\nrecipe = 'grpo'\nfocus = { best = 2, steps = 9 }", "focus.best is 2"),
        ("question = '?'\nrecipe = 'grpo'\njobs = -1", "jobs is -1; it must be a number from 1 on"),
        ("question = '?'\nrecipe = 'grpo'\njobs = 'two'", "jobs is 'two'"),
        ("question = '?'\nrecipe = 'grpo'\nproblems = ['math']", r"problems is \['math'\]; it must be a name"),
        ("question = '?'\nrecipe = 'grpo'\ncells = { a = { recipe = 3 } }", "cells.a.recipe is 3; it must be a name"),
        ("question = '?'\nrecipe = 'grpo'\ngrid = { prompt = ['a b', 'a-b'] }", "two values of a grid have one name"),
        (
            "question = '?'\nrecipe = 'grpo'\ngrid = { steps = [1] }\ncells = { 'steps=1' = {}, 'steps-1' = {} }",
            "two cells have the name 'steps-1'",
        ),
    ],
)
def test_a_file_that_cannot_work_is_refused_before_anything_runs(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        plan_cells(load_experiment(written(tmp_path, text), "embedded"), tmp_path, seeds=1, threads=1)


def test_an_unknown_name_is_told_what_there_is():
    with pytest.raises(ConfigError, match=r"experiment is 'grpo'; it must be one of best_of_n, countdown_lengths"):
        load_experiment("grpo", "embedded")


# --- How cells end -----------------------------------------------------------------------------------------------


def test_collapse_by_hand():
    first = {"step": 0, "validation_reward": 0.4}
    low = [{"step": step, "reward": 0.19} for step in range(1, 11)]
    assert collapse([first, *low]) == "collapsed: 10 steps up to step 10 had a reward below 0.200"
    assert collapse([first, *low[:9]]) is None
    assert collapse([first, *low[:9], {"step": 10, "reward": 0.2}, *low]) is not None
    assert collapse([first, *low[:5], {"step": 6, "reward": 0.2}, *low[6:]]) is None
    twice = [{"step": step, "reward": 0.3, "validation_reward": 0.1} for step in (5, 10)]
    assert collapse([first, *twice]) == "collapsed: 2 validations up to step 10 had a reward below 0.200"
    assert collapse([first, twice[0]]) is None
    assert collapse([{"step": 0, "validation_reward": 0.0}, *low]) is None  # nothing to lose
    assert collapse([]) is None


def sham_run(path, config="", accuracies=(), steps=1):
    run = RunFolder.create(path, config, {"recipe": "grpo"})
    for step, accuracy in enumerate(accuracies):
        run.append_metrics({"step": step, "steps": steps, "validation_accuracy": accuracy, "seconds_elapsed": 1.0})
    (path / "checkpoints" / f"step-{steps:06d}").mkdir(parents=True)
    run.unlock()
    return run


def test_the_best_settings_are_those_with_the_highest_mean_and_diverged_seeds_count_as_nothing(tmp_path):
    path = written(tmp_path, "question = '?'\nrecipe = 'grpo'\ngrid = { group_size = [2, 4, 8] }\nfocus.best = 2")
    experiment = load_experiment(path, "embedded")
    cells = plan_cells(experiment, tmp_path, seeds=2, threads=1)
    finals = [0.5, 0.6, 0.9, 0.9, 0.4, 0.5]  # 0.55, then 0.45 because one diverged, then 0.45 + a little
    for cell, final in zip(cells, finals, strict=True):
        sham_run(cell.path, accuracies=(0.1, final + (0.02 if cell.setting == "group_size=8" else 0)))
    outcomes = [Outcome(cell, "finished") for cell in cells]
    outcomes[3] = Outcome(cells[3], "diverged")
    assert best_settings(experiment, outcomes) == ["group_size=2", "group_size=8"]


def test_what_needs_a_diverged_cell_is_blocked(tmp_path):
    path = written(tmp_path, "question = '?'\nrecipe = 'grpo'\ncells = { a = {}, b = { policy = 'cell:a' } }")
    a, b = plan_cells(load_experiment(path, "embedded"), tmp_path, seeds=1, threads=1)
    assert blocked(b, {}) is None
    assert blocked(b, {a.path: Outcome(a, "finished")}) is None
    assert blocked(b, {a.path: Outcome(a, "diverged")}).reason == "it needs a/seed-0, which diverged"


def test_runs_of_other_settings_are_not_taken_for_cells(tmp_path):
    path = written(tmp_path, "question = '?'\nrecipe = 'grpo'\ncells = { a = { steps = 5 } }")
    (cell,) = plan_cells(load_experiment(path, "embedded"), tmp_path, seeds=1, threads=1)
    settings = read_toml(_shipped_folder() / "scales.toml")["embedded"]
    assert settings["problems"]["countdown"]["policy"] == "embedded"
    same = "steps = 5\nrollout_batch_size = 128\ntrain_batch_size = 128\nvalidate_every = 8\n"
    sham_run(cell.path, same + "validation_examples = 512\nthreads = 2\n")
    refuse_other_run(cell)
    (cell.path / "config.toml").write_text(same + "validation_examples = 64\n")
    with pytest.raises(ConfigError, match=r"cell a/seed-0 is to have validation_examples 512, but .* run with 64"):
        refuse_other_run(cell)


def test_cells_vary_the_settings_of_tables(tmp_path):
    path = written(
        tmp_path,
        """
        question = "?"
        recipe = "grpo"
        settings.engine.max_rows = 64
        grid = { task.numbers = [3, 4] }
        embedded.cells.narrow = { engine.max_rows = 8 }
        paper.problems = "countdown"
        paper.settings.engine = "native"
        paper.cells.served = { engine = { name = "vllm-server", start = ["cuda:1"] } }
        """,
    )

    def cells(scale):
        return plan_cells(load_experiment(path, scale), tmp_path / "out", seeds=1, threads=1)

    found = {
        cell.setting: (cell.config.engine_settings, cell.config.task_settings.numbers) for cell in cells("embedded")
    }
    assert found == {
        "task.numbers=3": (NativeSettings(max_rows=64), 3),
        "task.numbers=4": (NativeSettings(max_rows=64), 4),
        "narrow": (NativeSettings(max_rows=8), 3),
    }
    # Another engine than the scale's leaves the scale's settings of vLLM behind; one that a cell gave is not dropped.
    with pytest.raises(ConfigError, match=r"cell served: engine vllm-server: unknown setting 'engine.max_rows'"):
        cells("paper")
    (tmp_path / "mine.toml").write_text(
        (tmp_path / "mine.toml").read_text().replace("settings.engine.max_rows = 64", "")
    )
    engines = [cell.config.engine_settings for cell in cells("paper")]
    served = VLLMServerSettings(start=("cuda:1",), gpu_memory_utilization=0.45, max_model_len=2048)
    assert engines == [NativeSettings(), NativeSettings(), served]


def test_seeds_that_start_from_a_cell_of_their_own_seed_are_one_setting(tmp_path):
    for setting in ("sft", "other"):
        for seed in (0, 1):
            policy = tmp_path / setting / f"seed-{seed}" / "checkpoints" / "step-000004"
            sham_run(tmp_path / f"{setting}-rl" / f"seed-{seed}", f'policy = "{policy}"\nseed = {seed}\n', (0.1, 0.2))
    settings = collect_settings(sorted(path.parent for path in tmp_path.glob("*/*/config.toml")))
    assert [(setting.label, len(setting.runs)) for setting in settings] == [
        ("policy of other", 2),
        ("policy of sft", 2),
    ]


# --- A sweep that is killed --------------------------------------------------------------------------------------


def tree(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


def wait_for(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_sweep_recomputes_no_finished_cell_and_records_what_diverged(random_policy, tmp_path):
    save_policy(random_policy, tmp_path / "policy")
    path = written(
        tmp_path,
        f"""
        question = "Does a killed sweep go on?"
        recipe = "grpo"
        settings.policy = "{tmp_path / "policy"}"
        settings.max_tokens = 12
        settings.validation_examples = 4
        settings.checkpoint_every = 1
        [cells]
        first = {{ steps = 1, rollout_batch_size = 8, group_size = 4, train_batch_size = 8 }}
        diverging = {{ recipe = "sft", unique_examples = 16, batch_size = 8, learning_rate = 1e37 }}
        last = {{ policy = "cell:first", steps = 20, rollout_batch_size = 8, group_size = 4, train_batch_size = 8 }}
        """,
    )
    output = tmp_path / "out"
    arguments = ["experiment", path, "--seeds", "1", "--jobs", "1", "--output", str(output)]
    command = [sys.executable, "-m", "veritune", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last = output / "last" / "seed-0"
    wait_for(lambda: (last / "checkpoints" / "step-000003" / "manifest.json").exists() or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    told, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, told
    before = tree(output / "first") | tree(output / "diverging")
    assert RunFolder(output / "first" / "seed-0").is_finished()
    killed_at = RunFolder(last).metrics()[-1]["step"]
    assert killed_at < 20

    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert tree(output / "first") | tree(output / "diverging") == before
    assert [row["step"] for row in RunFolder(last).metrics()] == list(range(21))
    results = json.loads((output / "results.json").read_text())
    assert results["cells_of_this_call"] == 1
    assert {name: cell["status"] for name, cell in results["cells"].items()} == {
        "first/seed-0": "finished",
        "diverging/seed-0": "diverged",
        "last/seed-0": "finished",
    }
    assert "was refused" in results["cells"]["diverging/seed-0"]["reason"]
    assert "first/seed-0  finished before" in finished.stdout
    config = (last / "config.toml").read_text()
    assert f'policy = "{output / "first" / "seed-0" / "checkpoints" / "step-000001"}"' in config
    page = (output / "report.html").read_text()
    assert "The run diverged and was given up" in page
    assert "Does a killed sweep go on?" in (output / "results.md").read_text()
