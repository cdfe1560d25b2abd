"""The Countdown course's interface: imports in one place, and its tensor functions by hand."""

from __future__ import annotations

import math

import pytest
import torch

from veritune import countdown
from veritune.core.errors import ConfigError
from veritune.tasks import countdown as task_module

TRUTH = {"numbers": [9, 5, 18], "target": 4}


def test_the_verifiers_and_the_reward_are_the_tasks_own():
    for name in ("extract_answer", "validate_numbers", "evaluate_equation", "reward_fn"):
        assert getattr(countdown, name) is getattr(task_module, name)
    for name in ("extract_answer", "validate_numbers", "evaluate_equation"):
        assert getattr(countdown, f"_{name}") is getattr(countdown, name)
    assert all(hasattr(countdown, name) for name in countdown.__all__)


def test_group_normalized_advantages_with_the_real_reward():
    responses = ["<answer>18-9-5</answer>", "<answer>9</answer>", "no answer", "no answer"]
    advantages, raw_rewards, metadata = countdown.compute_group_normalized_advantages(
        rollout_responses=responses,
        repeated_ground_truths=[TRUTH] * 4,
        reward_fn=countdown.reward_fn,
        group_size=2,
        advantage_eps=1e-6,
        normalize_by_std=True,
    )
    torch.testing.assert_close(raw_rewards, torch.tensor([1.0, 0.1, 0.0, 0.0]))
    half = 0.45 / (0.45 * math.sqrt(2) + 1e-6)
    torch.testing.assert_close(advantages, torch.tensor([half, -half, 0.0, 0.0]))
    mean = 1.1 / 4
    squares = (1 - mean) ** 2 + (0.1 - mean) ** 2 + 2 * mean**2
    expected = {"mean": mean, "std": math.sqrt(squares / 3), "max": 1.0, "min": 0.0}
    assert all(isinstance(value, torch.Tensor) and value.dim() == 0 for value in metadata.values())
    assert {name: value.item() for name, value in metadata.items()} == pytest.approx(expected)


def test_without_the_standard_deviation_rewards_are_only_centred():
    advantages, _, _ = countdown.compute_group_normalized_advantages(
        ["<answer>18-9-5</answer>", "none"], [TRUTH] * 2, countdown.reward_fn, 2, 1e-6, normalize_by_std=False
    )
    torch.testing.assert_close(advantages, torch.tensor([0.5, -0.5]))


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_loss_gives_one_advantage_to_all_tokens_of_its_sequence(shape):
    ratios = torch.tensor([[0.5, 2.0], [0.5, 2.0]])  # as many sequences as tokens: broadcasting the wrong way shows
    returned = countdown.compute_loss(
        advantages=torch.tensor([1.0, -2.0]).view(shape),
        policy_log_probs=ratios.log(),
        old_log_probs=torch.zeros(2, 2),
        clip_range=0.2,
    )
    assert isinstance(returned, tuple)
    loss, metadata = returned
    torch.testing.assert_close(loss, torch.tensor([[-0.5, -1.2], [1.6, 4.0]]))
    assert isinstance(metadata, dict)
    assert metadata["clipped"].tolist() == [[False, True], [True, False]]
    torch.testing.assert_close(metadata["ratio"], ratios)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_courses_loop_unpacks_the_loss_for_any_number_of_rows(rows):
    loss_per_token, metadata = countdown.compute_loss(torch.ones(rows), torch.zeros(rows, 4), torch.zeros(rows, 4), 0.2)
    assert loss_per_token.tolist() == [[-1.0] * 4] * rows
    assert sorted(metadata) == ["clipped", "ratio"]


def test_loss_refuses_advantages_of_another_batch():
    with pytest.raises(ConfigError, match=r"advantages has shape \(3, 1\)"):
        countdown.compute_loss(torch.zeros(3), torch.zeros(2, 3), torch.zeros(2, 3), 0.2)


def test_the_two_means_weigh_long_and_short_sequences_differently():
    tensor = torch.tensor([[1.0, 2.0, 3.0, torch.nan], [8.0, torch.inf, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    assert countdown.masked_mean(tensor, mask).item() == pytest.approx((2.0 + 8.0) / 2)
    assert countdown.masked_mean_drgrpo(tensor, mask, num_tokens=10).item() == pytest.approx((0.6 + 0.8) / 2)
    with pytest.raises(ConfigError, match="num_tokens is 0"):
        countdown.masked_mean_drgrpo(tensor, mask, 0)


def test_gradients_reach_the_policy_through_loss_and_mean():
    policy = torch.zeros(2, 2, requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    loss, _ = countdown.compute_loss(torch.tensor([1.0, -2.0]), policy, torch.zeros(2, 2), 0.2)
    countdown.masked_mean(loss, mask).backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[-0.25, -0.25], [1.0, 0.0]]))
