"""The rewards that pay a response: a task's own, shipped ones by name, any function by its path, or a weighted sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from veritune.core.errors import ConfigError, RewardError
from veritune.core.registry import look_up
from veritune.core.types import Score, Task
from veritune.grading import (
    GradingPool,
    OneByOne,
    extract_answer_tag,
    question_only_score,
    r1_zero_score,
    settle_question_only,
    settle_r1_zero,
)
from veritune.grading.scores import Grader, as_score

Settle = Callable[[str, Any], Score | None]

OWN = "task"
"""The name of the task's own reward among several."""
SHIPPED_BYTES, OTHER_BYTES = 1 << 30, 1 << 35
"""Address space of a grading process: enough for the shipped graders; for other code, what no reward should need."""


@dataclass(frozen=True)
class Reward:
    """A shipped reward: the form in which an answer is looked for."""

    score: Callable[[str, Any], Score]
    settle: Settle
    """Decides the cheap answers without a process."""
    stop: tuple[str, ...]
    """The strings that end a response in this form."""


def r1_zero_strict_score(response: str, ground_truth: Any) -> Score:
    """`r1_zero_score` that demands exactly one space between `</think>` and `<answer>`."""
    return r1_zero_score(response, ground_truth, strict_format=True)


def settle_r1_zero_strict(response: str, ground_truth: Any) -> Score | None:
    """The Score of a response that does not keep the strict format; None for all others."""
    if extract_answer_tag(response, strict_format=True) is None:
        return Score(reward=0.0, format_reward=0.0, answer_reward=0.0, rule="format")
    return None


REWARDS = {
    "r1_zero": Reward(r1_zero_score, settle_r1_zero, ("</answer>",)),
    "r1_zero_strict": Reward(r1_zero_strict_score, settle_r1_zero_strict, ("</answer>",)),
    "question_only": Reward(question_only_score, settle_question_only, ()),
}


def reward_of_template(template: str) -> str:
    """The reward that a prompt asks for: r1_zero where it has a <think> or an <answer> tag, else question_only."""
    return "r1_zero" if "<think>" in template or "<answer>" in template else "question_only"


@dataclass(frozen=True)
class WeightedRewards:
    """A grader whose reward is the weighted sum of several; format, answer and rule are the first one's."""

    parts: tuple[tuple[str, Grader, float], ...]
    """The name that its metric has, the function and the weight of each."""

    def __call__(self, response: str, ground_truth: Any) -> Score:
        scores = {}
        for name, grader, _ in self.parts:
            try:
                scores[name] = as_score(grader(response, ground_truth))
            except Exception as error:
                raise RewardError(f"{name}: {type(error).__name__}: {error}") from error
        total = sum(weight * scores[name].reward for name, _, weight in self.parts)
        values = {name: score.reward for name, score in scores.items()}
        return replace(scores[self.parts[0][0]], reward=total, parts=values)


def parse_rewards(given: Sequence[str]) -> list[tuple[str, float]]:
    """The names and weights of `name` or `name=weight` entries; ConfigError for a weight that is no finite number."""
    parsed = []
    for entry in given:
        name, equals, weight = entry.partition("=")
        try:
            value = float(weight) if equals else 1.0
        except ValueError:
            value = math.nan
        if not (name and math.isfinite(value) and value):
            raise ConfigError(f"reward is {entry!r}; it must be a name, or name=weight with a finite weight but 0")
        parsed.append((name, value))
    return parsed


def grading_pool(
    task: Task, rewards: Sequence[str] = (), workers: int = 2, seconds_per_answer: float = 2.0
) -> GradingPool:
    """A pool that pays responses in processes that are killed at an answer's limit of time or memory.

    `rewards` are entries of `name` or `name=weight`: shipped rewards, "task" or `package.module:function`; without any
    the task's own pays. Raises ConfigError for a reward that there isn't.
    """
    chosen = parse_rewards(rewards) or [(OWN, 1.0)]
    parts = [(name.rpartition(":")[2], _grader(name, task), weight) for name, weight in chosen]
    if len({label for label, _, _ in parts}) < len(parts):
        raise ConfigError(f"reward is {', '.join(rewards)}; two of these have the same name")
    grader, settle = parts[0][1], None
    if len(parts) == 1 and parts[0][2] == 1:
        name = parts[0][0]
        settle = getattr(task, "settle", None) if name == OWN else REWARDS[name].settle if name in REWARDS else None
    else:
        grader = WeightedRewards(tuple(parts))
    shipped = all(name in REWARDS or (name == OWN and _is_shipped(task)) for name, _ in chosen)
    return GradingPool(
        grader,
        settle,
        workers=workers,
        seconds_per_answer=seconds_per_answer,
        memory_bytes=SHIPPED_BYTES if shipped else OTHER_BYTES,
    )


def _is_shipped(task: Task) -> bool:
    return type(task).__module__.startswith("veritune.")


def _grader(name: str, task: Task) -> Grader:
    if name == OWN:
        return OneByOne(task.rewards)
    function = look_up("reward", name, {OWN: None, **{name: reward.score for name, reward in REWARDS.items()}})
    if not callable(function):
        raise ConfigError(f"reward is {name!r}, which is no function of a response and a ground truth")
    return function
