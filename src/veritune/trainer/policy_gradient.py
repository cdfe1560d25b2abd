"""The policy gradient of a batch of rollouts: every loss, whatever the microbatches and the processes.

A recipe gives each response its advantage; here it becomes a gradient. The losses themselves stand in `losses.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from veritune.core.errors import ConfigError
from veritune.core.types import Rollout
from veritune.losses import (
    LossAndMetrics,
    LossInputs,
    approximate_kl_k3,
    masked_sum,
    require_shape,
    sequence_loss_weights,
    truncated_importance_weights,
)
from veritune.model.head import response_log_probs
from veritune.model.parallel import ALONE, Workers, share_rows
from veritune.model.policy import Policy
from veritune.trainer.config import PolicyGradientConfig
from veritune.trainer.microbatches import (
    Microbatch,
    cut_microbatches,
    finite_backward,
    pad_responses,
    score_responses,
)


@dataclass(frozen=True)
class Share:
    """The part of a train batch that one process takes the gradient of."""

    rollouts: Sequence[Rollout]
    old_log_probs: Sequence[Tensor] | None
    """Of each response, (length,), under the weights that sampled it."""
    reference_log_probs: Sequence[Tensor] | None
    batch_size: int
    """Responses of the whole batch, those without a gradient included."""
    batch_tokens: int
    """Their tokens."""


def batch_backward(
    config: PolicyGradientConfig,
    policy: Policy,
    rollouts: Sequence[Rollout],
    batch: Sequence[int],
    old_log_probs: Sequence[Tensor] | None = None,
    reference_log_probs: Sequence[Tensor] | None = None,
    workers: Workers = ALONE,
) -> dict[str, float]:
    """Add the gradient of one train batch's loss, whatever its microbatches; the loss has its denominators first."""
    batch_tokens = sum(len(rollouts[row].completion.ids) for row in batch)
    rows = rows_with_gradient(config, rollouts, batch)
    prompts_ids = [rollout.completion.prompt_ids for rollout in rollouts]
    lengths = [len(rollout.completion.ids) for rollout in rollouts]

    def of(share: Sequence[int], values: Sequence[Tensor] | None) -> list[Tensor] | None:
        return [values[row] for row in share] if values else None

    shares = [
        Share(
            [rollouts[row] for row in share],
            of(share, old_log_probs),
            of(share, reference_log_probs),
            batch_size=len(batch),
            batch_tokens=batch_tokens,
        )
        for share in share_rows(rows, prompts_ids, lengths, workers.count)
    ]
    sums = add_up(workers.add_gradients(policy, rank_backward, [(config, share) for share in shares]))
    loss, mismatch, clipped = (sums.pop(name, 0.0) for name in ("loss", "mismatch", "clipped"))
    return {
        **{name: value / batch_tokens for name, value in sums.items()},
        "loss": loss,
        "clip_fraction": clipped / batch_tokens,
        "mismatch_kl": mismatch / max(sum(lengths[row] for row in rows), 1),
        "train_tokens": sum(len(prompts_ids[row]) + lengths[row] for row in rows),
    }


def rank_backward(policy: Policy, config: PolicyGradientConfig, share: Share) -> dict[str, float]:
    """Add the gradient of a share's loss, microbatch by microbatch; returns their sums."""
    sums: dict[str, float] = {}
    for microbatch in rollout_microbatches(config, policy, share.rollouts):
        sums = add_up([sums, microbatch_backward(policy, config, share, microbatch)])
    return sums


def microbatch_backward(
    policy: Policy, config: PolicyGradientConfig, share: Share, microbatch: Microbatch
) -> dict[str, float]:
    """Add the gradient of a microbatch's loss.

    Returns sums over its tokens: the `loss`, the `mismatch` with the engine, and the metrics of the loss.
    """
    inputs = loss_inputs(policy, config, share, microbatch)
    loss, metrics = required_result(config, inputs, config.loss_function(inputs))
    loss = with_correction_and_kl(config, inputs, loss)
    weights = sequence_loss_weights(
        inputs.mask,
        config.length_normalization,
        config.normalize_constant or config.max_tokens,
        batch_size=share.batch_size,
        total_tokens=share.batch_tokens,
    )
    total = finite_backward(masked_sum(loss * weights, inputs.mask, dim=None))
    metrics = {**metrics, "mismatch": approximate_kl_k3(inputs.sampled_log_probs, inputs.log_probs.detach())}
    return {"loss": total} | {
        name: masked_sum(values, inputs.mask, dim=None).item() for name, values in metrics.items()
    }


def add_up(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts if name in part) for name in chain(*parts)}


def loss_inputs(policy: Policy, config: PolicyGradientConfig, share: Share, microbatch: Microbatch) -> LossInputs:
    """The forward pass over a microbatch, and what its loss compares it with, (B, T) each."""
    mask, rows = microbatch.response_mask, microbatch.rows

    def padded(values: Sequence[Tensor]) -> Tensor:
        return pad_responses(torch.cat([values[row] for row in rows]).to(mask.device), mask)

    members = [share.rollouts[row] for row in rows]
    sampled = torch.tensor([value for rollout in members for value in rollout.completion.logprobs], device=mask.device)
    log_probs = pad_responses(response_log_probs(policy.model, microbatch.packed, config.temperature), mask)
    return LossInputs(
        log_probs=log_probs,
        old_log_probs=padded(share.old_log_probs) if share.old_log_probs else log_probs.detach(),
        sampled_log_probs=pad_responses(sampled, mask),
        reference_log_probs=padded(share.reference_log_probs) if share.reference_log_probs else None,
        advantages=torch.tensor([[rollout.advantage] for rollout in members], device=mask.device),
        mask=mask,
    )


def required_result(config: PolicyGradientConfig, inputs: LossInputs, result: Any) -> LossAndMetrics:
    """The result of a loss, perhaps from outside; ConfigError where it is not what the loss has declared."""
    shape = torch.Size((len(inputs.mask), 1)) if config.loss.level == "sequence" else inputs.mask.shape
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise ConfigError(f"loss_type {config.loss_type} returned {result!r}; it must return the loss and its metrics")
    loss, metrics = result
    require_shape(f"the {config.loss.level} loss of loss_type {config.loss_type}", loss, shape)
    return loss, {name: torch.broadcast_to(values, inputs.mask.shape) for name, values in metrics.items()}


def with_correction_and_kl(config: PolicyGradientConfig, inputs: LossInputs, loss: Tensor) -> Tensor:
    """The loss of each token, corrected for the engine's arithmetic, with the divergence from the reference."""
    if config.corrects_importance:
        loss = loss * truncated_importance_weights(
            inputs.old_log_probs, inputs.sampled_log_probs, config.importance_cap
        )
    if inputs.reference_log_probs is not None:
        loss = loss + config.kl_coefficient * approximate_kl_k3(inputs.log_probs, inputs.reference_log_probs)
    return loss


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
