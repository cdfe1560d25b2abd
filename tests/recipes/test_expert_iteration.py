"""Expert iteration: what is kept of a round, and its update against a plain loop."""

import dataclasses

import pytest
import torch
from vowels import assert_resumed_is_uninterrupted, assert_same_weights, follow, fresh, weights
from vowels import supervised_steps_by_hand as by_hand

from veritune.core.errors import ConfigError
from veritune.core.run_folder import RunFolder
from veritune.core.types import Completion, Example, Group, Score
from veritune.model.policy import save_policy
from veritune.recipes import expert_iteration
from veritune.recipes.config import ExpertIterationConfig
from veritune.recipes.expert_iteration import learning_rates, right_responses

SMALL = ExpertIterationConfig(
    steps=2,
    questions_per_step=6,
    group_size=4,
    batch_size=64,
    max_tokens=10,
    validation_examples=4,
    learning_rate=1e-3,
)


def group(prompt, *responses):
    completions = [Completion((prompt,), ids, "", (-1.0,) * len(ids), "stop", 0) for ids, _ in responses]
    scores = [Score(reward, reward, float(reward == 1)) for _, reward in responses]
    return Group(Example("", "", ""), completions, scores)


def test_right_responses_are_kept_once_within_a_question_if_asked():
    groups = [
        group(1, ((5,), 1.0), ((6,), 0.1), ((5,), 1.0), ((7,), 1.0)),
        group(2, ((5,), 1.0), ((8,), 0.0)),  # the same response to another question stays
        group(1, ((5,), 1.0), ((9,), 1.0)),  # more questions than there are examples ask one of them twice
    ]
    assert [each.ids for each in right_responses(groups, deduplicate=True)] == [(5,), (7,), (5,), (9,)]
    assert [each.ids for each in right_responses(groups, deduplicate=False)] == [(5,), (5,), (7,), (5,), (5,), (9,)]
    assert right_responses([group(1, ((5,), 0.1))], deduplicate=True) == []


def kept_by_hand(rows):
    """(prompt ids, response ids) of what a round's file says is right, each once a question."""
    kept = {}
    for row in rows:
        if row["score"]["answer_reward"] >= 1:
            kept[row["id"], tuple(row["prompt_ids"]), tuple(row["response_ids"])] = None
    return [(prompt, response) for _, prompt, response in kept]


def test_two_rounds_are_those_of_a_plain_loop(random_policy, tmp_path):
    run = RunFolder.create(tmp_path / "run", "", {})
    follow(expert_iteration, SMALL, fresh(random_policy), run)
    rounds = [run.read_rows("rollouts", step) for step in (1, 2)]
    kept = [kept_by_hand(rows) for rows in rounds]
    assert all(0 < len(each) < 24 for each in kept)
    model, losses = by_hand(random_policy, kept, SMALL.learning_rate)  # one optimiser step holds all of a round
    rows = run.metrics()[1:]
    assert [row["responses"] for row in rows] == [24, 24]
    assert [row["responses_kept"] for row in rows] == [len(each) for each in kept]
    assert [row["updates"] for row in rows] == [1, 1]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-3)
    assert_same_weights(weights(run.path, 2), model, random_policy.model)
    for row, sampled, trained in zip(rows, rounds, kept, strict=True):
        assert len({each["id"] for each in sampled}) == 6
        assert all(4 <= len(each["response_ids"]) <= 10 for each in sampled)
        tokens = sum(len(each["response_ids"]) for each in sampled)
        entropy = -sum(sum(each["logprobs"]) for each in sampled) / tokens
        assert row["entropy"] == pytest.approx(entropy, rel=1e-4)
        assert row["accuracy"] == sum(each["score"]["answer_reward"] >= 1 for each in sampled) / 24
        assert row["rollout_tokens_per_second"] == pytest.approx(tokens / row["seconds_rollout"])
        assert row["train_tokens"] == sum(len(prompt) + len(response) for prompt, response in trained)
        assert row["train_tokens_per_second"] == pytest.approx(row["train_tokens"] / row["seconds_train"])
    assert {each["weights_version"] for each in rounds[1]} == {1}


def test_learning_rates_follow_the_rounds_or_the_updates_of_each():
    config = ExpertIterationConfig(steps=4, learning_rate=0.8, schedule="linear")
    assert learning_rates(config, 2, 3) == pytest.approx([0.6, 0.6, 0.6])
    config = dataclasses.replace(config, starting_point="first", warmup_steps=1)
    assert learning_rates(config, 2, 5) == pytest.approx([0.8, 0.8, 0.6, 0.4, 0.2])
    with pytest.raises(ConfigError, match="warmup_steps"):
        ExpertIterationConfig(steps=4, warmup_steps=5)


def test_every_round_can_start_from_the_first_policy(random_policy, tmp_path):
    save_policy(random_policy, tmp_path / "first")
    config = dataclasses.replace(
        SMALL, starting_point="first", policy=str(tmp_path / "first"), schedule="cosine", warmup_steps=0
    )
    run = RunFolder.create(tmp_path / "run", "", {})
    follow(expert_iteration, config, fresh(random_policy), run)
    first, second = (kept_by_hand(run.read_rows("rollouts", step)) for step in (1, 2))
    after_one, _ = by_hand(random_policy, [first], config.learning_rate)
    after_two, _ = by_hand(random_policy, [second], config.learning_rate)
    # One update holds all of a round, and is the first of its schedule.
    assert [row["learning_rate"] for row in run.metrics()[1:]] == [config.learning_rate] * 2
    assert_same_weights(weights(run.path, 1), after_one, random_policy.model)
    assert_same_weights(weights(run.path, 2), after_two, random_policy.model)
    sampled = run.read_rows("rollouts", 2)[0]
    ids = torch.tensor([[*sampled["prompt_ids"], *sampled["response_ids"]]])
    log_probs = after_one(ids).logits[0].log_softmax(-1)[len(sampled["prompt_ids"]) - 1 : -1]
    expected = log_probs.gather(1, torch.tensor(sampled["response_ids"])[:, None])[:, 0].tolist()
    assert sampled["logprobs"] == pytest.approx(expected, abs=1e-3)  # the second round is sampled from the last policy


@pytest.mark.parametrize("starting_point", ["last", "first"])
def test_a_run_that_is_killed_and_resumed_is_the_run_that_was_not(random_policy, tmp_path, starting_point):
    save_policy(random_policy, tmp_path / "first")
    config = dataclasses.replace(SMALL, steps=3, batch_size=3, epochs_per_step=2, deduplicate=False)
    config = dataclasses.replace(config, starting_point=starting_point, policy=str(tmp_path / "first"))
    assert_resumed_is_uninterrupted(
        expert_iteration, config, random_policy, tmp_path, kill_at=2, resume_from=1, steps=3
    )


@pytest.mark.parametrize("starting_point", ["last", "first"])
def test_a_round_without_a_right_answer_changes_nothing(random_policy, tmp_path, monkeypatch, starting_point):
    monkeypatch.setattr("vowels.VowelTask.reward", lambda self, text, truth: Score(0.0, 1.0, 0.0))
    run = RunFolder.create(tmp_path / "run", "", {})
    config = dataclasses.replace(SMALL, steps=1, starting_point=starting_point)
    follow(expert_iteration, config, fresh(random_policy), run)
    row = run.metrics()[-1]
    assert (row["responses_kept"], row["updates"], row["train_tokens"]) == (0, 0, 0)
    saved, initial = weights(run.path, 1), dict(random_policy.model.named_parameters())
    assert all((saved[name] == initial[name]).all() for name in saved)
