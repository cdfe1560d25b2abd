"""What the commands do that start and continue runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from veritune.commands.launch import launch, resume
from veritune.commands.leaderboard import LeaderboardConfig, print_leaderboard
from veritune.commands.measurements import print_best_of_n, print_evaluation
from veritune.recipes.config import BestOfNConfig, EvalConfig, ExpertIterationConfig, GRPOConfig, SFTConfig
from veritune.report.terminal import live_display, print_outcome


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """Settings of `veritune resume`."""

    run: Path = field(metadata={"argument": True})
    """The run folder to continue."""
    restart: bool = False
    """Begin again at the first step; what the run has come to so far moves into its folder discarded-N."""


def grpo(config: GRPOConfig) -> None:
    """`veritune grpo`, and `veritune demo`: the embedded defaults are the defaults."""
    print_outcome(launch("grpo", config, live_display))


def sft(config: SFTConfig) -> None:
    """`veritune sft`."""
    print_outcome(launch("sft", config, live_display))


def expert_iteration(config: ExpertIterationConfig) -> None:
    """`veritune expert-iteration`."""
    print_outcome(launch("expert-iteration", config, live_display))


def leaderboard(config: LeaderboardConfig) -> int:
    """`veritune leaderboard`."""
    path = launch("leaderboard", config, live_display)
    print_outcome(path)
    return print_leaderboard(path)


def evaluate(config: EvalConfig) -> None:
    """`veritune eval`."""
    path = launch("eval", config)
    print_evaluation(path, show=config.show, category=config.category)


def best_of_n(config: BestOfNConfig) -> None:
    """`veritune best-of-n`."""
    print_best_of_n(launch("best-of-n", config))


def resume_run(config: ResumeConfig) -> None:
    """`veritune resume`."""
    print_outcome(resume(config.run, live_display, restart=config.restart))
