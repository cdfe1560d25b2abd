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
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from veritune.core.config import require
from veritune.core.errors import ConfigError, DataError
from veritune.core.types import Example, Pairs, Score
from veritune.grading import extract_boxed, parse_gsm8k_response
from veritune.tasks.data_files import Place, cell, read_table, text_cell
from veritune.tasks.prompts import TemplateTask
from veritune.tasks.rewards import REWARDS

SAMPLES = Path(__file__).parents[1] / "assets" / "samples"
HELD_OUT_ONE_IN = 10
FINAL_ANSWER = "####"

_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$\\.,;]+)")


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


# --- The tasks


@dataclass(frozen=True, kw_only=True)
class QuestionTask(TemplateTask):
    """Questions that a policy answers in a form that the prompt asks for."""

    data: Path | None = None
    """Problems instead of the shipped sample: a .jsonl, .parquet or .arrow file, or hub:OWNER/NAME[:CONFIG][@SPLIT]."""
    validation_data: Path | None = None
    """Held-out problems, in the same form; default: one question in ten of data, the same ones every time."""
    skip_bad_rows: bool = False
    """Leave rows that cannot be used out of the data and say how many, instead of stopping at the first."""

    name: ClassVar[str]
    form: ClassVar[Form]
    reward: ClassVar[str] = "r1_zero"
    """The shipped reward that pays: the form in which the prompt asks for the answer."""
    notify: ClassVar[Any] = staticmethod(print)
    """Told of rows that the data lacks."""

    def __post_init__(self) -> None:
        allowed = "another source than data, which is split by itself"
        require(self, "validation_data", self.validation_data is None or self.validation_data != self.data, allowed)

    def examples(self, split: str) -> tuple[Example, ...]:
        """The problems of "train" or "validation", in the order of their source; DataError where there are none."""
        if split not in ("train", "validation"):
            raise ConfigError(f"split is {split!r}; allowed are train, validation")
        examples = self._splits[split == "validation"]
        if not examples:
            advice = "give data as well" if split == "train" else "give validation_data as well, or more data"
            raise DataError(f"task {self.name} has no {split} examples; {advice}")
        return examples

    @cached_property
    def _splits(self) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
        data = self.data
        if data is None and self.validation_data is None:
            data = SAMPLES / f"{self.name}.jsonl"
            self.notify(f"task {self.name} was given no data: its problems are the small sample that Veritune ships")
        return load_splits(self.name, self.form, data, self.validation_data, self.skip_bad_rows, self.notify)

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a response: the answer's closing tag, where there is one."""
        return REWARDS[self.reward].stop

    def rewards(self, pairs: Pairs) -> list[Score]:
        """The grader's verdicts on the answers in the responses."""
        return [REWARDS[self.reward].score(response, ground_truth) for response, ground_truth in pairs]

    def settle(self, response: str, ground_truth: Any) -> Score | None:
        """The Score of an answer that is cheap to judge, without a process; None for all others."""
        return REWARDS[self.reward].settle(response, ground_truth)

    def read_ground_truth(self, value: Any, place: Place) -> Any:
        """A ground truth of a file of answers in its short form; DataError naming the place for one that is none."""
        return short_gold(value, "ground_truth", place)


class GSM8KTask(QuestionTask):
    """Grade-school word problems."""

    name = "gsm8k"
    form = GSM8K


class MathTask(QuestionTask):
    """Competition problems."""

    name = "math"
    form = MATH


@dataclass(frozen=True, kw_only=True)
class FileTask(QuestionTask):
    """Any table with a question and an answer column."""

    question_column: str = "question"
    """The column of the questions."""
    answer_column: str = "answer"
    """The column of the answers: short, or a solution that ends with #### or a \\boxed{}."""

    name = "file"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("question_column", "answer_column"):
            require(self, name, bool(getattr(self, name)), "a column's name")
        require(self, "answer_column", self.answer_column != self.question_column, "another one than question_column")

    @property
    def form(self) -> Form:  # type: ignore[override]
        """How a row is read."""
        return form_with_columns(self.question_column, self.answer_column)

    @cached_property
    def _splits(self) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
        if self.data is None and self.validation_data is None:
            raise ConfigError("task.data is None; task file needs data or validation_data")
        return super()._splits
