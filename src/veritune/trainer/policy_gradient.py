"""The policy gradient of a batch of rollouts: every loss, whatever the microbatches and the processes.

A recipe says what each response is worth; here that becomes a gradient. The losses themselves are `primitives.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veritune.core.types import Rollout
from veritune.losses import (
    approximate_kl_k3,
    sequence_loss_weights,
    truncated_importance_weights,
)
from veritune.model.parallel import ALONE, Workers, share_rows
from veritune.model.policy import Policy
from veritune.primitives import compute_policy_gradient_loss
from veritune.trainer.config import PolicyGradientConfig
from veritune.trainer.microbatches import (
    Microbatch,
    add_gradient,
    cut_microbatches,
    pad_responses,
    score_responses,
)


def accumulate_gradient(
    config: PolicyGradientConfig,
    policy: Policy,
    rollouts: Sequence[Rollout],
    batch: Sequence[int],
    old_log_probs: Sequence[Tensor] | None = None,
    reference_log_probs: Sequence[Tensor] | None = None,
    workers: Workers = ALONE,
) -> dict[str, float]:
    """Add the gradient of one train batch's loss, whatever its microbatches; the loss has its denominators first."""
    response_tokens = sum(len(rollouts[row].completion.ids) for row in batch)
    rows = rows_with_gradient(config, rollouts, batch)
    prompts_ids = [rollout.completion.prompt_ids for rollout in rollouts]
    lengths = [len(rollout.completion.ids) for rollout in rollouts]

    def of(share: Sequence[int], values: Sequence[Any] | None) -> list[Any] | None:
        return [values[row] for row in share] if values else None

    shares = [
        (config, of(share, rollouts), of(share, old_log_probs), of(share, reference_log_probs))
        for share in share_rows(rows, prompts_ids, lengths, workers.count)
    ]
    denominators = (len(batch), response_tokens)
    sums = workers.add_gradients(policy, add_policy_gradient, [(*share, *denominators) for share in shares])
    if not rows:  # the same update as with the rows: no gradient, but the optimiser's momentum
        for parameter in policy.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    loss, clipped, mismatch = (sum(parts) for parts in zip(*sums, strict=True)) if sums else (0.0, 0.0, 0.0)
    return {
        "loss": loss,
        "clip_fraction": clipped / response_tokens,
        "mismatch_kl": mismatch / max(sum(lengths[row] for row in rows), 1),
        "train_tokens": sum(len(prompts_ids[row]) + lengths[row] for row in rows),
    }


def add_policy_gradient(
    policy: Policy,
    config: PolicyGradientConfig,
    rollouts: Sequence[Rollout],
    old_log_probs: Sequence[Tensor] | None,
    reference_log_probs: Sequence[Tensor] | None,
    batch_size: int,
    batch_tokens: int,
) -> tuple[float, float, float]:
    """Add the gradient of these rollouts of a batch of `batch_size` with `batch_tokens` response tokens.

    Returns their loss, how many tokens were clipped, and the sum of the engine's mismatch over the tokens.
    """
    sums = (0.0, 0.0, 0.0)
    for microbatch in rollout_microbatches(config, policy, rollouts):
        weights = sequence_loss_weights(
            microbatch.response_mask,
            config.length_normalization,
            config.normalize_constant or config.max_tokens,
            batch_size=batch_size,
            total_tokens=batch_tokens,
        )
        given = given_of(rollouts, microbatch, weights, old_log_probs, reference_log_probs)
        pass_microbatch = pass_by_sequence if config.sequence_level else pass_by_token
        loss, log_probs, clipped = pass_microbatch(config, policy, microbatch, given)
        mismatch = float(approximate_kl_k3(given.sampled, log_probs).sum())
        sums = (sums[0] + loss, sums[1] + clipped, sums[2] + mismatch)
    return sums


@dataclass(frozen=True)
class Given:
    """What the loss of each response token needs beside its log-probability: all (R,), or all laid out (B, T)."""

    weights: Tensor
    advantages: Tensor
    sampled: Tensor
    """Log-probabilities under the engine that sampled the tokens."""
    old: Tensor | None
    reference: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> Given:
        return Given(*(None if each is None else change(each) for each in vars(self).values()))  # type: ignore[arg-type]


