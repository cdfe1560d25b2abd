"""GRPO end to end on a policy with random weights: gradients, resume and refused steps."""

import copy
import dataclasses
import math
import sys
import traceback

import pytest
import torch
from vowels import VowelTask, assert_resumed_is_uninterrupted, fresh
from vowels import follow as follow_recipe

from veritune.core.errors import DataError, EngineError, TrainingError
from veritune.core.run_folder import RunFolder
from veritune.core.types import Completion, Example, Rollout, Score
from veritune.engines.native.engine import NativeEngine
from veritune.engines.vllm_settings import VLLMSettings
from veritune.model.policy import Policy
from veritune.recipes import grpo
from veritune.recipes.config import GRPOConfig
from veritune.trainer.policy_gradient import batch_backward, score_rollouts
from veritune.trainer.session import Session

SMALL = GRPOConfig(
    steps=4,
    rollout_batch_size=16,
    group_size=4,
    train_batch_size=16,
    max_tokens=12,
    validation_examples=6,
    validate_every=2,
    checkpoint_every=2,
    learning_rate=1e-3,
)


def follow(config, policy, folder):
    follow_recipe(grpo, config, policy, folder)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_type": "grpo_clip", "train_batch_size": 8, "epochs_per_rollout_batch": 2},
        {"loss_type": "grpo_no_clip", "train_batch_size": 4, "length_normalization": "constant"},
        {"loss_type": "no_baseline", "normalize_by_std": False, "length_normalization": "token"},
    ],
    ids=lambda changes: changes.get("loss_type", "reinforce_with_baseline"),
)
def test_a_run_that_is_stopped_and_resumed_is_the_run_that_was_not(random_policy, tmp_path, changes):
    config = dataclasses.replace(SMALL, **changes)
    assert_resumed_is_uninterrupted(grpo, config, random_policy, tmp_path, kill_at=3, resume_from=2, steps=4)


def test_the_run_folder_holds_every_group_with_its_numbers(random_policy, tmp_path):
    run = RunFolder.create(tmp_path / "run", "", {})
    follow(SMALL, fresh(random_policy), run)
    rows = run.read_rows("rollouts", 1)
    assert len(rows) == 16 and len({row["id"] for row in rows}) == 4
    for start in range(0, 16, 4):
        group = rows[start : start + 4]
        assert len({row["id"] for row in group}) == 1
        rewards = [row["score"]["reward"] for row in group]
        mean = sum(rewards) / 4
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 3)
        for row, reward in zip(group, rewards, strict=True):
            assert row["advantage"] == pytest.approx((reward - mean) / (deviation + 1e-6), abs=1e-4)
            assert len(row["response_ids"]) == len(row["logprobs"]) <= 12
    metrics = run.metrics()[1]
    assert metrics["reward"] == pytest.approx(sum(row["score"]["reward"] for row in rows) / 16)
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-7)
    assert run.steps("validation") == [0, 2, 4]


def rollouts_with(policy, rewards):
    generator = torch.Generator().manual_seed(0)
    size = policy.model.config.vocab_size
    rollouts = []
    for index, advantage in enumerate(rewards):
        ids = torch.randint(0, size, (3 + 2 * index,), generator=generator).tolist()
        completion = Completion((5, 6, 7), tuple(ids), "", tuple(-0.5 for _ in ids), "eos", 0)
        rollouts.append(Rollout(Example("", "", ""), completion, Score(advantage, 1.0, 0.0), advantage))
    return rollouts


def loss_by_hand(policy, rollouts, old=None, cliprange=0.2, divisor=None):
    """One sequence at a time, in double precision, from whole logits."""
    model = copy.deepcopy(policy.model).double()
    total = 0
    for index, rollout in enumerate(rollouts):
        ids = torch.tensor([[*rollout.completion.prompt_ids, *rollout.completion.ids]])
        log_probs = model(ids).logits.log_softmax(-1)[0, 2:-1].gather(-1, ids[0, 3:, None])[:, 0]
        if old is None:
            terms = -rollout.advantage * log_probs
        else:
            ratio = (log_probs - old[index].double()).exp()
            terms = -torch.minimum(
                ratio * rollout.advantage, ratio.clamp(1 - cliprange, 1 + cliprange) * rollout.advantage
            )
        total = total + terms.sum() / (divisor or len(rollout.completion.ids))
    total = total / len(rollouts)
    total.backward()
    return total.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("microbatch_tokens", [1, 30, 10_000])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("loss_type", ["reinforce_with_baseline", "grpo_clip"])
def test_the_gradient_is_that_of_the_whole_batch(random_policy, microbatch_tokens, skip, loss_type):
    policy = fresh(random_policy)
    rollouts = rollouts_with(policy, [1.5, 0.0, -0.5, 0.0, 0.75])
    config = dataclasses.replace(
        SMALL,
        microbatch_tokens=microbatch_tokens,
        skip_zero_advantages=skip,
        loss_type=loss_type,
        epochs_per_rollout_batch=2,
    )
    old = None
    if loss_type == "grpo_clip":
        noise = torch.Generator().manual_seed(1)
        old = [
            scores + 0.3 * torch.randn(scores.shape, generator=noise)
            for scores in score_rollouts(config, policy, rollouts)
        ]
    metrics = batch_backward(config, policy, rollouts, range(5), old)
    loss, expected = loss_by_hand(policy, rollouts, old)
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()]).double()
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert (gradient - expected).norm() / expected.norm() < 1e-4
    if old:
        assert metrics["clip_fraction"] > 0.05


