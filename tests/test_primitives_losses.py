"""Losses and microbatch steps, against numbers worked out by hand or by independent float64 loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veritune.core.errors import ConfigError
from veritune.losses import LOSSES
from veritune.primitives import (
    compute_cispo_loss,
    compute_grpo_clip_loss,
    compute_grpo_no_clip_loss,
    compute_gspo_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    grpo_microbatch_train_step,
    masked_mean,
    sequence_loss_weights,
    sft_microbatch_train_step,
)


def test_naive_loss_is_minus_advantage_times_log_prob():
    loss = compute_naive_policy_gradient_loss(torch.tensor([[2.0], [-1.0]]), torch.tensor([[-1.0, -3.0], [-2.0, 0.0]]))
    torch.testing.assert_close(loss, torch.tensor([[2.0, 6.0], [-2.0, 0.0]]))


@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0])
@pytest.mark.parametrize("cliprange", [0.2, (0.2, 0.28), (0.0, 0.0), 10.0])
def test_clip_loss_and_its_gradient_against_the_definition(advantage, cliprange):
    low, high = cliprange if isinstance(cliprange, tuple) else (cliprange, cliprange)
    ratios = [0.5, 0.79, 0.81, 1.0, 1.19, 1.25, 1.3, 3.0]
    policy = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    loss, metadata = compute_grpo_clip_loss(
        torch.tensor([[advantage]], dtype=torch.float64), policy, torch.zeros(1, 8, dtype=torch.float64), cliprange
    )
    loss.sum().backward()
    for index, ratio in enumerate(ratios):
        cut = min(max(ratio, 1 - low), 1 + high)
        assert loss[0, index].item() == pytest.approx(-min(ratio * advantage, cut * advantage))
        decided_by_clip = cut * advantage < ratio * advantage - 1e-12
        assert metadata["clipped"][0, index].item() is decided_by_clip
        gradient = 0.0 if decided_by_clip else -advantage * ratio  # d ratio / d log pi = ratio
        assert policy.grad[0, index].item() == pytest.approx(gradient)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gradient_flows_on_the_clip_boundary_itself(advantage):
    # exp(0) is exactly 1, the only ratio that both ends of a clip range of 0 meet exactly
    policy = torch.zeros(1, 1, requires_grad=True)
    loss, metadata = compute_grpo_clip_loss(torch.tensor([[advantage]]), policy, torch.zeros(1, 1), cliprange=0.0)
    loss.sum().backward()
    assert policy.grad.item() == -advantage
    assert not metadata["clipped"].item()


def test_on_policy_every_ratio_loss_has_the_gradient_of_reinforce():
    log_probs = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.1, -0.7]], dtype=torch.float64)
    advantages = torch.tensor([[0.7], [-1.3]], dtype=torch.float64)
    mask = torch.ones(2, 3)
    for loss_type in ("reinforce_with_baseline", "grpo_clip", "grpo_no_clip", "gspo", "cispo"):
        policy = log_probs.clone().requires_grad_()
        loss, _ = compute_policy_gradient_loss(
            policy, loss_type, advantages=advantages, old_log_probs=log_probs, cliprange=0.2, response_mask=mask
        )
        loss.sum().backward()
        torch.testing.assert_close(policy.grad, -advantages.expand(2, 3), msg=loss_type)


def test_no_clip_loss_by_hand():
    policy, old = torch.tensor([[2.0, 0.5]]).log(), torch.tensor([[1.0, 2.0]]).log()
    loss, metadata = compute_grpo_no_clip_loss(torch.tensor([[-3.0]]), policy, old)
    torch.testing.assert_close(loss, torch.tensor([[6.0, 0.75]]))
    torch.testing.assert_close(metadata["ratio"], torch.tensor([[2.0, 0.25]]))


def test_gspo_takes_one_ratio_for_the_response_alone():
    ratios = torch.tensor([[4.0, 1.0, 9.0], [1.1, 1.1, 1.1]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    advantages = torch.tensor([[2.0], [-1.0]], dtype=torch.float64)
    policy = ratios.log().requires_grad_()
    loss, metadata = compute_gspo_loss(advantages, policy, torch.zeros(2, 3), 0.5, mask)
    # sequence ratios: sqrt(4 * 1) = 2, clipped to 1.5; and 1.1
    torch.testing.assert_close(loss, torch.tensor([[-3.0] * 3, [1.1] * 3], dtype=torch.float64))
    assert metadata["clipped"].tolist() == [[True] * 3, [False] * 3]
    masked_mean(loss, mask, dim=1).sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[0.0] * 3, [1.1 / 3] * 3], dtype=torch.float64))


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    policy = torch.tensor([[3.0, 1.0, 0.5]], dtype=torch.float64).log().requires_grad_()
    loss, metadata = compute_cispo_loss(torch.tensor([[2.0]]), policy, torch.zeros(1, 3), (0.25, 1.0))
    loss.sum().backward()
    torch.testing.assert_close(loss.detach()[0, 0].item(), -2.0 * 2.0 * math.log(3))
    torch.testing.assert_close(policy.grad, torch.tensor([[-4.0, -2.0, -1.5]], dtype=torch.float64))
    assert metadata["clipped"].tolist() == [[True, False, True]]


@pytest.mark.parametrize("loss_type", ["grpo_clip", "grpo_no_clip", "gspo", "cispo"])
def test_absurd_ratios_give_no_nan(loss_type):
    policy = torch.tensor([[-1.0, -1.0, -torch.inf]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    loss, _ = grpo_microbatch_train_step(
        policy,
        mask,
        1,
        loss_type,
        advantages=torch.tensor([[0.0]]),
        old_log_probs=torch.tensor([[-500.0, -1.0, 0.0]]),
        cliprange=0.2,
    )
    assert loss.item() == 0.0
    assert policy.grad[0, :2].tolist() == [0.0, 0.0]


def test_dispatch_ignores_what_a_type_does_not_need():
    policy = torch.tensor([[-1.0, -2.0]])
    everything = {
        "raw_rewards": torch.tensor([[3.0]]),
        "advantages": torch.tensor([[0.5]]),
        "old_log_probs": policy - math.log(2),
        "cliprange": 0.1,
    }
    expected = {
        "no_baseline": [[3.0, 6.0]],
        "reinforce_with_baseline": [[0.5, 1.0]],
        "grpo_clip": [[-0.55, -0.55]],
        "grpo_no_clip": [[-1.0, -1.0]],
    }
    for loss_type, loss in expected.items():
        torch.testing.assert_close(compute_policy_gradient_loss(policy, loss_type, **everything)[0], torch.tensor(loss))


NEEDED = {
    "no_baseline": ["raw_rewards"],
    "reinforce_with_baseline": ["advantages"],
    "grpo_clip": ["advantages", "old_log_probs", "cliprange"],
    "grpo_no_clip": ["advantages", "old_log_probs"],
    "gspo": ["advantages", "old_log_probs", "cliprange", "response_mask"],
    "cispo": ["advantages", "old_log_probs", "cliprange"],
}
"""The published arguments of each loss beside the policy's log-probabilities."""


