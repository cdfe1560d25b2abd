"""Tasks: where problems come from, how they are asked, and how a response is paid. One file each, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from veritune.core.config import CommonConfig
from veritune.core.errors import ConfigError
from veritune.core.types import Task
from veritune.grading import GradingPool, OneByOne
from veritune.tasks.countdown import CountdownTask
from veritune.tasks.prompts import load_prompt
from veritune.tasks.questions import (
    GSM8K,
    MATH,
    REWARD_FORMATS,
    SAMPLES,
    Form,
    QuestionTask,
    form_with_columns,
    load_splits,
    reward_format_of,
)

Notify = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class TaskEntry:
    """A row of the table of tasks."""

    load: Callable[[CommonConfig, str, Notify], Task]
    """The task, from the config and the prompt's name."""
    prompt: str
    """The prompt where the config names none."""
    chat_prompt: str
    """The prompt where the config names none and the chat template is on."""
    settings: tuple[str, ...]
    """The settings that only some tasks have, and this one has."""


def _countdown(config: CommonConfig, prompt: str, notify: Notify) -> Task:
    return CountdownTask(
        numbers=config.countdown_numbers,
        data_file=config.data,
        prompt_template=prompt,
        require_all_numbers=config.require_all_numbers,
    )


def _gsm8k(config: CommonConfig, prompt: str, notify: Notify) -> Task:
    return _question_task(config, GSM8K, prompt, notify)


def _math(config: CommonConfig, prompt: str, notify: Notify) -> Task:
    return _question_task(config, MATH, prompt, notify)


def _file(config: CommonConfig, prompt: str, notify: Notify) -> Task:
    if config.data is None and config.validation_data is None:
        raise ConfigError("data is None; task file needs data or validation_data")
    return _question_task(config, form_with_columns(config.question_column, config.answer_column), prompt, notify)


def _question_task(config: CommonConfig, form: Form, prompt: str, notify: Notify) -> QuestionTask:
    template = load_prompt(prompt)
    data: Path | None = config.data
    if data is None and config.validation_data is None:
        data = SAMPLES / f"{config.task}.jsonl"
        notify(f"task {config.task} was given no data: its problems are the small sample that Veritune ships")
    train, validation = load_splits(config.task, form, data, config.validation_data, config.skip_bad_rows, notify)
    reward = REWARD_FORMATS[config.reward or reward_format_of(template)]
    return QuestionTask(config.task, train, validation, template, reward, reward.stop)


FROM_FILES = ("data", "validation_data", "skip_bad_rows", "reward")
TASKS = {
    "countdown": TaskEntry(
        _countdown, "compact", "countdown_instruct", ("data", "countdown_numbers", "require_all_numbers")
    ),
    "gsm8k": TaskEntry(_gsm8k, "r1_zero", "question_only", FROM_FILES),
    "math": TaskEntry(_math, "r1_zero", "question_only", FROM_FILES),
    "file": TaskEntry(_file, "r1_zero", "question_only", (*FROM_FILES, "question_column", "answer_column")),
}


def load_task(config: CommonConfig, notify: Notify = print) -> Task:
    """The task that `config.task` names, its data read; `notify` is told of rows that are left out.

    Raises ConfigError for an unknown task, an unknown prompt or a setting that the task does not have, and DataError
    for data that cannot be used.
    """
    if config.task not in TASKS:
        raise ConfigError(f"task is {config.task!r}; allowed are {', '.join(TASKS)}")
    entry = TASKS[config.task]
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in dict.fromkeys(name for other in TASKS.values() for name in other.settings):
        if name not in entry.settings and getattr(config, name) != defaults[name]:
            raise ConfigError(f"{name} is {getattr(config, name)!r}, but task {config.task} has no such setting")
    return entry.load(config, config.prompt or (entry.chat_prompt if config.chat else entry.prompt), notify)


def grading_pool(task: Task, workers: int = 2, seconds_per_answer: float = 2.0) -> GradingPool:
    """A pool that computes the task's rewards in processes that are killed at an answer's limit of time or memory."""
    if isinstance(task, QuestionTask):
        return task.reward_format.pool(workers, seconds_per_answer)
    return GradingPool(OneByOne(task.rewards), None, workers=workers, seconds_per_answer=seconds_per_answer)
