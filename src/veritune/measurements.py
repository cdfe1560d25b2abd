"""What `veritune eval` and `veritune best-of-n` print: tables from the run folder alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from veritune.recipes.eval import category_of
from veritune.runs import RunFolder

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
    console.print(f"every response: {path / 'validation' / 'step-000000.jsonl'}", soft_wrap=True)


def print_best_of_n(path: Path) -> None:
    """pass@N (of the first N samples, and the unbiased estimate), Best@N and majority@N for every N of the run."""
    row = RunFolder.open(path).metrics()[-1]
    sizes = sorted(int(name.removeprefix("best_at_")) for name in row if _is_size(name))
    table = Table("N", "pass@N", "unbiased", "Best@N", "majority@N", title="percent [95% interval]")
    for n in sizes:
        table.add_row(str(n), *(_interval(row, name, n) for name in ("pass", "pass_unbiased", "best", "majority")))
    Console().print(table)


def _is_size(name: str) -> bool:
    return name.startswith("best_at_") and name.removeprefix("best_at_").isdigit()


def _interval(row: Mapping[str, Any], name: str, n: int) -> str:
    value, low, high = (100 * row[f"{part}_at_{n}"] for part in (name, f"{name}_low", f"{name}_high"))
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _example(row: Mapping[str, Any]) -> str:
    score = row["score"]
    return (
        f"\n[bold]{escape(row['question'])}[/bold]  ({category_of(score)}, rule {escape(score['rule'])})\n"
        f"{escape(row['response'])}\n[dim]extracted: {escape(str(score['extracted']))}, "
        f"ground truth: {escape(str(row['ground_truth']))}[/dim]"
    )
