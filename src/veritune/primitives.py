"""The published interface of the alignment assignments: tokenising, scoring, and microbatch steps, one call each.

Shapes are written with B sequences of T positions over a vocabulary of V; P prompts have G sampled responses each. The
mathematics stands in `losses`; training itself goes through `trainer`, which cuts microbatches without padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from veritune.core.errors import ConfigError, DataError
from veritune.losses import (
    LengthNormalization,
    LossInputs,
    approximate_kl_k3,
    compute_entropy,
    find_loss,
    group_advantages,
    has_equal_rewards,
    masked_sum,
    maxrl_advantages,
    require_at_least_one,
    require_shape,
    selected_log_probs,
    sequence_loss_weights,
    truncated_importance_weights,
)

__all__ = [
    "approximate_kl_k3",
    "compute_cispo_loss",
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_grpo_no_clip_loss",
    "compute_gspo_loss",
    "compute_naive_policy_gradient_loss",
    "compute_policy_gradient_loss",
    "get_response_log_probs",
    "group_advantages",
    "grpo_microbatch_train_step",
    "masked_mean",
    "masked_normalize",
    "maxrl_advantages",
    "pad_prompt_and_response",
    "selected_log_probs",
    "sequence_loss_weights",
    "sft_microbatch_train_step",
    "tokenize_prompt_and_output",
    "truncated_importance_weights",
]

RewardFunction = Callable[[str, Any], float | Mapping[str, float]]
ClipRange = float | tuple[float, float]
"""One distance from 1 for both ends of the clip interval, or (low, high) as in DAPO's clip-higher."""
Metadata = dict[str, Tensor]
LossAndMetadata = tuple[Tensor, Metadata]


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


