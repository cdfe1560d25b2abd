"""What `veritune eval` and `veritune best-of-n` print: tables from the run folder alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from veritune.core.run_folder import RunFolder
from veritune.recipes.eval import category_of
from veritune.report import tables
from veritune.report.collect import Setting, collect_run, visible

LABELS = {
    "correct": "format 1, answer 1",
    "format1": "format 1, answer 0",
    "format0": "format 0, answer 0",
}


def print_evaluation(path: Path, *, show: int = 0, category: str = "all") -> None:
    """The counts, the accuracy with its interval, the lengths, and `show` examples of a category."""
    run, console = RunFolder.open(path), Console()
    row = run.metrics()[-1]
    total = sum(row[f"count_{name}"] for name in LABELS)
    counts = Table("", "responses", "share", title=f"{total} problems")
    for name, label in LABELS.items():
        counts.add_row(label, str(row[f"count_{name}"]), f"{row[f'count_{name}'] / total:.1%}")
    console.print(counts)
    console.print(
        f"accuracy {row['validation_accuracy']:.1%} "
        f"(95% {row['validation_accuracy_low']:.1%} to {row['validation_accuracy_high']:.1%}), "
        f"reward {row['validation_reward']:.3f}, truncated {row['validation_truncated']:.1%}"
    )
    lengths = [("mean", "length"), ("correct", "length_correct"), ("incorrect", "length_incorrect")]
    shown = ", ".join(f"{label} {_number(row[f'validation_{name}'])}" for label, name in lengths)
    console.print(f"length in tokens: {shown}; {row['rollouts_per_second']:.1f} rollouts/s")
    examples = [each for each in run.read_rows("validation", 0) if category in ("all", category_of(each["score"]))]
    for example in examples[:show]:
        console.print(_example(example))
    place = path / "validation" / "step-000000.jsonl"
    console.print(Text(visible(f"every response: {place}")), soft_wrap=True)


def print_best_of_n(path: Path) -> None:
    """pass@N (of the first N samples, and the unbiased estimate), Best@N and majority@N for every N of the run."""
    print_table(Console(highlight=False), tables.samples_table([Setting("", {}, (collect_run(path),))]))


def print_table(console: Console, table: tables.Table) -> None:
    """A report's table in the terminal, its note under it."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in table.header:
        grid.add_column(Text(name), overflow="fold")
    for cells in table.rows:
        grid.add_row(*map(Text, cells))
    console.print(grid)
    if table.note:
        console.print(Text(table.note, style="dim"))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _example(row: Mapping[str, Any]) -> Text:
    score = row["score"]
    return Text.assemble(
        (f"\n{visible(row['question'])}", "bold"),
        f"  ({category_of(score)}, rule {visible(score['rule'])})\n{visible(row['response'])}\n",
        (visible(f"extracted: {score['extracted']}, ground truth: {row['ground_truth']}"), "dim"),
    )
