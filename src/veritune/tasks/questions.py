r"""Questions with one short answer, from files: GSM8K, MATH, and any table with a question and an answer column.

One task class for all of them; they differ in how a row is read. A gold is kept in its short form: what stands after
the last `####` of a worked solution, else in its last `\boxed{…}`, else the text itself.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veritune.core.errors import ConfigError, DataError
from veritune.core.types import Example, Pairs, Score
from veritune.grading import (
    GradingPool,
    extract_answer_tag,
    extract_boxed,
    parse_gsm8k_response,
    question_only_score,
    r1_zero_score,
    settle_question_only,
    settle_r1_zero,
)
from veritune.tasks.data_files import Place, cell, read_table, text_cell
from veritune.tasks.prompts import fill_prompt

SAMPLES = Path(__file__).parents[1] / "assets" / "samples"
HELD_OUT_ONE_IN = 10
FINAL_ANSWER = "####"

_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$\\.,;]+)")


# --- Rewards


@dataclass(frozen=True)
class RewardFormat:
    """The form in which an answer is looked for, and what a pool needs to judge it within limits."""

    score: Callable[[str, Any], Score]
    settle: Callable[[str, Any], Score | None]
    """Decides the cheap answers without a worker."""
    stop: tuple[str, ...]

    def pool(self, workers: int = 2, seconds_per_answer: float = 2.0) -> GradingPool:
        """A pool of processes that compute `score` within limits."""
        return GradingPool(self.score, self.settle, workers=workers, seconds_per_answer=seconds_per_answer)


def r1_zero_strict_score(response: str, ground_truth: Any) -> Score:
    """`r1_zero_score` that demands exactly one space between `</think>` and `<answer>`."""
    return r1_zero_score(response, ground_truth, strict_format=True)


def settle_r1_zero_strict(response: str, ground_truth: Any) -> Score | None:
    """The Score of a response that does not keep the strict format; None for all others."""
    if extract_answer_tag(response, strict_format=True) is None:
        return Score(reward=0.0, format_reward=0.0, answer_reward=0.0, rule="format")
    return None


REWARD_FORMATS = {
    "r1_zero": RewardFormat(r1_zero_score, settle_r1_zero, ("</answer>",)),
    "r1_zero_strict": RewardFormat(r1_zero_strict_score, settle_r1_zero_strict, ("</answer>",)),
    "question_only": RewardFormat(question_only_score, settle_question_only, ()),
}


def reward_format_of(template: str) -> str:
    """The reward that a prompt asks for: r1_zero where it has a <think> or an <answer> tag, else question_only."""
    return "r1_zero" if "<think>" in template or "<answer>" in template else "question_only"


# --- Golds


def short_gold(value: Any, column: str, place: Place) -> Any:
    """A gold in its short form: text, a number, or a list of these, of which any is accepted.

    Raises DataError naming place and column for anything else, for text without an answer in it, and for NaN.
    """
    if isinstance(value, list) and value and not any(isinstance(each, list) for each in value):
        return [short_gold(each, column, place) for each in value]
    if isinstance(value, str) and (short := _short_answer(value)):
        return short
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value
    allowed = "text with an answer in it, a finite number, or a list of these"
    raise DataError(f"{place}: {column!r} is {value!r:.80}; it must be {allowed}")


def _short_answer(text: str) -> str:
    if FINAL_ANSWER in text:
        return text.rpartition(FINAL_ANSWER)[2].strip()
    boxed = boxed_answer(text)
    return text.strip() if boxed is None else boxed


def boxed_answer(text: str) -> str | None:
    r"""What a worked solution boxes last, stripped; None without a box. `\fbox{5}` and `\boxed 5` are boxes as well."""
    boxed = extract_boxed(_BARE_BOX.sub(r"\\boxed{\1}", text.replace("\\fbox", "\\boxed")))
    return None if boxed is None else boxed.strip()


# --- Rows


@dataclass(frozen=True)
class Form:
    """How the rows of a data set are read."""

    read_row: Callable[[Mapping[str, Any], Place], Example]
    columns: tuple[str, ...] | None
    """The columns that a row needs; None where it needs one of several."""


def gsm8k_row(row: Mapping[str, Any], place: Place) -> Example:
    """A GSM8K row: `question`, and `answer` that ends with `#### ` and a number."""
    answer = text_cell(row, "answer", place)
    if FINAL_ANSWER not in answer:
        raise DataError(f"{place}: 'answer' is {answer!r:.80}; it must end with {FINAL_ANSWER} and a number")
    gold = parse_gsm8k_response(answer.rpartition(FINAL_ANSWER)[2])
    if gold is None:
        raise DataError(f"{place}: 'answer' has no number after its last {FINAL_ANSWER}")
    return Example(str(place.number), text_cell(row, "question", place), gold)


def math_row(row: Mapping[str, Any], place: Place) -> Example:
    r"""A MATH row: `problem` or `question`, `answer` or `solution` with a `\boxed{}`; `subject` or `type`, `level`."""
    question = text_cell(row, "problem" if "problem" in row else "question", place)
    meta = {name: row[name] for name in ("subject", "type", "level") if name in row}
    if "answer" in row and row["answer"] not in (None, ""):
        return Example(str(place.number), question, short_gold(row["answer"], "answer", place), meta)
    if "solution" not in row:
        raise DataError(f"{place}: 'answer' and 'solution' are missing; the row has {', '.join(map(repr, row))}")
    gold = boxed_answer(text_cell(row, "solution", place))
    if not gold:
        raise DataError(f"{place}: 'solution' has no \\boxed{{}} with an answer in it")
    return Example(str(place.number), question, gold, meta)


def form_with_columns(question_column: str, answer_column: str) -> Form:
    """Rows with a question and an answer in columns of these names."""

    def read_row(row: Mapping[str, Any], place: Place) -> Example:
        gold = short_gold(cell(row, answer_column, place), answer_column, place)
        return Example(str(place.number), text_cell(row, question_column, place), gold)

    return Form(read_row, (question_column, answer_column))


GSM8K = Form(gsm8k_row, ("question", "answer"))
MATH = Form(math_row, None)


# --- Splits


def split_of(question: str) -> str:
    """The split, "train" or "validation" (one question in ten), that owns a question.

    A published hash of the question decides, so a question that stands twice in a file is never in both.
    """
    digest = hashlib.sha256(question_key(question).encode("utf-8", "surrogatepass")).digest()
    return "validation" if int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0 else "train"


def question_key(question: str) -> str:
    """The question without its white space, letter case and look-alike characters: what makes two the same."""
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def load_splits(
    name: str,
    form: Form,
    data: Path | None,
    validation_data: Path | None,
    skip_bad_rows: bool,
    notify: Callable[[str], None],
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Training and validation examples.

    Both sources: one each, without the training questions that stand in the validation data. `data` alone is split by
    `split_of`; `validation_data` alone leaves nothing to train on. `notify` is told of everything that is left out.
    """
    rows = _read(form, data, skip_bad_rows, notify) if data else []
    if validation_data is None:
        train = [example for example in rows if split_of(example.question) == "train"]
        validation = [example for example in rows if split_of(example.question) == "validation"]
    else:
        validation = _read(form, validation_data, skip_bad_rows, notify)
        held_out = {question_key(example.question) for example in validation}
        train = [example for example in rows if question_key(example.question) not in held_out]
        if len(train) < len(rows):
            notify(f"{data}: {len(rows) - len(train)} questions are left out, because {validation_data} asks them too")
    return tuple(_named(train, f"{name}-train")), tuple(_named(validation, f"{name}-validation"))


