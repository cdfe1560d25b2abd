"""Tasks: where problems come from, how they are asked, and how a response is paid. One file each, without torch.

A task is a class with the members of `veritune.core.types.Task`. Its settings are the fields of the class, if that is a
dataclass. One from outside is named by `package.module:Class`, or by an entry point of the group "veritune.tasks".
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from veritune.core.config import CommonConfig
from veritune.core.errors import ConfigError
from veritune.core.registry import look_up
from veritune.core.tables import NoSettings
from veritune.core.types import Task
from veritune.tasks.countdown import CountdownTask
from veritune.tasks.prompts import TemplateTask, load_prompt
from veritune.tasks.questions import FileTask, GSM8KTask, MathTask, QuestionTask
from veritune.tasks.rewards import REWARDS, parse_rewards, reward_of_template

TASKS = {task.name: task for task in (CountdownTask, GSM8KTask, MathTask, FileTask)}
MEMBERS = ("name", "stop", "examples", "prompt", "rewards")
"""The members that a task must have."""


def find_task(name: str) -> Any:
    """The class of a task by its name, or by `package.module:Class`; ConfigError where there is none."""
    return look_up("task", name, TASKS, "veritune.tasks")


def settings_class(name: str) -> type:
    """The dataclass of a task's settings: its own class, if that is one."""
    found = find_task(name)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else NoSettings


def make_task(name: str, settings: Any) -> Task:
    """The task of a name with its settings, an object of `settings_class(name)`; ConfigError where it is no task."""
    try:
        task = find_task(name)() if isinstance(settings, NoSettings) else copy.copy(settings)
    except ConfigError:
        raise
    except Exception as error:  # a class from outside can raise anything
        raise ConfigError(f"task is {name!r}, which cannot be made: {type(error).__name__}: {error}") from error
    if missing := [member for member in MEMBERS if not hasattr(task, member)]:
        raise ConfigError(f"task is {name!r}, which has no {missing[0]}; a task has {', '.join(MEMBERS)}")
    return task


def load_task(config: CommonConfig, notify: Callable[[str], None] = print) -> Task:
    """The task that the config describes; `notify` is told of rows that its data lacks.

    Raises ConfigError for an unknown task or prompt, and for a prompt where the task states its own.
    """
    task = make_task(config.task, config.task_settings)
    if not isinstance(task, TemplateTask):
        if config.prompt:
            raise ConfigError(f"prompt is {config.prompt!r}, but task {config.task} states its own; leave prompt unset")
        return task
    template = config.prompt or (task.chat_template if config.chat else task.template)
    changes: dict[str, Any] = {"template": template}
    if isinstance(task, QuestionTask):
        shipped = [name for name, _ in parse_rewards(config.reward) if name in REWARDS]
        changes |= {"reward": [*shipped, reward_of_template(load_prompt(template))][0], "notify": notify}
    else:
        load_prompt(template)
    for name, value in changes.items():
        object.__setattr__(task, name, value)  # this copy is not shared with anybody yet
    return task
