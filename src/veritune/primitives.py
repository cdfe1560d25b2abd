"""The published interface of the alignment assignments: tokenising, scoring, and microbatch steps, one call each.

Shapes are written with B sequences of T positions over a vocabulary of V; P prompts have G sampled responses each. The
mathematics stands in `losses`; training itself goes through `trainer`, which cuts microbatches without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from veritune.core.errors import ConfigError, DataError
from veritune.losses import (
    POLICY_GRADIENT_LOSSES,
    ClipRange,
    LengthNormalization,
    LossAndMetadata,
    LossType,
    Metadata,
    approximate_kl_k3,
    compute_cispo_loss,
    compute_entropy,
    compute_grpo_clip_loss,
    compute_grpo_no_clip_loss,
    compute_gspo_loss,
    compute_naive_policy_gradient_loss,
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
