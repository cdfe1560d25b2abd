"""Group relative policy optimization, on- and off-policy (DeepSeekMath, https://arxiv.org/abs/2402.03300).

A step: draw prompts, sample a group of responses for each, pay them, compare each with its siblings, and follow the
policy gradient for one or several epochs over the rollouts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from veritune.core.randomness import derive_seed
from veritune.core.types import Example, Group, Rollout
from veritune.losses import group_advantages, maxrl_advantages
from veritune.model.policy import Policy, load_policy
from veritune.recipes.config import GRPOConfig
from veritune.trainer.batches import draw_batch, examples_of, sample_and_grade, serve_policy
from veritune.trainer.evaluate import response_row, summarize
from veritune.trainer.loop import refused_on_error, train
from veritune.trainer.optimizer import clip_and_step, prepare_optimizer, scheduled_learning_rate
from veritune.trainer.policy_gradient import (
    batch_backward,
    old_policy_log_probs,
    score_rollouts,
)
from veritune.trainer.session import Row, Session, Stopwatch


def run(session: Session[GRPOConfig]) -> None:
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
    session: Session[GRPOConfig],
    step: int,
    optimizer: torch.optim.Optimizer,
    train_examples: Sequence[Example],
    reference: Policy | None,
) -> Row:
    """One rollout batch: sample, pay, compare, update. Returns the step's metrics."""
    config, clock = session.config, Stopwatch()
    groups = sample_groups(session, step, train_examples)  # P groups of G
    clock.lap("rollout")

    rewards = torch.tensor([[score.reward for score in group.scores] for group in groups])  # (P, G)
    advantages = advantages_of(config, rewards)  # (P, G)
    rollouts = [
        Rollout(group.example, completion, score, advantage)
        for group, of_group in zip(groups, advantages.tolist(), strict=True)
        for completion, score, advantage in zip(group.completions, group.scores, of_group, strict=True)
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


def sample_groups(session: Session[GRPOConfig], step: int, train_examples: Sequence[Example]) -> list[Group]:
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
        groups += [group for group in sampled if last or len({score.reward for score in group.scores}) > 1]
        if len(groups) * config.group_size == config.rollout_batch_size:
            break
    return groups


def advantages_of(config: GRPOConfig, rewards: Tensor) -> Tensor:
    """The advantage of each response, (P, G), as the config compares siblings."""
    if not config.loss.baseline:
        return rewards
    if config.baseline == "max_rl":
        return maxrl_advantages(rewards, config.advantage_eps)
    return group_advantages(rewards, config.advantage_eps, config.normalize_by_std, config.baseline)


def update_policy(
    session: Session[GRPOConfig],
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
                metrics = batch_backward(
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