@pytest.mark.parametrize("loss_type", list(LOSSES))
def test_every_missing_or_misshapen_argument_is_named(loss_type):
    policy = torch.zeros(2, 2)
    complete = {
        "raw_rewards": torch.zeros(2, 1),
        "advantages": torch.zeros(2, 1),
        "old_log_probs": torch.zeros(2, 2),
        "cliprange": 0.1,
        "response_mask": torch.ones(2, 2),
    }
    compute_policy_gradient_loss(policy, loss_type, **complete)
    for name in NEEDED[loss_type]:
        with pytest.raises(ValueError, match=name):
            compute_policy_gradient_loss(policy, loss_type, **{**complete, name: None})
        wrong = -0.1 if name == "cliprange" else torch.zeros(2)  # (2,) would broadcast without a word
        with pytest.raises(ValueError, match=name):
            compute_policy_gradient_loss(policy, loss_type, **{**complete, name: wrong})


def test_an_unknown_loss_type_is_refused_with_the_allowed_ones():
    with pytest.raises(ConfigError, match=r"loss_type is 'ppo'; allowed are no_baseline, .*cispo"):
        compute_policy_gradient_loss(torch.zeros(1, 1), "ppo")


# Microbatch steps


def test_sft_step_by_hand():
    policy = torch.tensor([[-1.0, -2.0, -9.0], [-4.0, -9.0, -9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    loss, metadata = sft_microbatch_train_step(policy, mask, gradient_accumulation_steps=2, normalize_constant=5.0)
    # ((1 + 2) / 5 + 4 / 5) / 2 sequences / 2 steps
    assert loss.item() == pytest.approx(0.35)
    torch.testing.assert_close(policy.grad, torch.tensor([[-0.05, -0.05, 0.0], [-0.05, 0.0, 0.0]]))
    assert metadata["response_tokens"].item() == 3


@pytest.mark.parametrize(
    "length_normalization, weights",
    [
        ("sequence", [[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]),
        ("constant", [[0.05, 0.05, 0.0], [0.05, 0.0, 0.0]]),
        ("token", [[1 / 3, 1 / 3, 0.0], [1 / 3, 0.0, 0.0]]),
    ],
)
def test_grpo_step_by_hand(length_normalization, weights):
    policy = torch.tensor([[-1.0, -2.0, -9.0], [-4.0, -9.0, -9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    loss, _ = grpo_microbatch_train_step(
        policy,
        mask,
        gradient_accumulation_steps=4,
        loss_type="reinforce_with_baseline",
        advantages=torch.tensor([[2.0], [-1.0]]),
        length_normalization=length_normalization,
        normalize_constant=10.0,
    )
    weights = torch.tensor(weights)
    per_token = torch.tensor([[2.0, 4.0, 0.0], [-4.0, 0.0, 0.0]])
    assert loss.item() == pytest.approx((weights * per_token).sum().item() / 4)
    torch.testing.assert_close(policy.grad, weights * torch.tensor([[-2.0], [1.0]]) / 4)


def test_grpo_step_reports_the_fraction_of_clipped_response_tokens():
    policy = torch.tensor([[2.0, 1.0, 1.0, 2.0]]).log().requires_grad_()
    mask = torch.tensor([[True, True, True, False]])
    _, metadata = grpo_microbatch_train_step(
        policy, mask, 1, "grpo_clip", advantages=torch.ones(1, 1), old_log_probs=torch.zeros(1, 4), cliprange=0.2
    )
    assert metadata["clip_fraction"].item() == pytest.approx(1 / 3)


def test_repeated_steps_accumulate_gradients():
    policy = torch.full((1, 2), -1.0, requires_grad=True)
    for _ in range(10):
        sft_microbatch_train_step(policy, torch.ones(1, 2, dtype=torch.bool), 2)
    torch.testing.assert_close(policy.grad, torch.full((1, 2), -5.0))


def test_steps_refuse_impossible_settings():
    policy, mask = torch.zeros(1, 2, requires_grad=True), torch.ones(1, 2)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps is 0"):
        sft_microbatch_train_step(policy, mask, 0)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps is 0"):
        grpo_microbatch_train_step(policy, mask, 0, "no_baseline", raw_rewards=torch.ones(1, 1))
    with pytest.raises(ConfigError, match="response_mask has shape"):
        sft_microbatch_train_step(policy, mask[:, :1], 1)
    with pytest.raises(ConfigError, match="normalize_constant is None"):
        grpo_microbatch_train_step(
            policy, mask, 1, "no_baseline", raw_rewards=torch.ones(1, 1), length_normalization="constant"
        )
    with pytest.raises(ConfigError, match="length_normalization is 'row'"):
        sequence_loss_weights(mask, "row", None, 1, 2)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), length_normalization=st.sampled_from(["sequence", "constant", "token"]))
def test_any_cut_into_microbatches_gives_the_gradient_of_the_whole_batch(data, length_normalization):
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)), max_size=4)) | {0, len(lengths)})
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    log_probs = torch.randn(len(lengths), 7, generator=generator)
    advantages = torch.randn(len(lengths), 1, generator=generator)
    mask = torch.arange(7) < torch.tensor(lengths).unsqueeze(1)

    expected = torch.zeros(len(lengths), 7, dtype=torch.float64)
    for row, length in enumerate(lengths):
        for position in range(length):
            share = {
                "sequence": 1 / length / len(lengths),
                "constant": 1 / 11 / len(lengths),
                "token": 1 / sum(lengths),
            }
            expected[row, position] = -advantages[row, 0].double() * share[length_normalization]

    policy = log_probs.clone().requires_grad_()
    for start, end in itertools.pairwise(cuts):
        width = max(lengths[start:end])  # each microbatch is only as wide as its own longest row
        piece = policy[start:end, :width]
        loss, _ = compute_policy_gradient_loss(piece, "reinforce_with_baseline", advantages=advantages[start:end])
        weights = sequence_loss_weights(mask[start:end, :width], length_normalization, 11, len(lengths), sum(lengths))
        (loss * weights).sum().backward()
    torch.testing.assert_close(policy.grad.double(), expected, rtol=1e-6, atol=1e-9)
