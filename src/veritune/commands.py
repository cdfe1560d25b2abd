"""What the commands do that start, continue and show runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from veritune.display import live_display, print_outcome
from veritune.launch import launch, resume
from veritune.recipes.grpo import GRPOConfig
from veritune.report import write_report


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """Settings of `veritune resume`."""

    run: Path = field(metadata={"argument": True})
    """The run folder to continue."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Settings of `veritune report`."""

    runs: tuple[Path, ...] = field(metadata={"argument": True})
    """The run folders to report on."""
    output: Path | None = None
    """Where report.html and figures/ go; default: the first run folder."""


def grpo(config: GRPOConfig) -> None:
    """`veritune grpo`."""
    print_outcome(launch("grpo", config, live_display))


demo = grpo
"""The embedded defaults are the defaults: the demonstration is the real command, told nothing."""


def resume_run(config: ResumeConfig) -> None:
    """`veritune resume`."""
    print_outcome(resume(config.run, live_display))


def report(config: ReportConfig) -> None:
    """`veritune report`."""
    print(write_report(config.runs, config.output or config.runs[0]))
