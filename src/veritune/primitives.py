"""All tensor mathematics: functions of tensors, without state, configuration, device choice or input and output.

Shapes are written with B sequences of T positions over a vocabulary of V; P prompts have G sampled responses each.
A policy-gradient loss is a function that returns the loss of every token (B, T) and a dictionary of metadata; how
tokens are weighed against each other is decided once, in `sequence_loss_weights`, before a batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from veritune.errors import ConfigError, DataError

LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip", "gspo", "cispo"]
LengthNormalization = Literal["sequence", "constant", "token"]
Baseline = Literal["group_mean", "leave_one_out", "none"]
ClipRange = float | tuple[float, float]
"""One distance from 1 for both ends of the clip interval, or (low, high) as in DAPO's clip-higher."""
RewardFunction = Callable[[str, Any], float | Mapping[str, float]]
Metadata = dict[str, Tensor]
LossAndMetadata = tuple[Tensor, Metadata]

# exp(60) is about 1e26: far beyond any ratio that training survives, yet its product with an advantage is still
# finite in float32, so a padded or zero-advantage token cannot turn 0 * inf into NaN.
LARGEST_LOG_RATIO = 60.0


def tokenize_prompt_and_output(prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer: Any) -> Metadata:
    """Tokenize prompts and outputs apart, join them, and mark which labels belong to the output.

    No special tokens are added. Rows are padded with the tokenizer's pad id, or its EOS id where it has none.

    Returns what `pad_prompt_and_response` returns.
    Raises ConfigError if the two lists differ in length or are empty, or the tokenizer has neither pad nor EOS id.
    """
    if len(prompt_strs) != len(output_strs):
        lengths = f"prompt_strs has {len(prompt_strs)} strings, output_strs {len(output_strs)}"
        raise ConfigError(f"{lengths}; they must pair up")
    if not prompt_strs:
        raise ConfigError("prompt_strs is empty; it must have at least one string")
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_token_id is None:
        raise ConfigError("tokenizer has neither pad_token_id nor eos_token_id; one of them is needed for padding")
    prompts_ids = tokenizer(list(prompt_strs), add_special_tokens=False)["input_ids"]
    responses_ids = tokenizer(list(output_strs), add_special_tokens=False)["input_ids"]
    return pad_prompt_and_response(prompts_ids, responses_ids, pad_token_id)


def pad_prompt_and_response(
    prompts_ids: Sequence[Sequence[int]], responses_ids: Sequence[Sequence[int]], pad_token_id: int
) -> Metadata:
    """Join each prompt with its response, pad right to the longest of them, and shift by one for next-token labels.

    Returns `input_ids` and `labels` (B, longest - 1), and `response_mask`, a bool tensor of the same shape that is
    True where the label is a response token. The mask comes from lengths, so a response may contain the pad id.
    """
    rows = [[*prompt, *response] for prompt, response in zip(prompts_ids, responses_ids, strict=True)]
    longest = max(len(row) for row in rows)
    padded = torch.tensor([row + [pad_token_id] * (longest - len(row)) for row in rows], dtype=torch.long)
    position_of_label = torch.arange(1, max(longest, 1))  # (T,)
    starts = torch.tensor([len(prompt) for prompt in prompts_ids]).unsqueeze(1)
    ends = torch.tensor([len(row) for row in rows]).unsqueeze(1)
    response_mask = (position_of_label >= starts) & (position_of_label < ends)  # (B, T)
    return {"input_ids": padded[:, :-1], "labels": padded[:, 1:], "response_mask": response_mask}


# --- Log-probabilities and entropy


def selected_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """log softmax(logits) at the labels: (..., V) and (...) -> (...), in float32 or better.

    The maximum is subtracted before the exponentials are summed, so large logits lose no digits, and one tensor of
    the logits' size is kept for the backward pass.
    """
    _require_shape("labels", labels, logits.shape[:-1])
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


