"""Tasks: where problems come from, how they are asked, and how a response is paid. One file each, without torch."""

from __future__ import annotations

from veritune.configs import CommonConfig
from veritune.errors import ConfigError
from veritune.types import Task


def load_task(config: CommonConfig) -> Task:
    """The task that `config.task` names, with its problems from `config.data` where that is given."""
    if config.task == "countdown":
        from veritune.tasks.countdown import CountdownTask

        return CountdownTask(
            numbers=config.countdown_numbers,
            data_file=config.data,
            prompt_template=config.prompt,
            require_all_numbers=config.require_all_numbers,
        )
    raise ConfigError(f"task is {config.task!r}; allowed is countdown")
