"""Group relative policy optimization, on- and off-policy (DeepSeekMath, https://arxiv.org/abs/2402.03300).

A step: draw prompts, sample a group of responses for each, pay them, compare each with its siblings, and follow the
policy gradient for one or several epochs over the rollouts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from veritune.core.config import require
from veritune.core.errors import ConfigError
from veritune.core.randomness import derive_seed
from veritune.core.types import Example, Rollout
from veritune.losses import POLICY_GRADIENT_LOSSES, group_advantages, maxrl_advantages
from veritune.model.policy import Policy, load_policy
from veritune.trainer.evaluate import Group, response_row, summarize
from veritune.trainer.loop import (
    Row,
    Session,
    Stopwatch,
    clip_and_step,
    draw_batch,
    examples_of,
    prepare_optimizer,
    refused_on_error,
    sample_and_grade,
    scheduled_learning_rate,
    serve_policy,
    train,
)
from veritune.trainer.policy_gradient import (
    PolicyGradientConfig,
    accumulate_gradient,
    old_policy_log_probs,
    score_rollouts,
)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PolicyGradientConfig):
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
    baseline: Literal["group_mean", "leave_one_out", "max_rl"] = "group_mean"
    """What a response is compared with: its group's mean, the mean of the others (RLOO), or MaxRL's scaled mean."""
    normalize_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); off is Dr. GRPO."""
    advantage_eps: float = 1e-6
    """Added to the group's standard deviation."""
    resample_rounds: int = 0
    """How often groups whose rewards are all equal are drawn again with other prompts (dynamic sampling)."""

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
        require(self, "advantage_eps", self.advantage_eps >= 0, "0 or more")
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


def rollout_row(rollout: Rollout) -> Row:
    return {**response_row(rollout.example, rollout.completion, rollout.score), "advantage": rollout.advantage}
