"""Estimators against enumeration and by hand."""

import dataclasses
import itertools
import math
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veritune.core.types import Completion, Example, Group, Score
from veritune.trainer.evaluate import (
    accuracy_interval,
    best_of,
    majority_of,
    sampled_entropy,
    several_samples,
    summarize,
    unbiased_pass_at_n,
    wilson_interval,
)


def completion(logprobs, reason="stop"):
    return Completion((1,), tuple(range(len(logprobs))), "", tuple(logprobs), reason, 0)


def score(correct, extracted=None, form=1.0):
    return Score(reward=float(correct), format_reward=form, answer_reward=float(correct), extracted=extracted)


@given(st.integers(1, 8).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total), st.integers(1, total))))
def test_the_unbiased_estimator_is_the_average_over_all_subsets(case):
    total, correct, n = case
    samples = [True] * correct + [False] * (total - correct)
    subsets = list(itertools.combinations(samples, n))
    assert unbiased_pass_at_n(total, correct, n) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_wilson_interval_by_hand():
    # 8 of 10: centre (0.8 + z²/20) / (1 + z²/10), spread z sqrt(0.016 + z²/400) / (1 + z²/10), z² = 3.8414588
    centre, scale = 0.8 + 3.8414588 / 20, 1 + 3.8414588 / 10
    spread = math.sqrt(3.8414588) * math.sqrt(0.016 + 3.8414588 / 400)
    assert wilson_interval(8, 10) == pytest.approx(((centre - spread) / scale, (centre + spread) / scale), abs=1e-6)
    assert wilson_interval(0, 10)[0] == pytest.approx(0.0, abs=1e-12)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_summary_by_hand():
    scores = [score(1), score(0), score(0, form=0.0)]
    completions = [completion([-1.0, -2.0]), completion([-0.5] * 4), completion([0.0] * 6, "length")]
    groups = [Group(Example("", "", ""), [c], [s]) for c, s in zip(completions, scores, strict=True)]
    summary = summarize(groups)
    assert summary["accuracy"] == pytest.approx(1 / 3)
    assert summary["format_reward"] == pytest.approx(2 / 3)
    assert (summary["length"], summary["length_correct"], summary["length_incorrect"]) == (4, 2, 5)
    assert summary["truncated"] == pytest.approx(1 / 3)
    assert summary["entropy"] == pytest.approx(5 / 12)
    assert (summary["accuracy_low"], summary["accuracy_high"]) == wilson_interval(1, 3)
    assert "grader_timeouts" not in summary
    late = dataclasses.replace(scores[2], rule="timeout")
    summary = summarize([groups[1], Group(Example("", "", ""), completions[1:], [scores[1], late])])
    assert summary["length_correct"] is None and summary["grader_timeouts"] == 1


def test_the_interval_is_over_problems_not_over_siblings():
    # Siblings that all agree are no more evidence than one of them.
    assert accuracy_interval([[True] * 8] * 6 + [[False] * 8] * 4) == pytest.approx(wilson_interval(6, 10), rel=0.1)
    # Group means 1/4, 2/4, 3/4, 2/4: variance 1/24, of their mean 1/96; 0.25 / (1/96) = 24 trials, but 16 responses.
    rows = [[True, False, False, False], [True, True, False, False], [True, True, True, False], [True, False] * 2]
    assert accuracy_interval(rows) == pytest.approx(wilson_interval(8, 16))
    # Means 0, 1, 1/2, 1/2: variance 1/6, of their mean 1/24; 0.25 / (1/24) = 6 trials.
    assert accuracy_interval([[False] * 4, [True] * 4, *rows[1::2]]) == pytest.approx(wilson_interval(3, 6))
    assert accuracy_interval([[False] * 4] * 3) == wilson_interval(0, 3)


def test_entropy_is_estimated_without_bias():
    # Draws of a coin with p = 0.8, in exactly their proportions, have the coin's entropy.
    draws = [math.log(0.8)] * 8 + [math.log(0.2)] * 2
    assert sampled_entropy([completion(draws)]) == pytest.approx(-0.8 * math.log(0.8) - 0.2 * math.log(0.2))


def test_best_is_the_highest_mean_and_majority_the_most_frequent_first_seen():
    assert best_of([completion([-1.0]), completion([-0.2, -0.3]), completion([-0.25])]) == 1
    assert majority_of([score(0, "a"), score(1, "b"), score(0, None), score(1, "b")]) == 1
    assert majority_of([score(0, "a"), score(1, "b")]) == 0
    assert majority_of([score(0), score(0)]) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.floats(-5, -0.01)), min_size=6, max_size=6), min_size=1, max_size=5)
)
def test_pass_is_monotone_in_n_and_best_at_one_is_pass_at_one(table):
    groups = [
        Group(
            Example(str(i), "", ""),
            [completion([value]) for _, value in row],
            [score(right, str(right)) for right, _ in row],
        )
        for i, row in enumerate(table)
    ]
    measured = [several_samples(groups, n) for n in range(1, 7)]
    for name in ("pass", "pass_unbiased"):
        values = [each[name] for each in measured]
        assert all(low <= high + 1e-12 for low, high in itertools.pairwise(values))
    assert measured[0]["best"] == measured[0]["pass"] == measured[0]["majority"]
    assert all(each["best"] <= each["pass"] for each in measured)
    assert measured[0]["pass_unbiased"] == pytest.approx(fmean(right for row in table for right, _ in row))
    assert measured[5]["pass_unbiased"] == measured[5]["pass"]
