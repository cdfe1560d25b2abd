"""Group relative policy optimization, on- and off-policy (DeepSeekMath, https://arxiv.org/abs/2402.03300).

A step: draw prompts, sample a group of responses for each, pay them, compare each with its siblings, and follow the
policy gradient for one or several epochs over the rollouts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from veritune.configs import TrainingConfig, require
from veritune.errors import ConfigError
from veritune.evaluate import Group, response_row, summarize
from veritune.policies import Policy, load_policy
from veritune.primitives import (
    POLICY_GRADIENT_LOSSES,
    LossType,
    approximate_kl_k3,
    compute_policy_gradient_loss,
    group_advantages,
    maxrl_advantages,
    sequence_loss_weights,
    truncated_importance_weights,
)
from veritune.randomness import derive_seed
from veritune.training import (
    Microbatch,
    Row,
    Session,
    Stopwatch,
    add_gradient,
    clip_and_step,
    cut_microbatches,
    draw_batch,
    examples_of,
    pad_responses,
    prepare_optimizer,
    refused_on_error,
    sample_and_grade,
    scheduled_learning_rate,
    score_responses,
    serve_policy,
    train,
)
from veritune.types import Example, Rollout
from veritune.workers import ALONE, Workers, share_rows


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(TrainingConfig):
    """Settings of `veritune grpo`; the defaults train the embedded policy on two CPU cores."""

    steps: int = 60
    """Rollout batches to sample and train on."""
    learning_rate: float = 3e-4
    """Peak learning rate of AdamW."""
    rollout_batch_size: int = 256
    """Responses sampled each step: prompts times group_size."""
    group_size: int = 8
    """Responses sampled for each prompt."""
    train_batch_size: int = 256
    """Responses of one optimiser step; smaller than rollout_batch_size makes later steps off-policy."""
    epochs_per_rollout_batch: int = 1
    """Passes over each rollout batch."""
    loss_type: LossType = "reinforce_with_baseline"
    """The policy-gradient loss; all but no_baseline and reinforce_with_baseline need an old policy, so off-policy."""
    cliprange: float = 0.2
    """Distance from 1 at which grpo_clip, gspo and cispo clip the probability ratio."""
    cliprange_high: float | None = None
    """The same distance above 1, where it differs (clip-higher)."""
    baseline: Literal["group_mean", "leave_one_out", "max_rl"] = "group_mean"
    """What a response is compared with: its group's mean, the mean of the others (RLOO), or MaxRL's scaled mean."""
    normalize_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); off is Dr. GRPO."""
    advantage_eps: float = 1e-6
    """Added to the group's standard deviation."""
    length_normalization: Literal["sequence", "constant", "token"] = "sequence"
    """Mean over each response's tokens, sum over them divided by normalize_constant, or mean over the batch's."""
    normalize_constant: float | None = None
    """The divisor of length_normalization constant; default: max_tokens."""
    kl_coefficient: float = 0.0
    """Weight of the KL divergence to the initial policy (k3 estimator) in the loss; 0 loads no reference."""
    resample_rounds: int = 0
    """How often groups whose rewards are all equal are drawn again with other prompts (dynamic sampling)."""
    filter_truncated: bool = False
    """Responses cut off at max_tokens have no loss (overlong filtering); they stay in the denominators."""
    importance_correction: bool | None = None
    """Weight each token's loss by the trainer's probability over the engine's; default: on unless engine is native."""
    importance_cap: float = 2.0
    """The largest such weight (truncated importance sampling)."""
    skip_zero_advantages: bool = True
    """Leave responses without advantage out of the passes: they have no gradient, and stay in the denominators."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "steps", self.steps >= 1, "at least 1")
        require(self, "warmup_steps", self.warmup_steps <= self.steps, f"at most steps ({self.steps})")
        for name in ("rollout_batch_size", "group_size", "train_batch_size", "epochs_per_rollout_batch"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        require(self, "temperature", self.temperature > 0, "positive: greedy rollouts have nothing to compare")
        require(self, "top_p", self.top_p == 1, "1 while training: the loss scores the whole distribution")
        require(
            self,
            "rollout_batch_size",
            self.rollout_batch_size % self.group_size == 0,
            f"a multiple of group_size ({self.group_size})",
        )
        require(
            self,
            "train_batch_size",
            self.train_batch_size >= self.group_size,
            f"at least group_size ({self.group_size})",
        )
        require(
            self,
            "train_batch_size",
            self.rollout_batch_size % self.train_batch_size == 0,
            f"a divisor of rollout_batch_size ({self.rollout_batch_size})",
        )
        require(self, "cliprange", self.cliprange > 0, "positive")
        require(self, "importance_cap", self.importance_cap > 0, "positive")
        require(self, "advantage_eps", self.advantage_eps >= 0, "0 or more")
        require(
            self,
            "normalize_constant",
            self.normalize_constant is None or self.normalize_constant > 0,
            "positive",
        )
        require(
            self,
            "cliprange_high",
            self.cliprange_high is None or self.cliprange_high >= self.cliprange,
            "at least cliprange",
        )
        require(self, "kl_coefficient", 0 <= self.kl_coefficient < math.inf, "0 or more, and finite")
        require(self, "resample_rounds", self.resample_rounds >= 0, "0 or more")
        if self.baseline == "max_rl" and self.normalize_by_std:
            raise ConfigError("normalize_by_std is True; baseline max_rl divides by the group's mean and needs it off")
        if self.group_size < 2 and self.loss_type != "no_baseline":
            raise ConfigError(
                f"group_size is {self.group_size}; loss_type {self.loss_type} compares siblings, at least 2"
            )
        if "old_log_probs" in POLICY_GRADIENT_LOSSES[self.loss_type][1] and not self.off_policy:
            raise ConfigError(
                f"loss_type is {self.loss_type!r}, but every update is on-policy, so there is no old policy; set "
                "epochs_per_rollout_batch above 1 or train_batch_size below rollout_batch_size, or use "
                "reinforce_with_baseline"
            )

    @property
    def off_policy(self) -> bool:
        """Whether some update uses rollouts of weights older than its own."""
        return self.epochs_per_rollout_batch > 1 or self.train_batch_size < self.rollout_batch_size

    @property
    def sequence_level(self) -> bool:
        """Whether a token's loss depends on the other tokens of its response."""
        return "response_mask" in POLICY_GRADIENT_LOSSES[self.loss_type][1]

    @property
    def corrects_importance(self) -> bool:
        """Whether the engine's arithmetic is corrected for: the native engine's is the trainer's own."""
        return self.engine != "native" if self.importance_correction is None else self.importance_correction


