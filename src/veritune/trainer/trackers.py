"""Optional trackers: TensorBoard and Weights & Biases are told every row that the run folder is told."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from veritune.core.config import CommonConfig
from veritune.core.errors import ConfigError, blot_logins


@contextlib.contextmanager
def tracking(config: CommonConfig, path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Open what `config.tensorboard` and `config.wandb` ask for; yields a function that takes each row."""
    with contextlib.ExitStack() as stack:
        trackers = []
        if config.tensorboard:
            trackers.append(stack.enter_context(_tensorboard(path)))
        if config.wandb:
            trackers.append(stack.enter_context(_wandb(config, path)))

        def track(row: dict[str, Any]) -> None:
            numbers = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "step"}
            for tracker in trackers:
                tracker(row["step"], numbers)

        yield track


@contextlib.contextmanager
def _tensorboard(path: Path) -> Iterator[Callable[[int, dict[str, float]], None]]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "tensorboard is True, but it is not installed; pip install 'veritune[tensorboard]'"
        ) from error
    with SummaryWriter(str(path / "tensorboard")) as writer:

        def track(step: int, numbers: dict[str, float]) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

        yield track


@contextlib.contextmanager
def _wandb(config: CommonConfig, path: Path) -> Iterator[Callable[[int, dict[str, float]], None]]:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("wandb is True, but it is not installed; pip install 'veritune[wandb]'") from error
    settings = {name: blot_logins(str(value)) for name, value in dataclasses.asdict(config).items()}
    with wandb.init(project="veritune", name=path.name, dir=str(path), config=settings) as tracked:
        yield lambda step, numbers: tracked.log(numbers, step=step)
