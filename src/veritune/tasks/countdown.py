"""Countdown: combine the given numbers with + - * / so that they make the target.

    Use 9, 5, 18 to make 4.   ->   (18-9)-5

Three rooms in one file: the verifiers and the reward, the generator of solvable problems, and the task that is made
of both or of a file in the public data set's form. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any, Literal

from veritune.core.config import Rare
from veritune.core.errors import ConfigError, DataError
from veritune.core.randomness import derive_seed
from veritune.core.types import Example, Pairs, Score
from veritune.grading import evaluate_arithmetic
from veritune.tasks.countdown_traces import CARELESS, write_trace
from veritune.tasks.data_files import Place, cell, read_table
from veritune.tasks.prompts import TemplateTask

LONGEST_EQUATION = 1_000
"""Characters; far above any equation of a few numbers, and what keeps a hostile answer cheap to refuse."""
SPLITS = ("train", "validation")
STOP: tuple[str, ...] = ("</answer>",)


# --- Verifiers and reward


def extract_answer(text: str) -> str | None:
    """What stands in the last complete `<answer>...</answer>`, stripped; None if there is none. Linear in the text."""
    if not isinstance(text, str):
        return None
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start : text.index("</answer>", start)].strip()


def validate_numbers(equation: str, numbers: Sequence[int]) -> bool:
    """Whether the equation uses at least one number, and none more often than it is given.

    >>> validate_numbers("(64 + 14) - 16", [64, 14, 16, 7]), validate_numbers("(7 + 7) + 7", [7, 7, 65])
    (True, False)
    """
    used = _numbers_in(equation)
    return bool(used) and not used - Counter(numbers)


def evaluate_equation(text: str) -> float | None:
    """The value of an equation of integers, + - * / and parentheses; None for any other text. Nothing is executed."""
    value = evaluate_arithmetic(text) if isinstance(text, str) else None
    return None if value is None else float(value)


def reward_fn(text: str, ground_truth: Mapping[str, Any], require_all_numbers: bool = False) -> float:
    """1.0 for a correct equation, 0.1 for an answer tag around anything else, 0.0 without an answer tag.

    `ground_truth` is {"numbers": [...], "target": ...}; raises DataError if it is anything else, never for the text.
    """
    return score_response(text, ground_truth, require_all_numbers).reward


def score_response(text: str, ground_truth: Mapping[str, Any], require_all_numbers: bool = False) -> Score:
    """`reward_fn` with its reasons: the answer that was read, and the rule that decided.

    The rules: "no_answer_tag", "no_equation", "numbers" (one that is not given, or too often), "unused_number" (only
    with `require_all_numbers`), "value" (not the target) and "correct". Values are compared as exact fractions.
    """
    numbers, target = _read_ground_truth(ground_truth)
    answer = extract_answer(text)
    if answer is None:
        return Score(reward=0.0, format_reward=0.0, answer_reward=0.0, rule="no_answer_tag")
    rule = _judge(answer, numbers, target, require_all_numbers)
    if rule == "correct":
        return Score(reward=1.0, format_reward=1.0, answer_reward=1.0, extracted=answer, rule=rule)
    return Score(reward=0.1, format_reward=1.0, answer_reward=0.0, extracted=answer, rule=rule)


def _judge(equation: str, numbers: Sequence[int], target: Fraction, require_all_numbers: bool) -> str:
    value = evaluate_arithmetic(equation)
    if value is None:
        return "no_equation"
    if not validate_numbers(equation, numbers):
        return "numbers"
    if require_all_numbers and _numbers_in(equation) != Counter(numbers):
        return "unused_number"
    return "correct" if value == target else "value"


def _numbers_in(equation: str) -> Counter[int]:
    if not isinstance(equation, str) or len(equation) > LONGEST_EQUATION:
        return Counter()
    return Counter(int(digits) for digits in re.findall(r"[0-9]+", equation))


def _read_ground_truth(ground_truth: Mapping[str, Any]) -> tuple[list[int], Fraction]:
    try:
        numbers, target = [index(number) for number in ground_truth["numbers"]], ground_truth["target"]
        if not isinstance(target, Real):
            raise TypeError(f"a target of type {type(target).__name__}")
        # A float is read as it is written: 0.1 is one tenth, not the nearest binary fraction.
        return numbers, Fraction(str(target))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f'ground truth is {ground_truth!r}; it must be {{"numbers": [integers], "target": a number}}'
        ) from error


# The Countdown course's own spelling of these names.
_extract_answer = extract_answer
_validate_numbers = validate_numbers
_evaluate_equation = evaluate_equation


# --- Solver and generator


@dataclass(frozen=True, slots=True)
class Problem:
    """Numbers, each to be used at most once, and the target that all of them together can make."""

    numbers: tuple[int, ...]
    target: int


def solutions(numbers: Sequence[int], target: int) -> Iterator[str]:
    """Every equation, each once, that makes the target from all the numbers with steps through integers from 0 up.

    >>> list(solutions([9, 5, 18], 4))
    ['18-(9+5)', '(18-9)-5', '(18-5)-9']
    """
    found = set()
    for equation in _equations([(number, str(number)) for number in numbers], target):
        if equation not in found:
            found.add(equation)
            yield equation


def _equations(terms: list[tuple[int, str]], target: int) -> Iterator[str]:
    if len(terms) == 1:
        if terms[0][0] == target:
            yield terms[0][1]
        return
    for first, second in itertools.combinations(range(len(terms)), 2):
        rest = [term for place, term in enumerate(terms) if place not in (first, second)]
        # Subtraction and division take the larger number first, so that no step leaves the integers from 0 up.
        (high, high_text), (low, low_text) = sorted((terms[first], terms[second]), key=lambda term: -term[0])
        for value, operator in _results(high, low):
            text = f"{high_text}{operator}{low_text}"
            yield from _equations([*rest, (value, f"({text})" if rest else text)], target)


def _results(high: int, low: int) -> Iterator[tuple[int, str]]:
    yield high + low, "+"
    yield high - low, "-"
    yield high * low, "*"
    if low and high % low == 0:
        yield high // low, "/"


@lru_cache(maxsize=4096)
def _reachable(numbers: tuple[int, ...]) -> frozenset[int]:
    """Every value that some equation of all the (sorted) numbers has, with steps through integers from 0 up."""
    if len(numbers) == 1:
        return frozenset(numbers)
    values: set[int] = set()
    places = range(len(numbers))
    for size in range(1, len(numbers) // 2 + 1):
        for chosen in itertools.combinations(places, size):
            left = _reachable(tuple(numbers[place] for place in chosen))
            right = _reachable(tuple(numbers[place] for place in places if place not in chosen))
            for a, b in itertools.product(left, right):
                values.update(value for value, _ in _results(max(a, b), min(a, b)))
    return frozenset(values)


@lru_cache(maxsize=4096)
def _targets(multiset: tuple[int, ...], max_target: int) -> tuple[int, ...]:
    return tuple(sorted(value for value in _reachable(multiset) if 1 <= value <= max_target))


def split_of(numbers: Sequence[int]) -> str:
    """The split, "train" or "validation" (one multiset in five), that owns these numbers in whatever order.

    A published hash of the sorted numbers decides, so no multiset is ever in both, in any process on any machine.
    """
    digest = hashlib.sha256(",".join(str(number) for number in sorted(numbers)).encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") % 5 == 0 else "train"


def generate_problems(
    count: int, seed: int, split: str, numbers: int = 3, max_number: int = 20, max_target: int = 100
) -> list[Problem]:
    """Draw `count` distinct solvable problems of a split, with `numbers` (3 or 4) numbers from 1 to `max_number`.

    Numbers are drawn uniformly, and the target uniformly from what they make in 1 to `max_target`. The same arguments
    give the same problems; a smaller count gives the first of them. Raises ConfigError for an impossible setting, or
    where there are not that many problems.
    """
    _require_split(split)
    for name, value, allowed in (
        ("count", count, count >= 1),
        ("numbers", numbers, numbers in (3, 4)),
        ("max_number", max_number, max_number >= 1),
        ("max_target", max_target, max_target >= 1),
    ):
        if not allowed:
            raise ConfigError(f"{name} is {value}; it must be {'3 or 4' if name == 'numbers' else 'at least 1'}")
    generator = random.Random(derive_seed(seed, 0, f"countdown/{split}/{numbers}/{max_number}/{max_target}"))
    problems: dict[tuple[tuple[int, ...], int], Problem] = {}
    draws_in_vain = 0
    while len(problems) < count:
        drawn = tuple(generator.randint(1, max_number) for _ in range(numbers))
        multiset = tuple(sorted(drawn))
        targets = _targets(multiset, max_target) if split_of(multiset) == split else ()
        key = (multiset, generator.choice(targets)) if targets else None
        if key is not None and key not in problems:
            problems[key] = Problem(drawn, key[1])
            draws_in_vain = 0
        else:
            draws_in_vain += 1
        if draws_in_vain == 20_000:
            raise ConfigError(
                f"count is {count}; these settings have no more than about {len(problems)} {split} problems"
            )
    return list(problems.values())


# --- Files in the public data set's form


def read_problems(path: Path) -> list[Problem]:
    """Problems of a `.jsonl`, `.parquet` or `.arrow` file with a list of integers `nums` and an integer `target` a row.

    Raises DataError naming the file and the line (or row, from 1) that is broken, and for a file without any rows.
    """
    return read_table(path, _problem_from_row, columns=("nums", "target")).records


def _problem_from_row(row: Mapping[str, Any], place: Place) -> Problem:
    numbers, target = cell(row, "nums", place), cell(row, "target", place)
    if (
        not isinstance(numbers, list)
        or not numbers
        or not all(type(number) is int and number >= 0 for number in numbers)
    ):
        raise DataError(f"{place}: 'nums' is {numbers!r:.80}; it must be a list of integers, none below 0")
    if type(target) is not int:
        raise DataError(f"{place}: 'target' is {target!r:.80}; it must be an integer")
    return Problem(tuple(numbers), target)


# --- The task


@dataclass(frozen=True)
class CountdownTask(TemplateTask):
    """Countdown as a `Task`: generated problems, or those of `data`, both split by their multiset of numbers."""

    numbers: Literal[3, 4] = 3
    """How many numbers a generated problem has."""
    max_number: Rare[int] = 20
    """Generated problems take their numbers from 1 up to this."""
    max_target: Rare[int] = 100
    """Generated problems have targets from 1 up to this."""
    train_problems: Rare[int] = 8192
    """How many training problems are generated."""
    validation_problems: Rare[int] = 1024
    """How many held-out problems are generated."""
    seed: Rare[int] = 0
    """Seed of the generated problems."""
    data: Path | None = None
    """Problems instead of generated ones: a .jsonl, .parquet or .arrow file, or hub:OWNER/NAME[:CONFIG][@SPLIT]."""
    require_all_numbers: bool = False
    """Pay an equation only if it uses every number, not just a part of them."""

    name = "countdown"
    stop = STOP
    template = "compact"
    chat_template = "countdown_instruct"

    def examples(self, split: str) -> list[Example]:
        """The problems of "train" or "validation", always in the same order."""
        _require_split(split)
        if self.data is None:
            count = self.train_problems if split == "train" else self.validation_problems
            problems = generate_problems(count, self.seed, split, self.numbers, self.max_number, self.max_target)
        else:
            problems = [problem for problem in read_problems(self.data) if split_of(problem.numbers) == split]
            if not problems:
                raise DataError(f"{self.data}: none of its rows belongs to the {split} split")
        return [_example(problem, f"countdown-{split}-{number}") for number, problem in enumerate(problems)]

    def rewards(self, pairs: Pairs) -> list[Score]:
        """See `score_response`."""
        return [score_response(response, ground_truth, self.require_all_numbers) for response, ground_truth in pairs]

    def traces(self, seed: int) -> list[tuple[Example, str]]:
        """Each training problem of three numbers with a careless trace: about three in ten are right."""
        generator = random.Random(derive_seed(seed, 0, "traces"))
        examples = [example for example in self.examples("train") if len(example.ground_truth["numbers"]) == 3]
        return [
            (
                example,
                write_trace(
                    example.ground_truth["numbers"], example.ground_truth["target"], generator, CARELESS
                ).response,
            )
            for example in examples
        ]

    def read_ground_truth(self, value: Any, place: Place) -> Any:
        """A ground truth of a file of answers; DataError naming the place for one that is none."""
        try:
            _read_ground_truth(value)
        except DataError as error:
            raise DataError(f"{place}: 'ground_truth': {error}") from error
        return value


def _example(problem: Problem, identifier: str) -> Example:
    question = f"Use {', '.join(map(str, problem.numbers))} to make {problem.target}."
    return Example(identifier, question, {"numbers": list(problem.numbers), "target": problem.target})


def _require_split(split: str) -> None:
    if split not in SPLITS:
        raise ConfigError(f"split is {split!r}; allowed are {', '.join(SPLITS)}")
