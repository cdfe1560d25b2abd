"""Text -> Score: extraction, mathematical equivalence, time-limited workers. No torch; usable on its own."""

from veritune.grading.extraction import extract_answer_tag, extract_boxed, parse_gsm8k_response, parse_mmlu_response
from veritune.grading.judge import is_equivalent
from veritune.grading.math.arithmetic import evaluate_arithmetic
from veritune.grading.pool import GradingPool
from veritune.grading.rewards import (
    question_only_reward_fn,
    question_only_score,
    r1_zero_reward_fn,
    r1_zero_score,
    settle_question_only,
    settle_r1_zero,
)
from veritune.grading.rules import DEFAULT_POLICY, GradingPolicy
from veritune.grading.scores import OneByOne

__all__ = [
    "DEFAULT_POLICY",
    "GradingPolicy",
    "GradingPool",
    "OneByOne",
    "evaluate_arithmetic",
    "extract_answer_tag",
    "extract_boxed",
    "is_equivalent",
    "parse_gsm8k_response",
    "parse_mmlu_response",
    "question_only_reward_fn",
    "question_only_score",
    "r1_zero_reward_fn",
    "r1_zero_score",
    "settle_question_only",
    "settle_r1_zero",
]
