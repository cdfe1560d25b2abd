"""What every recipe is given, and the clock of its stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from veritune.core.config import CommonConfig
from veritune.core.run_folder import Checkpoint, RunFolder
from veritune.core.types import Engine, RewardFunction, Task
from veritune.model.parallel import ALONE, Workers
from veritune.model.policy import Policy


class Stopwatch:
    """Seconds of each stage of a step, one lap after another."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._began = time.perf_counter()

    def lap(self, stage: str) -> dict[str, float]:
        """End `stage` now; returns the seconds of every stage so far."""
        now = time.perf_counter()
        self._laps[stage], self._began = now - self._began, now
        return dict(self._laps)


Row = dict[str, Any]
Config_co = TypeVar("Config_co", bound=CommonConfig, covariant=True)


@dataclass(frozen=True)
class Session(Generic[Config_co]):
    """What a recipe is given: its config and everything that the config named."""

    config: Config_co
    policy: Policy
    task: Task
    engine: Engine
    run: RunFolder
    checkpoint: Checkpoint | None = None
    """Where a resumed run starts; `policy` has been loaded from it."""
    listen: Callable[[Row], None] = lambda row: None
    """Told every row of metrics."""
    began: float = field(default_factory=time.perf_counter)
    """When the work began, loading included, on the clock of `time.perf_counter`."""
    workers: Workers = ALONE
    """The processes that share the work; this one alone by default."""
    rewards: RewardFunction | None = None
    """The task's rewards in processes with limits; by default they are computed here."""

    @property
    def device(self) -> torch.device:
        return next(self.policy.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.policy.model.parameters()).dtype
