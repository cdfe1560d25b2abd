"""Advantages, losses, divergences and token weights: functions of tensors, without state, configuration or devices.

Shapes are written with B sequences of T positions over a vocabulary of V; P prompts have G sampled responses each.
A policy-gradient loss is a function that returns the loss of every token (B, T) and a dictionary of metadata; how
tokens are weighed against each other is decided once, in `sequence_loss_weights`, before a batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from veritune.core.errors import ConfigError
from veritune.core.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")  # a recipe's help shows the settings of its loss, and needs no tensors

LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip", "gspo", "cispo"]
LengthNormalization = Literal["sequence", "constant", "token"]
Baseline = Literal["group_mean", "leave_one_out", "none"]
ClipRange = float | tuple[float, float]
"""One distance from 1 for both ends of the clip interval, or (low, high) as in DAPO's clip-higher."""
Metadata = dict[str, "Tensor"]
LossAndMetadata = tuple["Tensor", Metadata]

# exp(60) is about 1e26: far beyond any ratio that training survives, yet its product with an advantage is still
# finite in float32, so a padded or zero-advantage token cannot turn 0 * inf into NaN.
LARGEST_LOG_RATIO = 60.0


# --- Log-probabilities and entropy


def selected_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """log softmax(logits) at the labels: (..., V) and (...) -> (...), in float32 or better.

    The maximum is subtracted before the exponentials are summed, so large logits lose no digits, and one tensor of
    the logits' size is kept for the backward pass.
    """
    require_shape("labels", labels, logits.shape[:-1])
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    largest = logits.detach().amax(dim=-1, keepdim=True)
    log_normalizer = (logits - largest).exp_().sum(dim=-1).log()
    return (logits.gather(-1, labels.unsqueeze(-1)) - largest).squeeze(-1) - log_normalizer


