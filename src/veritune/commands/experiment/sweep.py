"""Run the cells of an experiment as processes of their own, some side by side.

Finished cells are skipped, killed ones continue from their last checkpoint. A cell diverged if one of its updates was
refused, because its loss or gradient was not finite, or if it collapsed: it is then stopped, recorded and left alone.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from veritune.commands.experiment.plan import Cell
from veritune.commands.launch import config_class
from veritune.core.config import from_mapping, read_toml, to_toml
from veritune.core.errors import ConfigError, Interrupted
from veritune.core.run_folder import RunFolder
from veritune.core.signals import signal_of
from veritune.core.tables import flat_values

Row = Mapping[str, Any]
Status = Literal["finished", "diverged", "failed", "blocked"]

POLL_SECONDS = 0.2
COLLAPSED_SHARE = 0.5
"""A run collapsed if its reward stays below this share of what it was before training …"""
COLLAPSED_STEPS = 10
"""… in this many training steps on end …"""
COLLAPSED_VALIDATIONS = 2
"""… or in this many validations on end."""
NOT_COMPARED = (
    *("run", "threads", "processes", "tensorboard", "wandb"),
    *("microbatch_tokens", "engine.max_rows", "engine.cuda_graphs"),
)
"""Settings that do not change what a cell measures."""
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    cell: Cell
    status: Status
    reason: str = ""
    """Why it did not end well."""
    computed: bool = False
    """Whether this call ran it, or a part of it."""


@dataclass
class Running:
    """A cell whose process is under way."""

    cell: Cell
    process: subprocess.Popen[bytes]
    seen: int = 0
    """Bytes of metrics that have been looked at."""


def run_cells(
    cells: Sequence[Cell], jobs: int, tell: Callable[[str], None], known: Sequence[Outcome] = ()
) -> list[Outcome]:
    """Run every cell that is not done, `jobs` at a time, in the order of their needs; `tell` is told of each end.

    `known` are the outcomes of cells that these may need. Raises ConfigError where a run folder holds another run, and
    Interrupted on Ctrl-C, SIGTERM and SIGHUP, after every process has saved its state.
    """
    outcomes = {outcome.cell.path: outcome for outcome in known}
    waiting, running = list(cells), list[Running]()
    for cell in cells:
        refuse_other_run(cell)
    try:
        while waiting or running:
            for cell in list(waiting):
                outcome = ended_before(cell) or blocked(cell, outcomes)
                if outcome is None and len(running) < jobs and _is_ready(cell, outcomes):
                    running.append(start(cell))
                elif outcome is None:
                    continue
                else:
                    outcomes[cell.path] = outcome
                    tell(line_about(outcome))
                waiting.remove(cell)
            for each in list(running):
                if outcome := look_at(each):
                    running.remove(each)
                    outcomes[each.cell.path] = outcome
                    tell(line_about(outcome))
            if running:
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt as stopped:
        print("stopping after the step in progress of every cell", file=sys.stderr, flush=True)
        raise Interrupted("the sweep was stopped; the same command goes on with it", signal_of(stopped)) from None
    finally:
        stop(running)
    return [outcomes[cell.path] for cell in cells]


# --- Before a cell runs ------------------------------------------------------------------------------------------


def refuse_other_run(cell: Cell) -> None:
    """ConfigError if the cell's run folder holds a run with other settings."""
    file = cell.path / "config.toml"
    if not file.exists():
        return
    written = flat_values(from_mapping(config_class(cell.recipe), read_toml(file), str(file)))
    config = resolve(cell) if all(RunFolder(path).is_finished() for path in needed_paths(cell)) else cell.config
    open_ended = () if config is not cell.config else tuple(cell.references)
    for name, wanted in flat_values(config).items():
        if name not in (*NOT_COMPARED, *open_ended) and written.get(name) != wanted:
            raise ConfigError(
                f"cell {cell.name} is to have {name} {wanted!r}, but {cell.path} holds a run with "
                f"{written.get(name)!r}; choose another output"
            )


def needed_paths(cell: Cell) -> list[Path]:
    """The run folders of the cells that this one needs."""
    return [cell.path.parents[1] / needed / cell.path.name for needed in cell.needs]


def ended_before(cell: Cell) -> Outcome | None:
    """The outcome of a cell that has nothing left to do."""
    run = RunFolder(cell.path)
    if reason := run.divergence():
        return Outcome(cell, "diverged", reason)
    if not run.is_finished():
        return None
    return judged(Outcome(cell, "finished"))


def blocked(cell: Cell, outcomes: Mapping[Path, Outcome]) -> Outcome | None:
    """The outcome of a cell that can never start, because one that it needs did not end well."""
    for path in needed_paths(cell):
        if path in outcomes and outcomes[path].status != "finished":
            needed = outcomes[path]
            return Outcome(cell, "blocked", f"it needs {needed.cell.name}, which {needed.status}")
    return None