@dataclass(frozen=True, kw_only=True)
class LeaderboardConfig(GRPOConfig):
    """Settings of `veritune leaderboard`: GRPO for a given time, under rules that make results comparable."""

    hours: float | None = None
    """Hours to train for, evaluation included; give either these or minutes."""
    minutes: float | None = None
    """Minutes to train for, evaluation included."""
    prompt: str | None = "r1_zero"
    """The template: r1_zero by the rules."""
    steps: int = 1_000_000
    """Rollout batches at most; the time ends a run before."""
    validation_examples: int = 1_000_000
    """Held-out problems of a validation: the whole split by the rules, which is the smaller."""

    def __post_init__(self) -> None:
        if (self.hours is None) == (self.minutes is None):
            raise ConfigError(f"hours is {self.hours} and minutes is {self.minutes}; give one of them")
        given = "minutes" if self.hours is None else "hours"
        require(self, given, 0 < getattr(self, given) < math.inf, "positive and finite")
        require(self, "validation_examples", self.validation_examples >= 1_000_000, "left alone: the whole split")
        seconds = 3600 * self.hours if self.hours is not None else 60 * (self.minutes or 0)
        require(self, "budget_seconds", self.budget_seconds in (None, seconds), f"unset, or the time given ({seconds})")
        object.__setattr__(self, "budget_seconds", seconds)  # frozen against everyone else
        super().__post_init__()
        require(self, "temperature", self.temperature == 1, "1 by the rules")
        require(self, "prompt", self.prompt == "r1_zero", "r1_zero by the rules")
        require(self, "reward", self.reward in (None, "r1_zero"), "r1_zero by the rules")
        require(self, "schedule", self.schedule == "constant", "constant: nobody knows the number of steps beforehand")


def run(session: Session) -> None:
    """Train the session's policy on its task and leave everything in its run folder."""
    config = session.config
    optimizer = prepare_optimizer(session)
    train_examples = examples_of(session.task, "train")
    reference = (
        load_policy(config.policy, device=session.device, dtype=session.dtype) if config.kl_coefficient else None
    )
    train(
        session,
        optimizer,
        steps=config.steps,
        update=lambda step: grpo_step(session, step, optimizer, train_examples, reference),
    )


