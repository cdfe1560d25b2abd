"""What an experiment came to: one report over its cells, a table, results.json and results.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from veritune.commands.experiment.plan import Experiment
from veritune.commands.experiment.sweep import Outcome
from veritune.commands.leaderboard import check_rules
from veritune.commands.measurements import print_table
from veritune.core.run_folder import RunFolder
from veritune.core.statistics import duration
from veritune.report import tables, write_report
from veritune.report.collect import Run, Setting, collect_run, setting_estimate


def write_results(
    experiment: Experiment, outcomes: Sequence[Outcome], output: Path, *, command: str, seconds: float
) -> None:
    """Write the report, results.json and results.md into `output`, and print the table.

    `seconds` is what this call took; the cells' own seconds, over all calls, are in their run folders.
    """
    measured = [outcome for outcome in outcomes if RunFolder(outcome.cell.path).metrics()]
    if measured:
        write_report([outcome.cell.path for outcome in measured], output)
    settings = collect_named(measured)
    shown = [settings_table(settings, outcomes)]
    if (samples := tables.samples_table(settings)).rows:
        shown.append(samples)
    written = summary(experiment, settings, outcomes, command=command, seconds=seconds)
    text = json.dumps(written, indent=2, ensure_ascii=False) + "\n"
    (output / "results.json").write_text(text, encoding="utf-8", errors="backslashreplace")
    facts = ". ".join([time_facts(written), *broken_rules(outcomes)])
    page = [f"**{experiment.question}**", *map(markdown, shown), f"`{command}` — {facts}."]
    (output / "results.md").write_text("\n\n".join(page) + "\n", encoding="utf-8", errors="backslashreplace")
    print_results(experiment, shown, facts, output)


def collect_named(outcomes: Sequence[Outcome]) -> list[Setting]:
    """The runs by the experiment's own names of the settings."""
    runs: dict[str, list[Run]] = {}
    for outcome in outcomes:
        runs.setdefault(outcome.cell.setting, []).append(collect_run(outcome.cell.path))
    return [Setting(name, {}, tuple(each)) for name, each in runs.items()]


def settings_table(settings: Sequence[Setting], outcomes: Sequence[Outcome]) -> tables.Table:
    """The report's table of settings, and how many cells of each did not end well."""
    table = tables.settings_table(settings)
    faults = {
        setting.label: [o for o in outcomes if o.cell.setting == setting.label and o.status != "finished"]
        for setting in settings
    }
    if not any(faults.values()):
        return table
    cells = [f"{len(faults[row[0]])}: {faults[row[0]][0].status}" if faults[row[0]] else "" for row in table.rows]
    rows = tuple((*row, cell) for row, cell in zip(table.rows, cells, strict=True))
    note = f"{table.note} A diverged run counts with its last validation."
    return tables.Table((*table.header, "not finished"), rows, note)


def summary(
    experiment: Experiment, settings: Sequence[Setting], outcomes: Sequence[Outcome], *, command: str, seconds: float
) -> dict[str, Any]:
    """Everything that the page says, as plain data."""
    return {
        "experiment": experiment.name,
        "question": experiment.question,
        "scale": experiment.scale,
        "command": command,
        "seconds_of_this_call": seconds,
        "cells_of_this_call": sum(outcome.computed for outcome in outcomes),
        "seconds_of_all_cells": sum(RunFolder(outcome.cell.path).seconds_spent() for outcome in outcomes),
        "settings": {setting.label: setting_numbers(setting) for setting in settings},
        "cells": {outcome.cell.name: cell_numbers(outcome) for outcome in outcomes},
    }


def setting_numbers(setting: Setting) -> dict[str, Any]:
    """A setting's measures over its seeds, before and after: mean and 95% interval."""
    numbers: dict[str, Any] = {}
    for measure in tables.MEASURES:
        for last, name in ((False, "before"), (True, "after")):
            if each := setting_estimate(setting, measure.metric, last=last):
                interval = {"value": each.value, "low": each.low, "high": each.high}
                numbers.setdefault(name, {})[measure.metric.removeprefix("validation_")] = interval
    return numbers


def cell_numbers(outcome: Outcome) -> dict[str, Any]:
    """How a cell ended, and the validation that it ended with."""
    run = RunFolder(outcome.cell.path)
    validations = [row for row in run.metrics() if "validation_accuracy" in row]
    last: Mapping[str, Any] = validations[-1] if validations else {}
    return {
        "status": outcome.status,
        **({"reason": outcome.reason} if outcome.reason else {}),
        "seed": outcome.cell.config.seed,
        "run": str(outcome.cell.path),
        "seconds": run.seconds_spent(),
        **{
            key: value for key, value in last.items() if key == "step" or key.startswith("validation_") or "_at_" in key
        },
    }


def broken_rules(outcomes: Sequence[Outcome]) -> list[str]:
    """What the leaderboard's cells are to be blamed for, or that there is nothing."""
    checked = [o for o in outcomes if o.cell.recipe == "leaderboard" and o.status == "finished"]
    broken = [
        f"{outcome.cell.name} breaks the rule: {rule.text} ({rule.evidence})"
        for outcome in checked
        for rule in check_rules(outcome.cell.path)
        if not rule.kept
    ]
    return broken or (["Every finished run keeps every rule of the leaderboard"] if checked else [])


# --- Words -------------------------------------------------------------------------------------------------------


def time_facts(written: Mapping[str, Any]) -> str:
    """What was computed and how long it took."""
    return (
        f"{len(written['cells'])} cells, {duration(written['seconds_of_all_cells'])} of runs; this call computed "
        f"{written['cells_of_this_call']} in {duration(written['seconds_of_this_call'])}"
    )


def markdown(table: tables.Table) -> str:
    """A table in Markdown, its note under it."""
    lines = [table.header, tuple("---" for _ in table.header), *table.rows]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)
    return f"{text}\n\n{table.note}" if table.note else text


def print_results(experiment: Experiment, shown: Sequence[tables.Table], facts: str, output: Path) -> None:
    console = Console(highlight=False)
    console.print(Text(f"\n{experiment.question}", style="bold"))
    for table in shown:
        print_table(console, table)
    console.print(Text(facts))
    for place in ("report.html", "results.json", "results.md"):
        console.print(Text(str(output / place)), soft_wrap=True)
