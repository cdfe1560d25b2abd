"""Rewards that raise, hang or return no number: the rollout scores 0, is counted and warned of; the run goes on."""

import json
from statistics import fmean, stdev

import pytest
from meeting import MeetingTask
from vowels import VowelTask, follow, fresh

from veritune.core.errors import DataError, RewardError
from veritune.core.run_folder import RunFolder
from veritune.core.types import Score
from veritune.recipes import eval as eval_recipe
from veritune.recipes import grpo, sft
from veritune.recipes.config import EvalConfig, GRPOConfig, SFTConfig
from veritune.tasks.rewards import grading_pool
from veritune.trainer.batches import safe_rewards
from veritune.trainer.session import Session

SMALL = GRPOConfig(
    steps=2, rollout_batch_size=16, group_size=4, train_batch_size=16, max_tokens=12, validation_examples=6
)
REASONS = {0: "no such text", 1: "reward is nan; it must be finite", 2: "reward is inf; it must be finite"}


def kind_of(response):
    return sum(map(ord, response)) % 8


class BrokenTask(VowelTask):
    """Pays a tenth for every character, and breaks in three ways on three of eight texts."""

    def reward(self, response_text, ground_truth):
        kind = kind_of(response_text)
        if kind == 0:
            raise ValueError("no such text")
        value = {1: float("nan"), 2: float("inf")}.get(kind, len(response_text) / 10)
        return Score(reward=value, format_reward=1.0, answer_reward=value)


def expected_score(response):
    reason = REASONS.get(kind_of(response))
    return (len(response) / 10, "") if reason is None else (0.0, f"reward failed: ValueError: {reason}")


def test_their_rollouts_score_zero_with_the_reason_and_the_steps_go_on(random_policy, tmp_path, capsys):
    run = RunFolder.create(tmp_path / "run", "", {})
    follow(grpo, SMALL, fresh(random_policy), run, task=BrokenTask())
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]
    warnings = capsys.readouterr().err
    seen = set()
    for row in run.metrics()[1:]:
        rollouts = run.read_rows("rollouts", row["step"])
        expected = [expected_score(each["response"]) for each in rollouts]
        assert [(each["score"]["reward"], each["score"]["rule"]) for each in rollouts] == expected
        failures = sum(rule != "" for _, rule in expected)
        assert 0 < failures < 16 and row["reward_failures"] == failures
        assert row["reward"] == pytest.approx(fmean(reward for reward, _ in expected))
        assert f"warning: step {row['step']}: {failures} of 16 rewards failed and count as 0; most often" in warnings
        for start in range(0, 16, 4):  # a failed reward is a 0 among its siblings
            group = [reward for reward, _ in expected[start : start + 4]]
            advantages = [(reward - fmean(group)) / (stdev(group) + 1e-6) for reward in group]
            assert [each["advantage"] for each in rollouts[start : start + 4]] == pytest.approx(advantages, abs=1e-5)
        seen |= {rule for _, rule in expected}
    assert len(seen) == 4  # each of the three faults has been met


def test_a_run_whose_rewards_all_fail_stops_and_says_so(random_policy, tmp_path):
    class NeverTask(VowelTask):
        def reward(self, response_text, ground_truth):
            raise OSError("the judge is gone")

    for recipe, config in ((grpo, SMALL), (eval_recipe, EvalConfig(max_tokens=4, validation_examples=6))):
        run = RunFolder.create(tmp_path / recipe.__name__, "", {})
        message = "^step 0: all 6 rewards failed; most often by: reward failed: OSError: the judge is gone$"
        with pytest.raises(RewardError, match=message):
            follow(recipe, config, fresh(random_policy), run, task=NeverTask())
        assert run.metrics() == []


def test_eight_rewards_that_take_long_are_computed_side_by_side(tmp_path):
    """Each waits for the other seven: one after another, all of them would run out of time."""
    task = MeetingTask(str(tmp_path))
    with grading_pool(task, seconds_per_answer=30.0) as pool:
        session = Session(SMALL, None, task, None, None, rewards=pool.score)
        scores = safe_rewards(session, "step 1", [("", "")] * 8)
    assert [(score.reward, score.rule) for score in scores] == [(1.0, "")] * 8


def test_traces_are_filtered_by_rewards_that_may_fail(random_policy, tmp_path, capsys):
    responses = ["a" * 11, chr(104), "b"]  # the numbers of their letters, modulo 8: 3, 0 and 2
    rows = [{"prompt": "p", "response": response, "ground_truth": ""} for response in responses]
    traces = tmp_path / "traces.jsonl"
    traces.write_text("".join(json.dumps(row) + "\n" for row in rows))
    session = Session(SFTConfig(traces=traces, filter_correct=True), fresh(random_policy), BrokenTask(), None, None)
    assert sft.load_pairs(session)[1] == {"traces_read": 3, "traces_kept": 1, "traces_unique": 1}
    assert "warning: traces: 2 of 3 rewards failed and count as 0" in capsys.readouterr().err
    traces.write_text('{"prompt": "p", "response": "b"}\n')
    with pytest.raises(DataError, match="has no 'ground_truth'"):
        sft.load_pairs(session)
