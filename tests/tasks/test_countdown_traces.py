"""Traces say only what is true of the arithmetic, and are right or wrong as they say."""

import random
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veritune.tasks.countdown import CountdownTask, generate_problems, score_response
from veritune.tasks.countdown_traces import CAREFUL, CARELESS, write_trace

LINE = re.compile(r"(\d+)([-+*/])(\d+)=(\d+) (\d+)((?: [-+*/]\d+\|\d+)+) (yes|no)")
APPLY = {"+": lambda a, b: a + b, "-": lambda a, b: abs(a - b), "*": lambda a, b: a * b}


def exact(operator, a, b):
    return Fraction(max(a, b), min(a, b)) if operator == "/" else APPLY[operator](a, b)


@settings(max_examples=150, deadline=None)
@given(index=st.integers(0, 499), seed=st.integers(0, 2**32), careful=st.booleans())
def test_every_fact_of_a_trace_is_true_and_its_verdict_is_what_it_says(index, seed, careful):
    problem = generate_problems(500, 0, "train")[index]
    trace = write_trace(problem.numbers, problem.target, random.Random(seed), CAREFUL if careful else CARELESS)
    *lines, last = trace.response.split("\n")
    assert re.fullmatch(r"</think> <answer> [-+*/()\d]+ </answer>", last)
    tried = []
    for line in lines:
        a, operator, b, result, left, rest, verdict = LINE.fullmatch(line).groups()
        assert sorted([int(a), int(b), int(left)]) == sorted(problem.numbers)
        assert int(result) == exact(operator, int(a), int(b))
        tried.append((a, operator, b, left))
        for second, value, target in re.findall(r" ([-+*/])(\d+)\|(\d+)", rest):
            assert int(target) == problem.target
            assert int(value) == exact(second, int(result), int(left))
        if careful:
            hits = [int(value) == problem.target for value in re.findall(r"(\d+)\|", rest)]
            assert hits == [False] * (len(hits) - 1) + [verdict == "yes"]
    assert len(set(tried)) == len(tried)
    truth = {"numbers": list(problem.numbers), "target": problem.target}
    assert (score_response(trace.response, truth).reward == 1) == trace.correct
    assert trace.correct or not careful


def test_a_trace_by_hand():
    # Of 1, 1, 1 only 1+1, 1-1, 1*1 and 1/1 can be first; only 1+1 with the last 1 added makes 3.
    trace = write_trace([1, 1, 1], 3, random.Random(0), CAREFUL)
    assert trace.correct
    *failed, found, answer = trace.response.split("\n")
    assert (found, answer) == ("1+1=2 1 +3|3 yes", "</think> <answer> (1+1)+1 </answer>")
    allowed = {"1-1=0 1 +1|3 -1|3 *0|3 no", "1*1=1 1 +2|3 -0|3 *1|3 /1|3 no", "1/1=1 1 +2|3 -0|3 *1|3 /1|3 no"}
    assert set(failed) <= allowed


def test_about_three_in_ten_careless_traces_are_right():
    task = CountdownTask(train_problems=3000)
    traces = task.traces(seed=0)
    scores = task.rewards([(response, example.ground_truth) for example, response in traces])
    right = sum(score.reward == 1 for score in scores) / len(traces)
    assert right == pytest.approx(0.30, abs=0.03)
    assert traces == task.traces(seed=0) != task.traces(seed=1)