def get_response_log_probs(
    model: Callable[[Tensor], Any], input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> Metadata:
    """Score labels (B, T) under a causal language model: `log_probs` (B, T) and, if asked, `token_entropy` (B, T).

    Prompt and padding positions are scored too: masking is the caller's. The entropy is detached, for logging;
    `compute_entropy` itself is differentiable.
    """
    require_shape("labels", labels, input_ids.shape)
    logits = model(input_ids).logits  # (B, T, V)
    scores = {"log_probs": selected_log_probs(logits, labels)}
    if return_token_entropy:
        with torch.no_grad():
            scores["token_entropy"] = compute_entropy(logits)
    return scores


def masked_normalize(
    tensor: Tensor,
    mask: Tensor,
    normalize_constant: float | None = None,
    dim: int | None = None,
    *,
    constant_normalizer: float | None = None,
) -> Tensor:
    """Sum of the elements where the mask is set, over `dim` or over everything, divided by `normalize_constant`.

    `constant_normalizer` is the same number under the name that the course's own example gives it; one of the two is
    required.
    """
    if (normalize_constant is None) == (constant_normalizer is None):
        raise ConfigError("masked_normalize needs one of normalize_constant and constant_normalizer, not both")
    name = "normalize_constant" if constant_normalizer is None else "constant_normalizer"
    constant = normalize_constant if constant_normalizer is None else constant_normalizer
    if not constant:
        raise ConfigError(f"{name} is 0; it must not be, for the sum is divided by it")
    return masked_sum(tensor, mask, dim) / constant


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the elements where the mask is set, over `dim` or over everything; NaN where none is set."""
    return masked_sum(tensor, mask, dim) / (mask.bool().sum() if dim is None else mask.bool().sum(dim=dim))


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
    require_at_least_one("group_size", group_size)
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
        "zero_variance_fraction": has_equal_rewards(groups).float().mean().item(),
    }
    for name in ("format_reward", "answer_reward"):
        if name in parts[0]:
            metadata[name] = sum(float(part[name]) for part in parts) / count
    return group_advantages(groups, advantage_eps, normalize_by_std).flatten(), raw_rewards, metadata


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """`losses.reinforce` of A (B, 1) and log pi (B, T): (B, T).

    The one loss that returns its tensor alone, as its published interface does.
    """
    require_shape("raw_rewards_or_advantages", raw_rewards_or_advantages, (policy_log_probs.shape[0], 1))
    return compute_policy_gradient_loss(policy_log_probs, "no_baseline", raw_rewards=raw_rewards_or_advantages)[0]


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: ClipRange
) -> LossAndMetadata:
    """`losses.grpo_clip` of A (B, 1) and log-probabilities (B, T): the loss (B, T), `clipped` and `ratio` (B, T)."""
    return compute_policy_gradient_loss(policy_log_probs, "grpo_clip", None, advantages, old_log_probs, cliprange)


def compute_grpo_no_clip_loss(advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor) -> LossAndMetadata:
    """`losses.grpo_no_clip` of A (B, 1) and log-probabilities (B, T): the loss (B, T) and `ratio` (B, T)."""
    return compute_policy_gradient_loss(policy_log_probs, "grpo_no_clip", None, advantages, old_log_probs)


def compute_gspo_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: ClipRange, response_mask: Tensor
) -> LossAndMetadata:
    """`losses.gspo` of A (B, 1), log-probabilities and mask (B, T): as `compute_grpo_clip_loss`.

    The response's loss stands at each of its T positions.
    """
    return compute_policy_gradient_loss(
        policy_log_probs, "gspo", None, advantages, old_log_probs, cliprange, response_mask
    )


def compute_cispo_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: ClipRange
) -> LossAndMetadata:
    """`losses.cispo` of A (B, 1) and log-probabilities (B, T): as `compute_grpo_clip_loss`."""
    return compute_policy_gradient_loss(policy_log_probs, "cispo", None, advantages, old_log_probs, cliprange)


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: ClipRange | None = None,
    response_mask: Tensor | None = None,
) -> LossAndMetadata:
    """The loss (B, T) of a name in `losses.LOSSES`, and its metadata. Arguments that it does not need are ignored.

    Raises ConfigError that names the argument which is missing or has the wrong shape, or the unknown type.
    """
    loss, shape = find_loss(loss_type), policy_log_probs.shape
    column = "advantages" if loss.baseline else "raw_rewards"
    clips = any(field.name == "cliprange" for field in dataclasses.fields(loss.settings))
    needed: dict[str, Any] = {column: advantages if loss.baseline else raw_rewards}
    needed |= {"old_log_probs": old_log_probs} if loss.off_policy else {}
    needed |= {"cliprange": cliprange} if clips else {}
    needed |= {"response_mask": response_mask} if loss.level == "sequence" else {}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ConfigError(f'{", ".join(missing)} missing; loss_type "{loss_type}" needs {", ".join(needed)}')
    interval = _clip_interval(needed.pop("cliprange")) if clips else {}
    for name, value in needed.items():
        require_shape(name, value, (shape[0], 1) if name == column else shape)
    old = needed.get("old_log_probs", policy_log_probs).detach()
    mask = needed.get("response_mask", torch.ones_like(policy_log_probs)).bool()
    inputs = LossInputs(
        log_probs=policy_log_probs,
        old_log_probs=old,
        sampled_log_probs=old,
        advantages=needed[column],
        mask=mask,
    )
    values, metadata = loss.function(inputs, **interval)
    return values.expand(shape), {name: value.expand(shape) for name, value in metadata.items()}


def _clip_interval(cliprange: ClipRange) -> dict[str, float]:
    low, high = cliprange if isinstance(cliprange, tuple) else (cliprange, cliprange)
    if not (low >= 0 and high >= 0):
        raise ConfigError(f"cliprange is {cliprange}; it must be one number or (low, high), none of them negative")
    return {"cliprange": low, "cliprange_high": high}


def sft_microbatch_train_step(
    policy_log_probs: Tensor, response_mask: Tensor, gradient_accumulation_steps: int, normalize_constant: float = 1.0
) -> LossAndMetadata:
    """Backpropagate the negative log-likelihood of one microbatch of responses; both tensors (B, T).

    -(sum over a response's tokens / `normalize_constant`), mean over B, / `gradient_accumulation_steps`.

    Returns the loss that was backpropagated, detached, and metadata with the number of `response_tokens`.
    """
    require_at_least_one("gradient_accumulation_steps", gradient_accumulation_steps)
    require_shape("response_mask", response_mask, policy_log_probs.shape)
    per_sequence = -masked_normalize(policy_log_probs, response_mask, normalize_constant, dim=1)  # (B,)
    loss = per_sequence.mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), {"response_tokens": response_mask.bool().sum()}


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: str,
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
    require_at_least_one("gradient_accumulation_steps", gradient_accumulation_steps)
    require_shape("response_mask", response_mask, policy_log_probs.shape)
    per_token_loss, metadata = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange, response_mask
    )
    batch_size, total_tokens = len(response_mask), int(response_mask.bool().sum())
    weights = sequence_loss_weights(
        response_mask, length_normalization, normalize_constant, batch_size, total_tokens, policy_log_probs.dtype
    )
    loss = masked_sum(per_token_loss * weights, response_mask, dim=None) / gradient_accumulation_steps
    loss.backward()
    if "clipped" in metadata:
        metadata = {**metadata, "clip_fraction": masked_mean(metadata["clipped"].float(), response_mask)}
    return loss.detach(), metadata