def grpo_step(
    session: Session,
    step: int,
    optimizer: torch.optim.Optimizer,
    train_examples: Sequence[Example],
    reference: Policy | None,
) -> Row:
    """One rollout batch: sample, pay, compare, update. Returns the step's metrics."""
    config, clock = session.config, Stopwatch()
    groups = sample_groups(session, step, train_examples)  # P groups of G
    clock.lap("rollout")

    rewards = torch.tensor([[score.reward for score in scores] for _, _, scores in groups])  # (P, G)
    advantages = advantages_of(config, rewards)  # (P, G)
    rollouts = [
        Rollout(example, completion, score, advantage)
        for (example, completions, scores), worth in zip(groups, advantages.tolist(), strict=True)
        for completion, score, advantage in zip(completions, scores, worth, strict=True)
    ]
    session.run.write_rows("rollouts", step, map(rollout_row, rollouts))
    clock.lap("record")

    updates = update_policy(session, step, optimizer, rollouts, reference)
    seconds = clock.lap("train")
    completions = [rollout.completion for rollout in rollouts]
    return {
        **summarize(groups),
        "zero_variance": (rewards == rewards[:, :1]).all(dim=1).float().mean().item(),
        **updates,
        "rollout_tokens_per_second": sum(len(completion.ids) for completion in completions) / seconds["rollout"],
        "train_tokens_per_second": updates["train_tokens"] / seconds["train"],
        **{f"seconds_{stage}": value for stage, value in seconds.items()},
    }


def sample_groups(session: Session, step: int, train_examples: Sequence[Example]) -> list[Group]:
    """P prompts with G graded responses each, from the weights before `step`.

    With `resample_rounds`, groups whose rewards are all equal are replaced by groups of other prompts, round by round
    (dynamic sampling, DAPO, arXiv 2503.14476); what is still without variance after the last round stays.
    """
    config = session.config
    serve_policy(session, version=step - 1)
    groups: list[Group] = []
    for attempt in range(config.resample_rounds + 1):
        wanted = config.rollout_batch_size // config.group_size - len(groups)
        examples = draw_batch(train_examples, wanted, step, derive_seed(config.seed, attempt, "prompts"))
        purpose = f"rollout {attempt}"
        sampled = sample_and_grade(session, step, purpose, examples, n=config.group_size, version=step - 1)
        last = attempt == config.resample_rounds
        groups += [group for group in sampled if last or len({score.reward for score in group[2]}) > 1]
        if len(groups) * config.group_size == config.rollout_batch_size:
            break
    return groups


def advantages_of(config: GRPOConfig, rewards: Tensor) -> Tensor:
    """What each response is worth, (P, G), as the config compares it."""
    if config.loss_type == "no_baseline":
        return rewards
    if config.baseline == "max_rl":
        return maxrl_advantages(rewards, config.advantage_eps)
    return group_advantages(rewards, config.advantage_eps, config.normalize_by_std, config.baseline)


def update_policy(
    session: Session,
    step: int,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[Rollout],
    reference: Policy | None,
) -> Row:
    """Every optimiser step on one batch of rollouts; returns means over them."""
    config, policy = session.config, session.policy
    learning_rate = scheduled_learning_rate(
        config.learning_rate, step, config.steps, config.warmup_steps, config.schedule
    )
    old_log_probs = old_policy_log_probs(config, policy, rollouts) if config.off_policy else None
    reference_log_probs = score_rollouts(config, reference, rollouts) if reference else None
    totals: dict[str, list[float]] = {}
    for epoch in range(config.epochs_per_rollout_batch):
        order = list(range(len(rollouts)))
        random.Random(derive_seed(config.seed, step, f"epoch {epoch}")).shuffle(order)
        for start in range(0, len(order), config.train_batch_size):
            batch = order[start : start + config.train_batch_size]
            rows = partial(map, rollout_row, [rollouts[row] for row in batch])
            with refused_on_error(session.run, step, rows):
                metrics = accumulate_gradient(
                    config, policy, rollouts, batch, old_log_probs, reference_log_probs, session.workers
                )
                metrics["grad_norm"] = clip_and_step(
                    policy.model, optimizer, learning_rate=learning_rate, clip_grad_norm=config.clip_grad_norm
                )
            for name, value in metrics.items():
                totals.setdefault(name, []).append(value)
    # The later updates of a batch change the weights that sampled it: only the first one shows the engine's mismatch.
    totals["mismatch_kl"] = totals["mismatch_kl"][:1]
    train_tokens = sum(totals.pop("train_tokens"))
    return {
        **{name: sum(values) / len(values) for name, values in totals.items()},
        "learning_rate": learning_rate,
        "train_tokens": train_tokens,
    }


