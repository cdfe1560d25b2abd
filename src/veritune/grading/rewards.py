"""Responses -> Score, and the two reward functions that other frameworks import."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from veritune.core.types import Score
from veritune.grading.extraction import MAX_CANDIDATES, extract_all_boxed, extract_answer_blocks, extract_boxed
from veritune.grading.judge import Verdict, as_text, judge
from veritune.grading.math.limits import MAX_CHARACTERS
from veritune.grading.rules import DEFAULT_POLICY, GradingPolicy

GroundTruth = Any
"""A string, a number, or a list of accepted strings."""


def r1_zero_reward_fn(response: str, ground_truth: GroundTruth, strict_format: bool = False) -> dict[str, float]:
    r"""Reward of `… </think> <answer> … </answer>`: `format_reward`, `answer_reward`, `reward`, each 0.0 or 1.0.

    The reward is 1 where the format is kept and the answer is right. `strict_format=True` demands exactly one space
    between the two tags, as the parser published with the r1_zero prompt does; otherwise any white space will do.
    """
    return _as_dict(r1_zero_score(response, ground_truth, strict_format))


def question_only_reward_fn(response: str, ground_truth: GroundTruth) -> dict[str, float]:
    r"""Reward of the last `\boxed{…}`: `format_reward`, `answer_reward`, `reward`, each 0.0 or 1.0."""
    return _as_dict(question_only_score(response, ground_truth))


def _as_dict(score: Score) -> dict[str, float]:
    return {"format_reward": score.format_reward, "answer_reward": score.answer_reward, "reward": score.reward}


def r1_zero_score(
    response: str, ground_truth: GroundTruth, strict_format: bool = False, policy: GradingPolicy = DEFAULT_POLICY
) -> Score:
    """The Score of a response in the r1_zero format; `rule` says why and `extracted` what was judged."""
    return _score(response, ground_truth, lambda text: _r1_zero_candidates(text, strict_format), policy)


def question_only_score(response: str, ground_truth: GroundTruth, policy: GradingPolicy = DEFAULT_POLICY) -> Score:
    r"""The Score of a response whose answer is its last `\boxed{…}`; `rule` says why and `extracted` what was
    judged."""
    return _score(response, ground_truth, _boxed_candidates, policy)


def _r1_zero_candidates(response: str, strict_format: bool) -> list[str] | None:
    """The answers that a response gives, the last one first; None where the format is not kept."""
    blocks = extract_answer_blocks(response, strict_format)
    if blocks is None:
        return None
    candidates: list[str] = []
    for block in reversed(blocks):
        boxed = extract_all_boxed(block) if "\\boxed" in block else []
        candidates += boxed or [block]
    return candidates


def _boxed_candidates(response: str) -> list[str] | None:
    last = extract_boxed(response)
    if last is None:
        return None
    return extract_all_boxed(response) if last.strip() else [last]


def _score(
    response: str,
    ground_truth: GroundTruth,
    find_candidates: Callable[[str], list[str] | None],
    policy: GradingPolicy,
) -> Score:
    started = time.perf_counter()
    candidates = find_candidates(response)
    if candidates is None:
        return Score(0.0, 0.0, 0.0, None, "format", time.perf_counter() - started)
    verdict = judge_candidates(candidates, ground_truth, policy)
    reward = float(verdict.equal)
    return Score(reward, 1.0, reward, candidates[0].strip(), verdict.rule, time.perf_counter() - started)


def judge_candidates(candidates: Sequence[str], ground_truth: GroundTruth, policy: GradingPolicy) -> Verdict:
    """The verdict on the last answer; an earlier one that is not right too contradicts it, and then neither is paid."""
    distinct = list(dict.fromkeys(candidate.strip() for candidate in candidates))
    if len(candidates) > MAX_CANDIDATES:
        return Verdict(False, "too many answers")
    verdict = judge(distinct[0], ground_truth, policy)
    if verdict.equal:
        for earlier in distinct[1:]:
            if not judge(earlier, ground_truth, policy).equal:
                return Verdict(False, "contradicting answers")
    return verdict


def settle_r1_zero(response: str, ground_truth: GroundTruth) -> Score | None:
    """The Score of an r1_zero response that is cheap to judge, else None: what a pool decides without a worker."""
    return _settle(response, ground_truth, lambda text: _r1_zero_candidates(text, False))


def settle_question_only(response: str, ground_truth: GroundTruth) -> Score | None:
    r"""The Score of a `\boxed{}` response that is cheap to judge, else None."""
    return _settle(response, ground_truth, _boxed_candidates)


_COSTLY = re.compile(
    r"!|\*\*|\^[^^]{0,6}\^|\^\{?[0-9]{4}|[⁰-⁹²³¹]{4}|sin|cos|tan|cot|sec|csc|log|ln|exp|binom|floor|ceil"
)
_CHEAP_CHARACTERS = 160


def _is_cheap(text: str) -> bool:
    """Whether judging `text` takes microseconds: short, without towers of powers, factorials and transcendentals.

    A text too long to be read is cheap too: it is only compared.
    """
    return len(text) > MAX_CHARACTERS or (len(text) <= _CHEAP_CHARACTERS and not _COSTLY.search(text))


def _settle(
    response: str, ground_truth: GroundTruth, find_candidates: Callable[[str], list[str] | None]
) -> Score | None:
    candidates = find_candidates(response)
    if candidates is None:
        return Score(0.0, 0.0, 0.0, None, "format")
    texts = [*candidates, *map(as_text, ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth])]
    if not all(_is_cheap(text) for text in texts):
        return None
    verdict = judge_candidates(candidates, ground_truth, DEFAULT_POLICY)
    return Score(float(verdict.equal), 1.0, float(verdict.equal), candidates[0].strip(), verdict.rule)
