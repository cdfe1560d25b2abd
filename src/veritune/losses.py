"""Advantages, losses, divergences and token weights: functions of tensors, without state or devices.

Shapes are written with B responses of at most T tokens over a vocabulary of V; P prompts have G sampled responses each.
A policy-gradient loss is a function of `LossInputs` and stands in `LOSSES`, with its own coefficients beside it. The
weight of each token is decided once, in `sequence_loss_weights`, before a batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from veritune.core.config import Rare, require
from veritune.core.errors import ConfigError
from veritune.core.lazy import LazyModule
from veritune.core.registry import look_up
from veritune.core.tables import NoSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")  # a recipe's help shows the settings of its loss, and needs no tensors

LengthNormalization = Literal["sequence", "constant", "token"]
Baseline = Literal["group_mean", "leave_one_out", "none"]
Metrics = dict[str, "Tensor"]
LossAndMetrics = tuple["Tensor", Metrics]

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
    """The advantage of each response over its siblings: rewards (P, G) -> advantages (P, G).

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


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a loss is given of B responses of at most T tokens: (B, T), zero outside the mask, where nothing is said."""

    log_probs: Tensor
    """Under the present policy: the one tensor with a gradient."""
    old_log_probs: Tensor
    """Under the weights that sampled the responses; before the first update on them, `log_probs` without a gradient."""
    sampled_log_probs: Tensor
    """Under the same weights by the engine that sampled, whose arithmetic may differ."""
    reference_log_probs: Tensor | None = None
    """Under the initial policy; None where nothing is compared with it."""
    advantages: Tensor
    """(B, 1); the rewards themselves for a loss without a baseline."""
    mask: Tensor
    """True at the tokens of each response."""


@dataclass(frozen=True, kw_only=True)
class ClipSettings:
    """Of a loss that clips the ratio of probabilities."""

    cliprange: float = 0.2
    """Distance from 1 at which the ratio is clipped."""
    cliprange_high: Rare[float | None] = None
    """The same distance above 1, where it differs (clip-higher)."""

    def __post_init__(self) -> None:
        require(self, "cliprange", self.cliprange > 0, "positive")
        high = self.cliprange_high
        require(self, "cliprange_high", high is None or high >= self.cliprange, "at least cliprange")


@dataclass(frozen=True)
class Loss:
    """A loss, and what training has to know of it."""

    function: Callable[..., LossAndMetrics]
    """From LossInputs, and the fields of `settings` by keyword, to the loss and to metrics.

    A metric is (B, T) or (B, 1); its mean over the response tokens of a batch is recorded under its name."""
    level: Literal["token", "sequence"] = "token"
    """Whether the loss is that of each token, (B, T), or that of each response, (B, 1)."""
    off_policy: bool = False
    """Whether it compares the policy with an older one, and means nothing without updates that reuse rollouts."""
    baseline: bool = True
    """Whether a response is compared with its siblings; otherwise its advantage is its reward."""
    settings: type = NoSettings
    """A dataclass of its coefficients, with defaults."""


def reinforce(inputs: LossInputs) -> LossAndMetrics:
    """REINFORCE: -A * log pi."""
    return -inputs.advantages * inputs.log_probs, {}


def grpo_clip(inputs: LossInputs, cliprange: float, cliprange_high: float | None = None) -> LossAndMetrics:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), with ratio = pi / pi_old.

    PPO's surrogate (arXiv 1707.06347, equation 7) as GRPO uses it (arXiv 2402.03300); two different ends are DAPO's
    clip-higher (arXiv 2503.14476). `clipped` is True where the clipped term decides and no gradient flows.
    """
    ratio = _ratio(inputs.log_probs, inputs.old_log_probs)
    unclipped = ratio * inputs.advantages
    clipped = _clip(ratio, cliprange, cliprange_high) * inputs.advantages
    return -torch.minimum(unclipped, clipped), {"clipped": clipped < unclipped, "ratio": ratio.detach()}


def grpo_no_clip(inputs: LossInputs) -> LossAndMetrics:
    """-ratio * A, with ratio = pi / pi_old: the surrogate without its clip."""
    ratio = _ratio(inputs.log_probs, inputs.old_log_probs)
    return -ratio * inputs.advantages, {"ratio": ratio.detach()}


def gspo(inputs: LossInputs, cliprange: float, cliprange_high: float | None = None) -> LossAndMetrics:
    """GRPO's clipped surrogate with one ratio for a whole response: (pi / pi_old) ** (1 / length).

    Group sequence policy optimization (arXiv 2507.18071, equations 5 to 7); "sequence" normalization gives the
    published objective.
    """
    lengths = inputs.mask.sum(dim=1, keepdim=True).clamp(min=1)
    log_ratio = masked_sum(inputs.log_probs - inputs.old_log_probs, inputs.mask, dim=1)[:, None] / lengths
    of_responses = replace(inputs, log_probs=log_ratio, old_log_probs=torch.zeros_like(log_ratio))
    return grpo_clip(of_responses, cliprange, cliprange_high)


def cispo(inputs: LossInputs, cliprange: float, cliprange_high: float | None = None) -> LossAndMetrics:
    """-stop_gradient(clip(ratio, 1 - low, 1 + high)) * A * log pi: the weight is clipped, no token loses its gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5). `clipped` is True where the weight was clipped.
    """
    ratio = _ratio(inputs.log_probs, inputs.old_log_probs).detach()
    weights = _clip(ratio, cliprange, cliprange_high)
    return -weights * inputs.advantages * inputs.log_probs, {"clipped": weights != ratio, "ratio": ratio}


LOSSES = {
    "no_baseline": Loss(reinforce, baseline=False),
    "reinforce_with_baseline": Loss(reinforce),
    "grpo_clip": Loss(grpo_clip, off_policy=True, settings=ClipSettings),
    "grpo_no_clip": Loss(grpo_no_clip, off_policy=True),
    "gspo": Loss(gspo, level="sequence", off_policy=True, settings=ClipSettings),
    "cispo": Loss(cispo, off_policy=True, settings=ClipSettings),
}
"""The losses by name."""


def find_loss(loss_type: str) -> Loss:
    """The loss that a setting names: of LOSSES, or package.module:name of a Loss or of a function of LossInputs."""
    found = look_up("loss_type", loss_type, LOSSES)
    if not isinstance(found, Loss) and not callable(found):
        raise ConfigError(f"loss_type is {loss_type!r}, which is {found!r}; it must be a Loss or a function")
    return found if isinstance(found, Loss) else Loss(found)


def settings_class(loss_type: str) -> type:
    """The dataclass of a loss's coefficients."""
    return find_loss(loss_type).settings


def _ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return (log_probs - old_log_probs.detach()).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _clip(ratio: Tensor, cliprange: float, cliprange_high: float | None) -> Tensor:
    return ratio.clamp(1 - cliprange, 1 + (cliprange if cliprange_high is None else cliprange_high))


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
