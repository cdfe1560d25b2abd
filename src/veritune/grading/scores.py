"""What a reward function returns -> Score: a failure scores 0 and says why, and no exception leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat

from veritune.core.errors import RewardError
from veritune.core.types import Pairs, RewardFunction, Score

Grader = Callable[[str, Any], Any]
"""(response, ground truth) -> a Score, a dict with `reward`, or a number."""

LONGEST_REASON = 200
"""Characters of an exception's message that a rule keeps."""


def as_score(value: Any) -> Score:
    """A reward function's result as a Score of finite numbers.

    A dict has `reward`; `format_reward` and `answer_reward` are the reward where it lacks them, as for a plain number.
    Raises TypeError for anything else and ValueError for NaN or infinity.
    """
    if isinstance(value, Mapping) and "reward" not in value:
        raise TypeError(f"a dict without 'reward': it has {', '.join(map(repr, value)) or 'nothing'}")
    if isinstance(value, Mapping):
        parts = [value["reward"], *(value.get(name, value["reward"]) for name in ("format_reward", "answer_reward"))]
    elif isinstance(value, Score):
        parts = [value.reward, value.format_reward, value.answer_reward]
    else:
        parts = [value] * 3
    reward, form, answer = map(_finite, ("reward", "format_reward", "answer_reward"), parts)
    if isinstance(value, Score):
        extracted = None if value.extracted is None else str(value.extracted)
        return replace(
            value, reward=reward, format_reward=form, answer_reward=answer, extracted=extracted, rule=str(value.rule)
        )
    return Score(reward, form, answer)


def _finite(name: str, value: Any) -> float:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} is {value!r:.80}; it must be a number")
    if not math.isfinite(value := float(value)):
        raise ValueError(f"{name} is {value}; it must be finite")
    return value


def failed(reason: str, seconds: float = 0.0) -> Score:
    """The Score of a response whose reward failed for a reason that starts with one of `REWARD_FAILURES`."""
    return Score(0.0, 0.0, 0.0, None, reason, seconds)


def score_safely(grader: Grader, response: str, ground_truth: Any) -> Score:
    """The grader's Score; of one that raises or returns no finite number, 0 with the rule "reward failed: ..."."""
    try:
        return as_score(grader(response, ground_truth))
    except Exception as error:  # a reward must never end a run
        named = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
        reason = " ".join(named.split()).removesuffix(":")
        return failed(f"reward failed: {reason[:LONGEST_REASON]}")


@dataclass(frozen=True)
class OneByOne:
    """A task's rewards as a grader of one pair, so that a pair that makes them fail costs no other."""

    rewards: RewardFunction

    def __call__(self, response: str, ground_truth: Any) -> Score:
        scores = self.rewards([(response, ground_truth)])
        if len(scores) != 1:
            raise ValueError(f"rewards gave {len(scores)} scores for one pair")
        return scores[0]

    def here(self, pairs: Pairs) -> list[Score]:
        """The Scores of pairs in this process, where nothing limits their time."""
        return [score_safely(self, *pair) for pair in pairs]
