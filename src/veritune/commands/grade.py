"""`veritune grade`: what the graders say of a file of answers, why, and how fast."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from veritune.core.config import fill_tables, require
from veritune.core.errors import CheckpointError, DataError
from veritune.core.statistics import wilson_interval
from veritune.core.tables import table
from veritune.core.types import Score
from veritune.grading import GradingPool
from veritune.report.collect import visible
from veritune.tasks import make_task
from veritune.tasks.data_files import Place, cell, read_table
from veritune.tasks.questions import QuestionTask
from veritune.tasks.rewards import grading_pool

CHUNK = 512
"""Answers that are graded between two movements of the progress bar."""
SHOWN_CHARACTERS = 300
"""Of a longer response the end is shown, where its answer stands."""


@dataclass(frozen=True, kw_only=True)
class GradeConfig:
    """Settings of `veritune grade`."""

    file: Path
    """The answers: a .jsonl, .parquet or .arrow file with the columns response and ground_truth."""
    task: str = "math"
    """The task that was asked; a ground truth may be a whole solution that ends with the answer."""
    task_settings: Any = table("task", "veritune.tasks:settings_class")
    """The settings of the task that was chosen."""
    reward: tuple[str, ...] = ()
    """The rewards that pay, as in training; default: the task's own, in the form that most responses wear."""
    output: Path | None = None
    """Where the scored rows go; default: beside the file, as scored-NAME.jsonl."""
    explain: int = 0
    """Graded answers to show with the rule that decided and what was read; one of each rule first."""
    skip_bad_rows: bool = False
    """Leave rows that cannot be used out and say how many, instead of stopping at the first."""
    workers: int = 2
    """Processes that grade what is not settled at once."""
    seconds_per_answer: float = 2.0
    """Time limit of one answer; past it the answer scores 0 and counts as a timeout."""

    def __post_init__(self) -> None:
        require(self, "explain", self.explain >= 0, "0 or more")
        require(self, "workers", 1 <= self.workers <= 16, "between 1 and 16")
        require(self, "seconds_per_answer", 0 < self.seconds_per_answer < float("inf"), "positive and finite")
        require(self, "output", self.output is None or self.output != self.file, "another file than the answers'")
        fill_tables(self)


class Answer(NamedTuple):
    """A row of the file."""

    place: Place
    row: Mapping[str, Any]
    response: str
    ground_truth: Any


class Graded(NamedTuple):
    """An answer and what the grader says of it."""

    answer: Answer
    score: Score

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        if self.score.failed:
            return "failed"
        if self.score.answer_reward >= 1:
            return "correct"
        return "format only" if self.score.format_reward >= 1 else "neither"


VERDICTS = {
    "correct": "green",
    "format only": "yellow",
    "neither": "red",
    "failed": "magenta",
}
"""Every answer has one of these, with its colour."""


def grade(config: GradeConfig) -> None:
    """Grade a file of answers, print the table, write the scored rows beside the file, and explain some of them.

    Raises DataError naming the row and column of an answer that cannot be used, and CheckpointError where the scored
    rows cannot be written.
    """
    console = Console(highlight=False)
    task = make_task(config.task, config.task_settings)
    rows = read_table(config.file, partial(_read_row, task), skip_bad_rows=config.skip_bad_rows)
    answers = rows.records
    worn = () if config.reward or not isinstance(task, QuestionTask) else (_worn_format(answers),)
    began = time.perf_counter()
    with grading_pool(task, config.reward or worn, config.workers, config.seconds_per_answer) as pool:
        scores = _score(pool, answers, console)
    seconds = time.perf_counter() - began
    graded = [Graded(answer, score) for answer, score in zip(answers, scores, strict=True)]
    output = config.output or config.file.with_name(f"scored-{config.file.stem}.jsonl")
    _write_rows(output, graded)
    if config.explain:
        _print_explanations(console, _one_of_each_rule(graded, config.explain))
    if rows.skipped:
        total = len(answers) + rows.skipped
        console.print(Text(f"left out: {rows.skipped} of {total} rows; the first: {rows.first_fault}"))
    console.print(_summary(graded))
    chosen = f"{worn[0]} (chosen by the form of most responses)" if worn else f"that of task {task.name}"
    told = ", ".join(config.reward) or chosen
    console.print(Text(f"reward: {told}; {len(graded) / seconds:,.0f} answers graded per second"))
    console.print(Text(f"scored rows: {output}"), soft_wrap=True)