def _is_ready(cell: Cell, outcomes: Mapping[Path, Outcome]) -> bool:
    return all(path in outcomes for path in needed_paths(cell))


def resolve(cell: Cell) -> Any:
    """The cell's config with the last checkpoint, or the run folder, of the cells that it refers to."""
    found: dict[str, Any] = {}
    for (name, _), path in zip(cell.references.items(), needed_paths(cell), strict=True):
        steps = RunFolder(path).checkpoint_steps()
        if name == "policy" and not steps:
            raise ConfigError(f"cell {cell.name} wants the policy of {path}, which trains none")
        found[name] = str(path / "checkpoints" / f"step-{steps[-1]:06d}") if name == "policy" else path
    return replace(cell.config, **found)


# --- While it runs -----------------------------------------------------------------------------------------------


def start(cell: Cell) -> Running:
    """Start the cell, or go on with it where a process was killed; its output goes to a log beside its folder."""
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    settings, log = cell.path.with_name(f"{cell.path.name}.toml"), cell.path.with_name(f"{cell.path.name}.log")
    if (cell.path / "config.toml").exists():
        # A cell that was killed before its first checkpoint has nothing to go on from.
        begin_again = [] if RunFolder(cell.path).checkpoint_steps() else ["--restart"]
        arguments = ["resume", str(cell.path), *begin_again]
    else:
        settings.write_text(to_toml(resolve(cell)), encoding="utf-8")
        arguments = [cell.recipe, "--config", str(settings)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "veritune", *arguments],  # whatever lies in the present folder
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which passes it on
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - a sweep has no other thread
        )
    return Running(cell, process)


def _end_with_parent() -> None:
    if LIBC is not None:  # else a cell outlives a sweep that is killed, and its lock keeps the next one off
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def look_at(running: Running) -> Outcome | None:
    """The outcome of a cell whose process has ended, or that has just diverged; None while it goes on."""
    cell, code = running.cell, running.process.poll()
    metrics = cell.path / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else 0
    if code is None and size == running.seen:
        return None
    running.seen = size
    if code is None:
        if reason := collapse(RunFolder(cell.path).metrics()):
            stop([running])
            return _diverged(cell, reason)
        return None
    if code == 0 or RunFolder(cell.path).is_finished():  # what comes after the last step takes nothing from it
        return judged(Outcome(cell, "finished", computed=True))
    words = last_line(cell.path.with_name(f"{cell.path.name}.log"))
    if RunFolder(cell.path).steps("refused"):
        return _diverged(cell, words.removeprefix("error: "))
    return Outcome(cell, "failed", words or f"its process ended with code {code}", computed=True)


def judged(outcome: Outcome) -> Outcome:
    """The outcome of a run that took all of its steps: a collapse is one however fast it was."""
    reason = collapse(RunFolder(outcome.cell.path).metrics())
    return replace(_diverged(outcome.cell, reason), computed=outcome.computed) if reason else outcome


def _diverged(cell: Cell, reason: str) -> Outcome:
    RunFolder(cell.path).mark_diverged(reason)
    return Outcome(cell, "diverged", reason, computed=True)


def collapse(rows: Sequence[Row]) -> str | None:
    """Why a run with these metrics counts as collapsed, or None.

    It does from the first step on at which its reward has stayed below half of the validation before training, in ten
    training steps or in two validations on end.
    """
    if not rows or "validation_reward" not in rows[0]:
        return None
    limit = COLLAPSED_SHARE * rows[0]["validation_reward"]
    for name, length in (("reward", COLLAPSED_STEPS), ("validation_reward", COLLAPSED_VALIDATIONS)):
        low = 0
        for row in (row for row in rows[1:] if name in row):
            low = low + 1 if row[name] < limit else 0
            if low == length:
                kind = "steps" if name == "reward" else "validations"
                return f"collapsed: {length} {kind} up to step {row['step']} had a reward below {limit:.3f}"
    return None


def stop(running: Sequence[Running]) -> None:
    """Have the processes end after the step in progress and wait for them; a second Ctrl-C kills them."""
    for each in running:
        each.process.terminate()
    try:
        for each in running:
            each.process.wait()
    except KeyboardInterrupt:
        for each in running:
            each.process.kill()
            each.process.wait()


# --- Words -------------------------------------------------------------------------------------------------------


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def line_about(outcome: Outcome) -> str:
    """One line of progress."""
    name, run = outcome.cell.name, RunFolder(outcome.cell.path)
    if outcome.status != "finished":
        return f"{name}  {outcome.status}: {outcome.reason}"
    row = run.metrics()[-1]
    accuracy = f"accuracy {row['validation_accuracy']:.3f}, " if "validation_accuracy" in row else ""
    skipped = "" if outcome.computed else " before"
    return f"{name}  finished{skipped}: {accuracy}step {row['step']}, {run.seconds_spent():.0f} s"