def get_response_log_probs(
    model: Callable[[Tensor], Any], input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> Metadata:
    """Score labels (B, T) under a causal language model: `log_probs` (B, T) and, if asked, `token_entropy` (B, T).

    Prompt and padding positions are scored too: masking is the caller's. The entropy is detached, for logging;
    `compute_entropy` itself is differentiable.
    """
    _require_shape("labels", labels, input_ids.shape)
    logits = model(input_ids).logits  # (B, T, V)
    scores = {"log_probs": selected_log_probs(logits, labels)}
    if return_token_entropy:
        with torch.no_grad():
            scores["token_entropy"] = compute_entropy(logits)
    return scores


def approximate_kl_k3(policy_log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) at tokens that the policy sampled: r - 1 - log r, r = ref / policy.

    Unbiased and never negative (Schulman, "Approximating KL divergence", k3; DeepSeekMath equation 4). Same shape as
    the arguments, differentiable in both.
    """
    _require_shape("reference_log_probs", reference_log_probs, policy_log_probs.shape)
    log_ratio = (reference_log_probs - policy_log_probs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def truncated_importance_weights(trainer_log_probs: Tensor, engine_log_probs: Tensor, cap: float) -> Tensor:
    """min(p_trainer / p_engine, cap) for each token, detached: what a token's loss is multiplied by.

    Corrects for an engine whose arithmetic differs from the trainer's (truncated importance sampling; Yao et al.,
    "Your efficient RL framework secretly brings you off-policy RL training", 2025). Same shape as the arguments.
    """
    _require_shape("engine_log_probs", engine_log_probs, trainer_log_probs.shape)
    if not cap > 0:
        raise ConfigError(f"cap is {cap}; it must be positive")
    return _ratio(trainer_log_probs.detach(), engine_log_probs).clamp(max=cap)


# --- Masked reductions


def masked_normalize(tensor: Tensor, mask: Tensor, normalize_constant: float, dim: int | None = None) -> Tensor:
    """Sum of the elements where the mask is set, over `dim` or over everything, divided by `normalize_constant`."""
    if normalize_constant == 0:
        raise ConfigError("normalize_constant is 0; it must not be, for the sum is divided by it")
    return _masked_sum(tensor, mask, dim) / normalize_constant


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the elements where the mask is set, over `dim` or over everything; NaN where none is set."""
    return _masked_sum(tensor, mask, dim) / (mask.bool().sum() if dim is None else mask.bool().sum(dim=dim))


def _masked_sum(tensor: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    _require_shape("mask", mask, tensor.shape)
    selected = tensor.masked_fill(~mask.bool(), 0)  # not a product with the mask: what lies outside may be inf or NaN
    return selected.sum() if dim is None else selected.sum(dim=dim)


def sequence_loss_weights(
    response_mask: Tensor,
    length_normalization: LengthNormalization,
    normalize_constant: float | None,
    batch_size: int,
    total_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight (B, T) of every token's loss, zero outside the responses, so that a batch's loss is a plain sum.

    The loss of a whole batch is the sum over its microbatches of `(per_token_loss * weights).sum()`, for any cut:
    `batch_size` and `total_tokens` (response tokens) are those of the whole batch, fixed before it is cut. Sequences
    that were dropped may still count in them. A row without response tokens has no weight.

    - "sequence": mean over each sequence's tokens, mean over sequences (GRPO, arXiv 2402.03300, equation 3)
    - "constant": sum over each sequence's tokens / `normalize_constant`, mean over sequences (Dr. GRPO, 2503.20783)
    - "token": mean over all tokens of the batch (DAPO, arXiv 2503.14476, equation 8)
    """
    _require_at_least_one("batch_size", batch_size)
    mask = response_mask.bool()
    weights = mask.to(dtype)
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
    return centred.masked_fill(_has_equal_rewards(rewards), 0.0).to(rewards.dtype)


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
    return advantages.masked_fill(_has_equal_rewards(rewards), 0.0).to(rewards.dtype)


def compute_group_normalized_rewards(
    reward_fn: RewardFunction,
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[Any],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Grade N responses, siblings side by side, and centre each reward on its group's mean.

    `reward_fn(response, ground_truth)` gives a number, or a mapping with "reward" and perhaps its two parts.

    Returns advantages (N,), raw rewards (N,), and metadata: mean, std (unbiased), max and min of the raw rewards, the
    fraction of groups without variance, and the means of "format_reward" and "answer_reward" where given.
    Raises ConfigError for lengths that do not fit together, DataError for a reward that is not a finite number.
    """
    _require_at_least_one("group_size", group_size)
    count = len(rollout_responses)
    if len(repeated_ground_truths) != count:
        truths = len(repeated_ground_truths)
        raise ConfigError(f"repeated_ground_truths has {truths} entries, rollout_responses {count}; they must pair up")
    if count == 0 or count % group_size:
        raise ConfigError(f"rollout_responses has {count} entries; it must be a multiple of group_size {group_size}")
    scores = [reward_fn(*pair) for pair in zip(rollout_responses, repeated_ground_truths, strict=True)]
    parts = [score if isinstance(score, Mapping) else {"reward": score} for score in scores]
    raw_rewards = torch.tensor([float(part["reward"]) for part in parts], dtype=torch.float32)
    if not bool(raw_rewards.isfinite().all()):
        index = int((~raw_rewards.isfinite()).nonzero()[0])
        raise DataError(f"reward_fn gave {raw_rewards[index].item()} for response {index}; rewards must be finite")
    groups = raw_rewards.view(-1, group_size)
    metadata = {
        "mean": raw_rewards.mean().item(),
        "std": raw_rewards.std().item() if count > 1 else 0.0,
        "max": raw_rewards.max().item(),
        "min": raw_rewards.min().item(),
        "zero_variance_fraction": _has_equal_rewards(groups).float().mean().item(),
    }
    for name in ("format_reward", "answer_reward"):
        if name in parts[0]:
            metadata[name] = sum(float(part[name]) for part in parts) / count
    return group_advantages(groups, advantage_eps, normalize_by_std).flatten(), raw_rewards, metadata


def _has_equal_rewards(rewards: Tensor) -> Tensor:
    return rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)  # (P, 1)


# --- Policy-gradient losses


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """REINFORCE: -A * log pi for every token; A (B, 1), log pi (B, T) -> (B, T).

    The one loss that returns its tensor alone, as its published interface does.
    """
    _require_shape("raw_rewards_or_advantages", raw_rewards_or_advantages, (policy_log_probs.shape[0], 1))
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
    _require_shape("response_mask", response_mask, policy_log_probs.shape)
    lengths = response_mask.bool().sum(dim=1, keepdim=True).clamp(min=1)
    log_ratio = _masked_sum(policy_log_probs - old_log_probs.detach(), response_mask, dim=1).unsqueeze(1) / lengths
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
    _require_shape("raw_rewards", raw_rewards, (policy_log_probs.shape[0], 1))
    return compute_naive_policy_gradient_loss(raw_rewards, policy_log_probs), {}


def _reinforce_with_baseline_loss(advantages: Tensor, policy_log_probs: Tensor) -> LossAndMetadata:
    _require_shape("advantages", advantages, (policy_log_probs.shape[0], 1))
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


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: ClipRange | None = None,
    response_mask: Tensor | None = None,
) -> LossAndMetadata:
    """The loss (B, T) of the named type, and its metadata. Arguments that the type does not need are ignored.

    Raises ConfigError that names the argument which is missing or has the wrong shape, or the unknown type.
    """
    given = {
        "raw_rewards": raw_rewards,
        "advantages": advantages,
        "old_log_probs": old_log_probs,
        "cliprange": cliprange,
        "response_mask": response_mask,
    }
    if loss_type not in POLICY_GRADIENT_LOSSES:
        raise ConfigError(f"loss_type is {loss_type!r}; allowed are {', '.join(POLICY_GRADIENT_LOSSES)}")
    loss_function, required = POLICY_GRADIENT_LOSSES[loss_type]
    missing = [name for name in required if given[name] is None]
    if missing:
        raise ConfigError(f'{", ".join(missing)} missing; loss_type "{loss_type}" needs {", ".join(required)}')
    return loss_function(policy_log_probs=policy_log_probs, **{name: given[name] for name in required})