def compute_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) over the last dimension: (..., V) -> (...), in float32 or better.

    H = log Z - sum p (x - max x) with Z = sum exp(x - max x): finite for logits of any size, and for -inf logits,
    whose probability is zero.
    """
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    shifted = logits - logits.detach().amax(dim=-1, keepdim=True)
    shifted = shifted.clamp(min=torch.finfo(shifted.dtype).min)  # -inf * 0 would be NaN
    weights = shifted.exp()
    normalizer = weights.sum(dim=-1)
    return normalizer.log() - (weights * shifted).sum(dim=-1) / normalizer


def approximate_kl_k3(policy_log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) at tokens that the policy sampled: r - 1 - log r, r = ref / policy.

    Unbiased and never negative (Schulman, "Approximating KL divergence", k3; DeepSeekMath equation 4). Same shape as
    the arguments, differentiable in both.
    """
    require_shape("reference_log_probs", reference_log_probs, policy_log_probs.shape)
    log_ratio = (reference_log_probs - policy_log_probs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def truncated_importance_weights(trainer_log_probs: Tensor, engine_log_probs: Tensor, cap: float) -> Tensor:
    """min(p_trainer / p_engine, cap) for each token, detached: what a token's loss is multiplied by.

    Corrects for an engine whose arithmetic differs from the trainer's (truncated importance sampling; Yao et al.,
    "Your efficient RL framework secretly brings you off-policy RL training", 2025). Same shape as the arguments.
    """
    require_shape("engine_log_probs", engine_log_probs, trainer_log_probs.shape)
    if not cap > 0:
        raise ConfigError(f"cap is {cap}; it must be positive")
    return _ratio(trainer_log_probs.detach(), engine_log_probs).clamp(max=cap)


# --- Masked reductions


def masked_sum(tensor: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    require_shape("mask", mask, tensor.shape)
    selected = tensor.masked_fill(~mask.bool(), 0)  # not a product with the mask: what lies outside may be inf or NaN
    return selected.sum() if dim is None else selected.sum(dim=dim)


def sequence_loss_weights(
    response_mask: Tensor,
    length_normalization: LengthNormalization,
    normalize_constant: float | None,
    batch_size: int,
    total_tokens: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The weight (B, T) of every token's loss, zero outside the responses, so that a batch's loss is a plain sum.

    The loss of a whole batch is the sum over its microbatches of `(per_token_loss * weights).sum()`, for any cut:
    `batch_size` and `total_tokens` (response tokens) are those of the whole batch, fixed before it is cut. Sequences
    that were dropped may still count in them. A row without response tokens has no weight.

    - "sequence": mean over each sequence's tokens, mean over sequences (GRPO, arXiv 2402.03300, equation 3)
    - "constant": sum over each sequence's tokens / `normalize_constant`, mean over sequences (Dr. GRPO, 2503.20783)
    - "token": mean over all tokens of the batch (DAPO, arXiv 2503.14476, equation 8)
    """
    require_at_least_one("batch_size", batch_size)
    mask = response_mask.bool()
    weights = mask.to(dtype or torch.float32)
    if length_normalization == "sequence":
        return weights / mask.sum(dim=1, keepdim=True).clamp(min=1) / batch_size
    if length_normalization == "constant":
        if normalize_constant is None or not normalize_constant > 0:
            raise ConfigError(
                f'normalize_constant is {normalize_constant}; length_normalization "constant" needs a positive number'
            )
        return weights / normalize_constant / batch_size
    if length_normalization == "token":
        return weights / max(total_tokens, 1)
    raise ConfigError(f'length_normalization is {length_normalization!r}; allowed are "sequence", "constant", "token"')


# --- Advantages


def group_advantages(
    rewards: Tensor, advantage_eps: float, normalize_by_std: bool, baseline: Baseline = "group_mean"
) -> Tensor:
    """What each response is worth beside its siblings: rewards (P, G) -> advantages (P, G).

    - "group_mean": r - mean(r), GRPO (arXiv 2402.03300); without the standard deviation, Dr. GRPO (arXiv 2503.20783)
    - "leave_one_out": r - mean of the other G - 1 rewards, RLOO (arXiv 2402.14740)
    - "none": r itself

    `normalize_by_std` divides by the group's unbiased standard deviation plus `advantage_eps`. A group whose rewards
    are all equal has advantages of exactly zero under both baselines. Raises ConfigError where a group is too small.
    """
    _require_groups(rewards, advantage_eps)
    group_size = rewards.shape[1]
    if group_size < 2 and (normalize_by_std or baseline == "leave_one_out"):
        raise ConfigError(f"group_size is {group_size}; a standard deviation or leave-one-out mean needs at least 2")
    if baseline == "none":
        if normalize_by_std:
            raise ConfigError('normalize_by_std is True; baseline "none" keeps the rewards as they are and needs False')
        return rewards
    # float64: rounding noise in the mean of equal rewards must not be blown up by a small standard deviation
    centred = rewards.double() - rewards.double().mean(dim=1, keepdim=True)
    if baseline == "leave_one_out":
        centred = centred * (group_size / (group_size - 1))
    elif baseline != "group_mean":
        raise ConfigError(f'baseline is {baseline!r}; allowed are "group_mean", "leave_one_out", "none"')
    if normalize_by_std:
        centred = centred / (rewards.double().std(dim=1, keepdim=True) + advantage_eps)
    return centred.masked_fill(has_equal_rewards(rewards), 0.0).to(rewards.dtype)


def maxrl_advantages(rewards: Tensor, advantage_eps: float) -> Tensor:
    """(r - mean(r)) / (mean(r) + advantage_eps) within each group of non-negative rewards: (P, G) -> (P, G).

    Dividing by the group's mean reward follows the gradient of log pass rate in place of the pass rate's (MaxRL,
    arXiv 2602.02710). A group whose rewards are all equal has advantages of exactly zero.
    """
    _require_groups(rewards, advantage_eps)
    if bool((rewards < 0).any()):
        raise ConfigError(f"rewards go down to {rewards.min().item()}; dividing by their mean needs none below 0")
    mean = rewards.double().mean(dim=1, keepdim=True)
    advantages = (rewards.double() - mean) / (mean + advantage_eps)
    return advantages.masked_fill(has_equal_rewards(rewards), 0.0).to(rewards.dtype)


def has_equal_rewards(rewards: Tensor) -> Tensor:
    return rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)  # (P, 1)


# --- Policy-gradient losses


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """REINFORCE: -A * log pi for every token; A (B, 1), log pi (B, T) -> (B, T).

    The one loss that returns its tensor alone, as its published interface does.
    """
    require_shape("raw_rewards_or_advantages", raw_rewards_or_advantages, (policy_log_probs.shape[0], 1))
    return -raw_rewards_or_advantages * policy_log_probs


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: ClipRange
) -> LossAndMetadata:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) for every token, with ratio = pi / pi_old.

    PPO's surrogate (arXiv 1707.06347, equation 7) as GRPO uses it (arXiv 2402.03300); two different ends are DAPO's
    clip-higher (arXiv 2503.14476). `advantages` (B, 1), log-probabilities (B, T).

    Returns the loss (B, T) and metadata: `clipped` (B, T), True where the clipped term decided and no gradient flows,
    and `ratio` (B, T).
    """
    _require_token_arguments(advantages, policy_log_probs, old_log_probs)
    return _clipped_surrogate(advantages, _ratio(policy_log_probs, old_log_probs), cliprange)


def compute_grpo_no_clip_loss(advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor) -> LossAndMetadata:
    """-ratio * A for every token, with ratio = pi / pi_old: the surrogate without its clip. (B, T) and `ratio`."""
    _require_token_arguments(advantages, policy_log_probs, old_log_probs)
    ratio = _ratio(policy_log_probs, old_log_probs)
    return -ratio * advantages, {"ratio": ratio.detach()}


def compute_gspo_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: ClipRange, response_mask: Tensor
) -> LossAndMetadata:
    """GRPO's clipped surrogate with one ratio for a whole response: (pi / pi_old) ** (1 / length).

    Group sequence policy optimization (arXiv 2507.18071, equations 5 to 7). The sequence's loss stands at each of its
    T positions, so that "sequence" normalization gives the published objective. Same metadata as `grpo_clip`.
    """
    _require_token_arguments(advantages, policy_log_probs, old_log_probs)
    require_shape("response_mask", response_mask, policy_log_probs.shape)
    lengths = response_mask.bool().sum(dim=1, keepdim=True).clamp(min=1)
    log_ratio = masked_sum(policy_log_probs - old_log_probs.detach(), response_mask, dim=1).unsqueeze(1) / lengths
    ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp().expand_as(policy_log_probs)
    return _clipped_surrogate(advantages, ratio, cliprange)


def compute_cispo_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: ClipRange
) -> LossAndMetadata:
    """-stop_gradient(clip(ratio, 1 - low, 1 + high)) * A * log pi: the weight is clipped, no token loses its gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5). `clipped` (B, T) is True where the weight was clipped.
    """
    _require_token_arguments(advantages, policy_log_probs, old_log_probs)
    lowest, highest = _clip_bounds(cliprange)
    ratio = _ratio(policy_log_probs, old_log_probs).detach()
    weights = ratio.clamp(lowest, highest)
    return -weights * advantages * policy_log_probs, {"clipped": weights != ratio, "ratio": ratio}


def _no_baseline_loss(raw_rewards: Tensor, policy_log_probs: Tensor) -> LossAndMetadata:
    require_shape("raw_rewards", raw_rewards, (policy_log_probs.shape[0], 1))
    return compute_naive_policy_gradient_loss(raw_rewards, policy_log_probs), {}


def _reinforce_with_baseline_loss(advantages: Tensor, policy_log_probs: Tensor) -> LossAndMetadata:
    require_shape("advantages", advantages, (policy_log_probs.shape[0], 1))
    return compute_naive_policy_gradient_loss(advantages, policy_log_probs), {}


POLICY_GRADIENT_LOSSES: Mapping[str, tuple[Callable[..., LossAndMetadata], tuple[str, ...]]] = {
    "no_baseline": (_no_baseline_loss, ("raw_rewards",)),
    "reinforce_with_baseline": (_reinforce_with_baseline_loss, ("advantages",)),
    "grpo_clip": (compute_grpo_clip_loss, ("advantages", "old_log_probs", "cliprange")),
    "grpo_no_clip": (compute_grpo_no_clip_loss, ("advantages", "old_log_probs")),
    "gspo": (compute_gspo_loss, ("advantages", "old_log_probs", "cliprange", "response_mask")),
    "cispo": (compute_cispo_loss, ("advantages", "old_log_probs", "cliprange")),
}
"""Each loss type's function and what it needs beside `policy_log_probs`."""


def _ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    log_ratio = log_probs - old_log_probs.detach()
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _clipped_surrogate(advantages: Tensor, ratio: Tensor, cliprange: ClipRange) -> LossAndMetadata:
    lowest, highest = _clip_bounds(cliprange)
    unclipped = ratio * advantages
    clipped = ratio.clamp(lowest, highest) * advantages
    return -torch.minimum(unclipped, clipped), {"clipped": clipped < unclipped, "ratio": ratio.detach()}


def _clip_bounds(cliprange: ClipRange) -> tuple[float, float]:
    low, high = cliprange if isinstance(cliprange, tuple) else (cliprange, cliprange)
    if not (low >= 0 and high >= 0):
        raise ConfigError(f"cliprange is {cliprange}; it must be one number or (low, high), none of them negative")
    return 1.0 - low, 1.0 + high


def _require_token_arguments(advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor) -> None:
    require_shape("advantages", advantages, (policy_log_probs.shape[0], 1))
    require_shape("old_log_probs", old_log_probs, policy_log_probs.shape)


def _require_groups(rewards: Tensor, advantage_eps: float) -> None:
    if rewards.dim() != 2:
        raise ConfigError(f"rewards has shape {tuple(rewards.shape)}; it must be (prompts, group_size)")
    if not advantage_eps >= 0:
        raise ConfigError(f"advantage_eps is {advantage_eps}; it must be 0 or positive")


def require_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1")


def require_shape(name: str, tensor: Tensor, expected: Sequence[int]) -> None:
    # Broadcasting would silently turn an advantage of shape (B,) into one per position wherever B equals T.
    if tensor.shape != torch.Size(expected):
        raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; it must be {tuple(expected)}")
