"""What reward functions return, as Scores."""

import math
from fractions import Fraction

import numpy as np
import pytest

from veritune.core.types import Score
from veritune.grading.scores import OneByOne, as_score, score_safely


@pytest.mark.parametrize(
    "value, reward, form, answer",
    [
        (0.25, 0.25, 0.25, 0.25),
        (True, 1.0, 1.0, 1.0),
        (np.float32(0.5), 0.5, 0.5, 0.5),
        (Fraction(1, 4), 0.25, 0.25, 0.25),
        ({"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0}, 0.0, 1.0, 0.0),
        ({"reward": -2}, -2.0, -2.0, -2.0),
        (Score(1, 1, 0), 1.0, 1.0, 0.0),
    ],
)
def test_a_score_a_dict_and_a_number_are_scores(value, reward, form, answer):
    score = as_score(value)
    assert (score.reward, score.format_reward, score.answer_reward) == (reward, form, answer)
    assert type(score.reward) is float and not score.failed


@pytest.mark.parametrize(
    "value, rule",
    [
        (math.nan, "reward failed: ValueError: reward is nan; it must be finite"),
        (-math.inf, "reward failed: ValueError: reward is -inf; it must be finite"),
        (Score(1.0, 1.0, math.inf), "reward failed: ValueError: answer_reward is inf; it must be finite"),
        (
            {"reward": 1.0, "format_reward": math.nan},
            "reward failed: ValueError: format_reward is nan; it must be finite",
        ),
        ({"score": 1.0}, "reward failed: TypeError: a dict without 'reward': it has 'score'"),
        ("1.0", "reward failed: TypeError: reward is '1.0'; it must be a number"),
        (None, "reward failed: TypeError: reward is None; it must be a number"),
    ],
)
def test_anything_else_scores_zero_and_says_why(value, rule):
    score = score_safely(lambda response, ground_truth: value, "", "")
    assert (score.reward, score.format_reward, score.answer_reward, score.rule) == (0.0, 0.0, 0.0, rule)
    assert score.failed


def test_what_a_score_says_is_text():
    score = as_score(Score(1.0, 1.0, 1.0, extracted=Fraction(1, 2), rule=7))
    assert (score.extracted, score.rule) == ("1/2", "7")


def test_the_reason_of_an_exception_is_one_line_of_bounded_length():
    def fail(response, ground_truth):
        raise KeyError("a\n" + "b" * 1000)

    score = score_safely(fail, "", "")
    assert score.rule == "reward failed: KeyError: 'a\\n" + "b" * (200 - len("KeyError: 'a\\n"))


def test_a_batch_function_fails_for_its_pair_alone():
    def rewards(pairs):
        return [Score(1.0 / len(response), 1.0, 0.0) for response, _ in pairs]

    scores = OneByOne(rewards).here([("ab", ""), ("", ""), ("abcd", "")])
    assert [score.reward for score in scores] == [0.5, 0.0, 0.25]
    assert [score.rule for score in scores] == ["", "reward failed: ZeroDivisionError: float division by zero", ""]
    assert OneByOne(lambda pairs: []).here([("", "")])[0].rule == (
        "reward failed: ValueError: rewards gave 0 scores for one pair"
    )
