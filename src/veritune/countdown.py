"""The Countdown course's published interface in one place: the task's verifiers and reward, and its tensor functions.

The names are the course's; the mathematics is `veritune.primitives`', only shaped as the course shapes it: one
advantage per sequence (B,), and reductions down to a scalar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from veritune import primitives
from veritune.core.errors import ConfigError
from veritune.primitives import RewardFunction
from veritune.tasks.countdown import (
    CountdownTask,
    Problem,
    _evaluate_equation,
    _extract_answer,
    _validate_numbers,
    evaluate_equation,
    extract_answer,
    generate_problems,
    read_problems,
    reward_fn,
    score_response,
    solutions,
    split_of,
    validate_numbers,
)

__all__ = [
    "CountdownTask",
    "Problem",
    "_evaluate_equation",
    "_extract_answer",
    "_validate_numbers",
    "compute_group_normalized_advantages",
    "compute_loss",
    "evaluate_equation",
    "extract_answer",
    "generate_problems",
    "masked_mean",
    "masked_mean_drgrpo",
    "read_problems",
    "reward_fn",
    "score_response",
    "solutions",
    "split_of",
    "validate_numbers",
]


def compute_group_normalized_advantages(
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[Any],
    reward_fn: RewardFunction,
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """`primitives.compute_group_normalized_rewards` in the course's order of arguments.

    Returns advantages (N,), raw rewards (N,), and the scalar tensors mean, std (unbiased), max and min of the rewards.
    """
    advantages, raw_rewards, metadata = primitives.compute_group_normalized_rewards(
        reward_fn, rollout_responses, repeated_ground_truths, group_size, advantage_eps, normalize_by_std
    )
    return advantages, raw_rewards, {name: torch.tensor(metadata[name]) for name in ("mean", "std", "max", "min")}


def compute_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, clip_range: primitives.ClipRange
) -> primitives.LossAndMetadata:
    """The clipped surrogate of every token, as `primitives.compute_grpo_clip_loss`: A (B,), log pi (B, T) -> (B, T).

    Advantages of shape (B, 1) are taken too: the course writes (B,), its training loop hands over (B, 1).

    Returns the loss (B, T) and metadata, a dict of `clipped` and `ratio` (B, T), as the course's loop unpacks them:
    `loss_per_token, metadata = compute_loss(...)`.
    """
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    return primitives.compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, clip_range)


def masked_mean(tensor: Tensor, mask: Tensor) -> Tensor:
    """Mean over each sequence's tokens where the mask is set, then over the batch: (B, T) -> scalar (GRPO).

    A sequence without any such token makes the result NaN, as the mean of nothing is.
    """
    return primitives.masked_mean(tensor, mask, dim=1).mean()


def masked_mean_drgrpo(tensor: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    """Sum over each sequence's tokens where the mask is set, divided by `num_tokens`, then mean over the batch.

    (B, T) -> scalar (Dr. GRPO, arXiv 2503.20783): `num_tokens` is one constant for all sequences, such as the longest
    response allowed.
    """
    if num_tokens < 1:
        raise ConfigError(f"num_tokens is {num_tokens}; it must be at least 1")
    return primitives.masked_normalize(tensor, mask, num_tokens, dim=1).mean()