def test_constant_normalization_divides_by_the_constant(random_policy):
    policy = fresh(random_policy)
    rollouts = rollouts_with(policy, [1.0, -1.0])
    config = dataclasses.replace(SMALL, length_normalization="constant", normalize_constant=50.0)
    metrics = batch_backward(config, policy, rollouts, range(2), None)
    assert metrics["loss"] == pytest.approx(loss_by_hand(policy, rollouts, divisor=50)[0], rel=1e-4)


@pytest.mark.parametrize(("trainer_over_engine", "weight"), [(1.5, 1.5), (0.25, 0.25), (10.0, 2.0), (1.0, 1.0)])
def test_a_tokens_loss_is_weighted_by_what_the_engines_arithmetic_got_wrong(random_policy, trainer_over_engine, weight):
    """The gradient is linear in the weight, and all tokens have the same one here."""
    plain, policy = fresh(random_policy), fresh(random_policy)
    config = dataclasses.replace(SMALL, engine="vllm", engine_settings=VLLMSettings())
    assert config.corrects_importance and not SMALL.corrects_importance
    rollouts = rollouts_with(policy, [1.0, -0.5])
    exact = score_rollouts(config, policy, rollouts)
    rollouts = [
        dataclasses.replace(
            rollout,
            completion=dataclasses.replace(
                rollout.completion, logprobs=tuple((own - math.log(trainer_over_engine)).tolist())
            ),
        )
        for rollout, own in zip(rollouts, exact, strict=True)
    ]
    batch_backward(config, policy, rollouts, range(2))
    batch_backward(dataclasses.replace(config, importance_correction=False), plain, rollouts, range(2))
    for corrected, uncorrected in zip(policy.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(corrected.grad, uncorrected.grad * weight, rtol=1e-3, atol=1e-5)


def test_a_batch_without_any_advantage_still_moves_by_momentum_alone(random_policy):
    policy = fresh(random_policy)
    metrics = batch_backward(SMALL, policy, rollouts_with(policy, [0.0, 0.0]), range(2), None)
    assert metrics["loss"] == 0
    assert all(parameter.grad.count_nonzero() == 0 for parameter in policy.model.parameters())


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_batch(random_policy, tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path / "run", "", {})
    real = grpo.advantages_of

    def poisoned(config, rewards):
        return real(config, rewards) * (math.nan if run.checkpoint_steps() == [2] else 1)

    monkeypatch.setattr(grpo, "advantages_of", poisoned)
    with pytest.raises(TrainingError, match=r"step 3 was refused.*loss is nan.*refused.*checkpoint is intact"):
        follow(SMALL, fresh(random_policy), run)
    assert len(run.read_rows("refused", 3)) == 16
    assert run.latest_checkpoint(pytest.fail).step == 2
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]


def test_an_engine_that_serves_other_weights_is_not_trained_on(random_policy, tmp_path):
    class Stale(NativeEngine):
        def load_weights(self, model, version):
            super().load_weights(model, min(version, 1))

    policy = fresh(random_policy)
    run = RunFolder.create(tmp_path / "run", "", {})
    with pytest.raises(EngineError, match="stale or wrong weights: version 2"):
        grpo.run(Session(dataclasses.replace(SMALL, validate_every=99), policy, VowelTask(), Stale(policy), run))


def test_a_task_without_problems_is_refused(random_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(VowelTask, "examples", lambda self, split: [])
    run = RunFolder.create(tmp_path / "run", "", {})
    with pytest.raises(DataError, match="vowels has no train examples"):
        follow(SMALL, fresh(random_policy), run)


def test_policy_is_left_in_evaluation_mode(random_policy, tmp_path):
    policy: Policy = fresh(random_policy)
    follow(dataclasses.replace(SMALL, steps=1), policy, RunFolder.create(tmp_path / "run", "", {}))
    assert not policy.model.training


def test_from_the_recipe_to_the_formula_are_at_most_six_calls_in_four_files(random_policy, tmp_path, monkeypatch):
    stacks = []
    minimum = torch.minimum  # which the clipped surrogate alone calls

    def seen(*tensors):
        stacks.append(traceback.extract_stack(sys._getframe(1)))
        return minimum(*tensors)

    monkeypatch.setattr(torch, "minimum", seen)
    config = dataclasses.replace(SMALL, loss_type="grpo_clip", epochs_per_rollout_batch=2, steps=1)
    follow(config, fresh(random_policy), RunFolder.create(tmp_path / "run", "", {}))
    (stack,) = {tuple((frame.filename, frame.name) for frame in each) for each in stacks}
    names = [name for _, name in stack]
    path = stack[names.index("grpo_step") :]
    assert path[-1][1] == "grpo_clip"
    assert len(path) - 1 <= 6, names
    assert len({filename for filename, _ in path}) <= 4
