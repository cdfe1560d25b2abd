"""`veritune experiment`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

from veritune.commands.experiment.plan import Experiment, load_experiment, plan_cells, plan_focused_cells
from veritune.commands.experiment.results import write_results
from veritune.commands.experiment.sweep import Outcome, run_cells
from veritune.core.config import require
from veritune.core.errors import TrainingError, blot_logins
from veritune.core.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Settings of `veritune experiment`."""

    name: str = field(metadata={"argument": True})
    """The name of a shipped experiment, or a TOML file of the same form."""
    scale: Literal["embedded", "paper"] = "embedded"
    """The embedded policy on CPU cores, or the published setting on a GPU with vLLM."""
    seeds: int = 4
    """Runs of every setting: seeds 0, 1, …"""
    jobs: int | None = None
    """Cells that run side by side; default: one for each core at embedded scale, one at paper scale."""
    output: Path | None = None
    """Where the run folders and the report go; default: runs/ and a name made of experiment and scale."""

    def __post_init__(self) -> None:
        require(self, "seeds", self.seeds >= 1, "at least 1")
        require(self, "jobs", self.jobs is None or self.jobs >= 1, "at least 1")
        is_folder = self.output is None or self.output.is_dir() or not self.output.exists()
        require(self, "output", is_folder, "a folder, or new")


def run_experiment(config: ExperimentConfig) -> None:
    """Run what is still to be run of every cell, and report; TrainingError at the end where a cell failed."""
    began = time.perf_counter()
    experiment = load_experiment(config.name, config.scale)
    output = config.output or Path("runs") / f"{experiment.name}-{config.scale}"
    jobs = config.jobs or experiment.jobs or (usable_cores() if config.scale == "embedded" else 1)
    threads = 1 if jobs > 1 else None  # idle threads of one cell would stand in another's way
    cells = plan_cells(experiment, output, seeds=config.seeds, threads=threads)
    tell = Progress(len(cells))
    outcomes = run_cells(cells, jobs, tell)
    if experiment.focus:
        best = best_settings(experiment, outcomes)
        focused = plan_focused_cells(experiment, best, output, seeds=config.seeds, threads=threads)
        tell.total += len(focused)
        outcomes += run_cells(focused, jobs, tell, known=outcomes)
    command = shlex.join(["veritune", *map(blot_logins, sys.argv[1:])])
    write_results(experiment, outcomes, output, command=command, seconds=time.perf_counter() - began)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        first = failed[0]
        raise TrainingError(
            f"{len(failed)} of {len(outcomes)} cells failed; the first, {first.cell.name}: {first.reason}. "
            f"Its log is {first.cell.path}.log; the same command tries again"
        )


class Progress:
    """Prints each end of a cell with its number."""

    def __init__(self, total: int) -> None:
        self.total, self.told = total, 0

    def __call__(self, line: str) -> None:
        self.told += 1
        print(f"[{self.told}/{self.total}] {line}", flush=True)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def best_settings(experiment: Experiment, outcomes: Sequence[Outcome]) -> list[str]:
    """The settings with the highest mean accuracy at the last validation, diverged seeds counted as 0; best first."""
    finals: dict[str, list[float]] = {}
    for outcome in outcomes:
        rows = [row for row in RunFolder(outcome.cell.path).metrics() if "validation_accuracy" in row]
        final = rows[-1]["validation_accuracy"] if rows and outcome.status == "finished" else 0.0
        finals.setdefault(outcome.cell.setting, []).append(final)
    return sorted(finals, key=lambda setting: -fmean(finals[setting]))[: experiment.focus["best"]]