def _read(form: Form, source: Path, skip_bad_rows: bool, notify: Callable[[str], None]) -> list[Example]:
    table = read_table(source, form.read_row, columns=form.columns, skip_bad_rows=skip_bad_rows)
    if table.skipped:
        rows = len(table.records) + table.skipped
        notify(f"{source}: {table.skipped} of {rows} rows are left out; the first: {table.first_fault}")
    return table.records


def _named(examples: list[Example], prefix: str) -> Iterator[Example]:
    for example in examples:
        yield Example(f"{prefix}-{example.id}", example.question, example.ground_truth, example.meta)


# --- The task


@dataclass  # not frozen, because the attributes of a Task can be set
class QuestionTask:
    """Questions that a policy answers in a form that the prompt asks for."""

    name: str
    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    template: str
    """The prompt, with {question} in it."""
    reward_format: RewardFormat
    stop: tuple[str, ...]
    """Strings that end a response: the answer's closing tag, where there is one."""

    def examples(self, split: str) -> tuple[Example, ...]:
        """The problems of "train" or "validation", in the order of their source; DataError where there are none."""
        if split not in ("train", "validation"):
            raise ConfigError(f"split is {split!r}; allowed are train, validation")
        examples = self.train if split == "train" else self.validation
        if not examples:
            advice = "give data as well" if split == "train" else "give validation_data as well, or more data"
            raise DataError(f"task {self.name} has no {split} examples; {advice}")
        return examples

    def prompt(self, example: Example) -> str:
        """The question in the prompt."""
        return fill_prompt(self.template, example.question)

    def rewards(self, pairs: Pairs) -> list[Score]:
        """The grader's verdicts on the answers in the responses."""
        return [self.reward_format.score(response, ground_truth) for response, ground_truth in pairs]