def given_of(
    rollouts: Sequence[Rollout],
    microbatch: Microbatch,
    weights: Tensor,
    old_log_probs: Sequence[Tensor] | None,
    reference_log_probs: Sequence[Tensor] | None,
) -> Given:
    """What is given of a microbatch's response tokens, (R,) each; `weights` (B, T)."""
    mask = microbatch.response_mask
    members = [rollouts[row] for row in microbatch.rows]

    def joined(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([values[row] for row in microbatch.rows]).to(mask.device)

    return Given(
        weights[mask],
        torch.tensor([rollout.advantage for rollout in members], device=mask.device)[:, None].expand_as(mask)[mask],
        torch.tensor([value for rollout in members for value in rollout.completion.logprobs], device=mask.device),
        joined(old_log_probs) if old_log_probs else None,
        joined(reference_log_probs) if reference_log_probs else None,
    )


def pass_by_token(
    config: PolicyGradientConfig, policy: Policy, microbatch: Microbatch, given: Given
) -> tuple[float, Tensor, float]:
    """Add the gradient of a loss that each token has for itself: loss, log-probabilities (R,), clipped tokens."""
    clipped = []

    def token_loss(log_probs: Tensor, part: slice) -> Tensor:
        one_token_a_row = given.map(lambda values: values[part, None])
        loss, clips = weighted_loss(config, log_probs[:, None], one_token_a_row, torch.ones_like(log_probs[:, None]))
        clipped.append(clips)
        return loss

    loss, log_probs = add_gradient(policy.model, microbatch, config.temperature, token_loss)
    return loss, log_probs, float(sum(clipped))


def pass_by_sequence(
    config: PolicyGradientConfig, policy: Policy, microbatch: Microbatch, given: Given
) -> tuple[float, Tensor, float]:
    """The same for a loss in which a sequence's tokens act on one another: its slopes first, then the gradient."""
    mask = microbatch.response_mask
    log_probs = score_responses(policy.model, microbatch, config.temperature).requires_grad_()
    padded = given.map(lambda values: pad_responses(values, mask))
    losses, clipped = weighted_loss(config, pad_responses(log_probs, mask), padded, mask)
    (slopes,) = torch.autograd.grad(losses.sum(), log_probs)
    add_gradient(policy.model, microbatch, config.temperature, lambda scores, part: scores * slopes[part])
    return losses.sum().item(), log_probs.detach(), float(clipped)


def weighted_loss(config: PolicyGradientConfig, log_probs: Tensor, given: Given, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every token, (B, T), zero outside `mask`, with its weight, and how many were clipped, ()."""
    loss, metadata = compute_policy_gradient_loss(
        log_probs,
        config.loss_type,
        raw_rewards=given.advantages[:, :1],
        advantages=given.advantages[:, :1],
        old_log_probs=given.old,
        cliprange=(config.cliprange, config.cliprange_high or config.cliprange),
        response_mask=mask,
    )
    if config.corrects_importance:
        trained = log_probs.detach() if given.old is None else given.old
        loss = loss * truncated_importance_weights(trained, given.sampled, config.importance_cap)
    if given.reference is not None:
        loss = loss + config.kl_coefficient * approximate_kl_k3(log_probs, given.reference)
    clipped = metadata["clipped"][mask.bool()].sum() if "clipped" in metadata else torch.zeros(())
    return loss * given.weights, clipped


def rows_with_gradient(config: PolicyGradientConfig, rollouts: Sequence[Rollout], batch: Sequence[int]) -> list[int]:
    """The rows of `batch` that need a pass. The others have no gradient: they stay in every denominator."""
    rows = [
        row for row in batch if not (config.filter_truncated and rollouts[row].completion.finish_reason == "length")
    ]
    if config.skip_zero_advantages and not config.kl_coefficient:
        rows = [row for row in rows if rollouts[row].advantage != 0]
    return rows


def old_policy_log_probs(config: PolicyGradientConfig, policy: Policy, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """The log-probabilities of every response under the weights that sampled it: N tensors (length,).

    An engine with exact ones has them: its arithmetic is the trainer's. Those of any other are only close, and
    `min_tokens` changes the distribution that is sampled from.
    """
    if config.engine_settings.exact_log_probs and not config.min_tokens:
        return [torch.tensor(rollout.completion.logprobs) for rollout in rollouts]
    return score_rollouts(config, policy, rollouts)


def score_rollouts(config: PolicyGradientConfig, policy: Policy, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """The log-probabilities of every response under the policy's present weights: N tensors (length,)."""
    scored: dict[int, Tensor] = {}
    for microbatch in rollout_microbatches(config, policy, rollouts):
        log_probs = score_responses(policy.model, microbatch, config.temperature)
        lengths = [len(rollouts[row].completion.ids) for row in microbatch.rows]
        scored |= dict(zip(microbatch.rows, log_probs.split(lengths), strict=True))
    return [scored[row] for row in range(len(rollouts))]


def rollout_microbatches(
    config: PolicyGradientConfig, policy: Policy, rollouts: Sequence[Rollout]
) -> Iterator[Microbatch]:
    return cut_microbatches(
        [rollout.completion.prompt_ids for rollout in rollouts],
        [rollout.completion.ids for rollout in rollouts],
        range(len(rollouts)),
        token_budget=config.microbatch_tokens,
        device=next(policy.model.parameters()).device,
    )