def _read_row(task: Any, row: Mapping[str, Any], place: Place) -> Answer:
    response, ground_truth = cell(row, "response", place), cell(row, "ground_truth", place)
    if not isinstance(response, str):
        raise DataError(f"{place}: 'response' is {response!r:.80}; it must be text")
    if hasattr(task, "read_ground_truth"):
        ground_truth = task.read_ground_truth(ground_truth, place)
    return Answer(place, row, response, ground_truth)


def _worn_format(answers: Sequence[Answer]) -> str:
    """The format that most responses wear; a response with an <answer> tag wears that, whatever it boxes inside."""
    tagged = sum("<answer>" in answer.response for answer in answers)
    boxed = sum("\\boxed" in answer.response and "<answer>" not in answer.response for answer in answers)
    return "question_only" if boxed > tagged else "r1_zero"


def _score(pool: GradingPool, answers: Sequence[Answer], console: Console) -> list[Score]:
    pairs = [(answer.response, answer.ground_truth) for answer in answers]
    chunks = [pairs[start : start + CHUNK] for start in range(0, len(pairs), CHUNK)]
    hidden = not console.is_terminal
    scored = [pool.score(chunk) for chunk in track(chunks, "grading", console=console, transient=True, disable=hidden)]
    return [score for chunk in scored for score in chunk]


def _write_rows(output: Path, graded: Sequence[Graded]) -> None:
    """Write every row with its score, whole or not at all."""
    partial = output.with_name(f"{output.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for answer, score in graded:
                file.write(json.dumps({**answer.row, "score": asdict(score)}, default=str) + "\n")
        os.replace(partial, output)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise CheckpointError(f"cannot write {output}: {error.strerror}") from error


# --- What a person sees


def _summary(graded: Sequence[Graded]) -> Table:
    counts = Counter(each.verdict for each in graded)
    low, high = wilson_interval(counts["correct"], len(graded))
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("answers", justify="right")
    table.add_column("share", justify="right")
    table.add_column("95% interval", justify="right", style="dim")
    for verdict, style in VERDICTS.items():
        interval = f"{100 * low:.1f}–{high:.1%}" if verdict == "correct" else ""
        table.add_row(
            Text(verdict, style=style), f"{counts[verdict]:,}", f"{counts[verdict] / len(graded):.1%}", interval
        )
    table.add_row("all", f"{len(graded):,}", "", "", style="bold")
    return table


def _one_of_each_rule(graded: Sequence[Graded], most: int) -> list[Graded]:
    """At most `most` answers in the file's order: the first of every rule, then the second of every rule, and so on."""
    turns: Counter[tuple[str, str]] = Counter()
    order: list[tuple[int, int]] = []
    for index, each in enumerate(graded):
        rule = (each.verdict, each.score.rule)
        order.append((turns[rule], index))
        turns[rule] += 1
    return [graded[index] for index in sorted(index for _, index in sorted(order)[:most])]


def _print_explanations(console: Console, chosen: Sequence[Graded]) -> None:
    for each in chosen:
        place = each.answer.place
        console.print(
            Text.assemble(
                (f"{place.unit} {place.number}: ", "bold"),
                (each.verdict, f"bold {VERDICTS[each.verdict]}"),
                (f", rule: {each.score.rule}", "bold"),
            )
        )
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        extracted = "nothing to judge" if each.score.extracted is None else each.score.extracted
        for label, text in (
            ("read", extracted),
            ("expected", str(each.answer.ground_truth)),
            ("response", each.answer.response),
        ):
            grid.add_row(label, Text(_end_of(text)))
        console.print(grid)
        console.print()


def _end_of(text: str) -> str:
    shown = visible(text).strip()
    return shown if len(shown) <= SHOWN_CHARACTERS else "… " + shown[-SHOWN_CHARACTERS:]