# --- Microbatch steps of the published interface


def sft_microbatch_train_step(
    policy_log_probs: Tensor, response_mask: Tensor, gradient_accumulation_steps: int, normalize_constant: float = 1.0
) -> LossAndMetadata:
    """Backpropagate the negative log-likelihood of one microbatch of responses; both tensors (B, T).

    -(sum over a response's tokens / `normalize_constant`), mean over B, / `gradient_accumulation_steps`.

    Returns the loss that was backpropagated, detached, and metadata with the number of `response_tokens`.
    """
    _require_at_least_one("gradient_accumulation_steps", gradient_accumulation_steps)
    _require_shape("response_mask", response_mask, policy_log_probs.shape)
    per_sequence = -masked_normalize(policy_log_probs, response_mask, normalize_constant, dim=1)  # (B,)
    loss = per_sequence.mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), {"response_tokens": response_mask.bool().sum()}


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: ClipRange | None = None,
    length_normalization: LengthNormalization = "sequence",
    normalize_constant: float | None = None,
) -> LossAndMetadata:
    """Backpropagate the policy-gradient loss of one microbatch, as `sequence_loss_weights` reduces it over (B, T).

    Equal microbatches of "sequence" and "constant" add up to the whole batch; for uneven ones, and for "token", a
    training loop takes the weights of the whole batch instead.

    Returns the loss that was backpropagated (÷ `gradient_accumulation_steps`), detached, and the loss's metadata,
    with `clip_fraction` of the response tokens where the loss clips.
    """
    _require_at_least_one("gradient_accumulation_steps", gradient_accumulation_steps)
    _require_shape("response_mask", response_mask, policy_log_probs.shape)
    per_token_loss, metadata = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange, response_mask
    )
    batch_size, total_tokens = len(response_mask), int(response_mask.bool().sum())
    weights = sequence_loss_weights(
        response_mask, length_normalization, normalize_constant, batch_size, total_tokens, policy_log_probs.dtype
    )
    loss = _masked_sum(per_token_loss * weights, response_mask, dim=None) / gradient_accumulation_steps
    loss.backward()
    if "clipped" in metadata:
        metadata = {**metadata, "clip_fraction": masked_mean(metadata["clipped"].float(), response_mask)}
    return loss.detach(), metadata


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
    _require_shape("advantages", advantages, (policy_log_probs.shape[0], 1))
    _require_shape("old_log_probs", old_log_probs, policy_log_probs.shape)


def _require_groups(rewards: Tensor, advantage_eps: float) -> None:
    if rewards.dim() != 2:
        raise ConfigError(f"rewards has shape {tuple(rewards.shape)}; it must be (prompts, group_size)")
    if not advantage_eps >= 0:
        raise ConfigError(f"advantage_eps is {advantage_eps}; it must be 0 or positive")


def _require_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1")


def _require_shape(name: str, tensor: Tensor, expected: Sequence[int]) -> None:
    # Broadcasting would silently turn an advantage of shape (B,) into one per position wherever B equals T.
    if tensor.shape != torch.Size(expected):
        raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; it must be {tuple(expected)}")