def accumulate_gradient(
    config: GRPOConfig,
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
    config: GRPOConfig,
    rollouts: Sequence[Rollout],
    old_log_probs: Sequence[Tensor] | None,
    reference_log_probs: Sequence[Tensor] | None,
    batch_size: int,
    batch_tokens: int,
) -> tuple[float, float, float]:
    """Add the gradient of these rollouts of a batch of `batch_size` with `batch_tokens` response tokens.

    Returns their loss, how many tokens were clipped, and the sum of the engine's mismatch over the tokens.
    """
    device = next(policy.model.parameters()).device
    sums = (0.0, 0.0, 0.0)
    for microbatch in rollout_microbatches(config, rollouts, range(len(rollouts)), device):
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
    config: GRPOConfig, policy: Policy, microbatch: Microbatch, given: Given
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
    config: GRPOConfig, policy: Policy, microbatch: Microbatch, given: Given
) -> tuple[float, Tensor, float]:
    """The same for a loss in which a sequence's tokens act on one another: its slopes first, then the gradient."""
    mask = microbatch.response_mask
    log_probs = score_responses(policy.model, microbatch, config.temperature).requires_grad_()
    padded = given.map(lambda values: pad_responses(values, mask))
    losses, clipped = weighted_loss(config, pad_responses(log_probs, mask), padded, mask)
    (slopes,) = torch.autograd.grad(losses.sum(), log_probs)
    add_gradient(policy.model, microbatch, config.temperature, lambda scores, part: scores * slopes[part])
    return losses.sum().item(), log_probs.detach(), float(clipped)


def weighted_loss(config: GRPOConfig, log_probs: Tensor, given: Given, mask: Tensor) -> tuple[Tensor, Tensor]:
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


def rows_with_gradient(config: GRPOConfig, rollouts: Sequence[Rollout], batch: Sequence[int]) -> list[int]:
    """The rows of `batch` that need a pass. The others have no gradient: they stay in every denominator."""
    rows = [
        row for row in batch if not (config.filter_truncated and rollouts[row].completion.finish_reason == "length")
    ]
    if config.skip_zero_advantages and not config.kl_coefficient:
        rows = [row for row in rows if rollouts[row].advantage != 0]
    return rows


def old_policy_log_probs(config: GRPOConfig, policy: Policy, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """The log-probabilities of every response under the weights that sampled it: N tensors (length,).

    The native engine has them: its arithmetic is the trainer's. Those of any other engine are only close, and
    `min_tokens` changes the distribution that is sampled from.
    """
    if config.engine == "native" and not config.min_tokens:
        return [torch.tensor(rollout.completion.logprobs) for rollout in rollouts]
    return score_rollouts(config, policy, rollouts)


def score_rollouts(config: GRPOConfig, policy: Policy, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """The log-probabilities of every response under the policy's present weights: N tensors (length,)."""
    device = next(policy.model.parameters()).device
    scored: dict[int, Tensor] = {}
    for microbatch in rollout_microbatches(config, rollouts, range(len(rollouts)), device):
        log_probs = score_responses(policy.model, microbatch, config.temperature)
        lengths = [len(rollouts[row].completion.ids) for row in microbatch.rows]
        scored |= dict(zip(microbatch.rows, log_probs.split(lengths), strict=True))
    return [scored[row] for row in range(len(rollouts))]


def rollout_microbatches(
    config: GRPOConfig, rollouts: Sequence[Rollout], rows: Sequence[int], device: torch.device
) -> list[Microbatch]:
    return cut_microbatches(
        [rollout.completion.prompt_ids for rollout in rollouts],
        [rollout.completion.ids for rollout in rollouts],
        rows,
        token_budget=config.microbatch_tokens,
        device=device,
    )


def rollout_row(rollout: Rollout) -> Row:
    return {**response_row(rollout.example, rollout.completion, rollout.score), "advantage": rollout.advantage}
