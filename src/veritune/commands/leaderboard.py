"""`veritune leaderboard`: its settings, and its rules, checked on a run folder alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.text import Text

from veritune.core.config import Section, from_mapping, read_toml, require
from veritune.core.errors import ConfigError
from veritune.core.run_folder import RunFolder
from veritune.core.statistics import duration
from veritune.recipes.config import GRPOConfig
from veritune.tasks import load_task


@dataclass(frozen=True, kw_only=True)
class LeaderboardConfig(GRPOConfig):
    """Settings of `veritune leaderboard`: GRPO for a given time, under rules that make results comparable."""

    hours: Annotated[float | None, Section("Leaderboard")] = None
    """Hours to train for, evaluation included; give either these or minutes."""
    minutes: float | None = None
    """Minutes to train for, evaluation included."""
    prompt: str | None = "r1_zero"
    """The template: r1_zero by the rules."""
    steps: int = 1_000_000
    """Rollout batches at most; the time ends a run before."""
    validation_examples: int = 1_000_000
    """Held-out problems of a validation: the whole split by the rules, which is the smaller."""

    def __post_init__(self) -> None:
        if (self.hours is None) == (self.minutes is None):
            raise ConfigError(f"hours is {self.hours} and minutes is {self.minutes}; give one of them")
        given = "minutes" if self.hours is None else "hours"
        require(self, given, 0 < getattr(self, given) < math.inf, "positive and finite")
        require(self, "validation_examples", self.validation_examples >= 1_000_000, "left alone: the whole split")
        seconds = 3600 * self.hours if self.hours is not None else 60 * (self.minutes or 0)
        require(self, "budget_seconds", self.budget_seconds in (None, seconds), f"unset, or the time given ({seconds})")
        object.__setattr__(self, "budget_seconds", seconds)  # frozen against everyone else
        super().__post_init__()
        require(self, "temperature", self.temperature == 1, "1 by the rules")
        require(self, "prompt", self.prompt == "r1_zero", "r1_zero by the rules")
        require(self, "reward", self.reward in ((), ("r1_zero",)), "r1_zero by the rules")
        require(self, "schedule", self.schedule == "constant", "constant: nobody knows the number of steps beforehand")


@dataclass(frozen=True)
class Rule:
    """One rule, whether the run keeps it, and by which numbers."""

    text: str
    kept: bool
    evidence: str


def check_rules(path: Path) -> list[Rule]:
    """Every rule of the leaderboard for the run at `path`."""
    run = RunFolder.open(path)
    config = from_mapping(LeaderboardConfig, read_toml(path / "config.toml"), str(path / "config.toml"))
    rows, steps = run.metrics(), run.checkpoint_steps()
    split = {example.id for example in load_task(config, notify=lambda line: None).examples("validation")}
    final = max(run.steps("validation"), default=-1)
    asked = [row["id"] for row in run.read_rows("validation", final)] if final >= 0 else []
    last = rows[-1] if rows else {"step": -1, "steps": 0}
    ended = run.seconds_spent()
    budget = config.budget_seconds or math.nan
    return [
        Rule("ends in time, validations included", bool(rows) and ended <= budget, f"{ended:.1f} of {budget:.0f} s"),
        Rule("validated on the whole split", sorted(asked) == sorted(split), f"{len(asked)} of {len(split)} problems"),
        Rule("sampled at temperature 1", config.temperature == 1 and config.top_p == 1, f"{config.temperature:g}"),
        Rule("asked with the r1_zero prompt", config.prompt == "r1_zero", str(config.prompt)),
        Rule("paid by the r1_zero reward", config.reward in ((), ("r1_zero",)), ",".join(config.reward) or "r1_zero"),
        Rule(
            "the final checkpoint counts, not the best",
            last["step"] == last["steps"] == final == max(steps, default=-2),
            f"validated at step {final}, saved at step {max(steps, default=-2)}",
        ),
    ]


def print_leaderboard(path: Path) -> int:
    """Print the result and the rules; returns an exit code, 1 where a rule is broken."""
    rules, console = check_rules(path), Console(highlight=False)
    row = next((row for row in reversed(RunFolder.open(path).metrics()) if "validation_accuracy" in row), None)
    if row:
        interval = f"95% {row['validation_accuracy_low']:.1%} to {row['validation_accuracy_high']:.1%}"
        result = f"{row['validation_accuracy']:.1%} ({interval}) at step {row['step']}"
        console.print(Text(f"{result}, after {duration(row['seconds_elapsed'])}", style="bold"))
    for rule in rules:
        mark = Text("kept   ", style="green") if rule.kept else Text("broken ", style="red")
        console.print(Text.assemble(mark, rule.text, (f"  {rule.evidence}", "dim")), soft_wrap=True)
    return 0 if all(rule.kept for rule in rules) else 1
