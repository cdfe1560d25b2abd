"""Group relative policy optimization, on- and off-policy (DeepSeekMath, https://arxiv.org/abs/2402.03300).

A step: draw prompts, sample a group of responses for each, pay them, compare each with its siblings, and follow the
policy gradient for one or several epochs over the rollouts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from veritune.configs import TrainingConfig, require
from veritune.errors import ConfigError, DataError, TrainingError
from veritune.evaluate import evaluate, response_row, summarize
from veritune.policies import Policy, encode_prompts
from veritune.primitives import (
    Baseline,
    approximate_kl_k3,
    compute_policy_gradient_loss,
    group_advantages,
    sequence_loss_weights,
)
from veritune.randomness import derive_seed
from veritune.runs import Checkpoint, RunFolder
from veritune.training import (
    Microbatch,
    Row,
    Stopwatch,
    clip_and_step,
    cut_microbatches,
    draw_batch,
    make_optimizer,
    pad_responses,
    refused,
    require_version,
    restore_optimizer,
    sampling_of,
    scheduled_learning_rate,
    score_responses,
    train,
)
from veritune.types import Engine, Example, Rollout, Task

NEEDS_OLD_POLICY = ("grpo_clip", "grpo_no_clip")


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(TrainingConfig):
    """Settings of `veritune grpo`; the defaults train the embedded policy on two CPU cores."""

    steps: int = 100
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
    loss_type: Literal["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"] = (
        "reinforce_with_baseline"
    )
    """The policy-gradient loss; grpo_clip and grpo_no_clip need an old policy, so an off-policy setting."""
    cliprange: float = 0.2
    """Distance from 1 at which grpo_clip clips the probability ratio."""
    normalize_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); off is Dr. GRPO."""
    advantage_eps: float = 1e-6
    """Added to the group's standard deviation."""
    length_normalization: Literal["sequence", "constant", "token"] = "sequence"
    """Mean over each response's tokens, sum over them divided by normalize_constant, or mean over the batch's."""
    normalize_constant: float | None = None
    """The divisor of length_normalization constant; default: max_tokens."""
    skip_zero_advantages: bool = True
    """Leave responses without advantage out of the passes: they have no gradient, and stay in the denominators."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        require(self, "advantage_eps", self.advantage_eps >= 0, "0 or more")
        require(
            self,
            "normalize_constant",
            self.normalize_constant is None or self.normalize_constant > 0,
            "positive",
        )
        if self.group_size < 2 and self.loss_type != "no_baseline":
            raise ConfigError(
                f"group_size is {self.group_size}; loss_type {self.loss_type} compares siblings, at least 2"
            )
        if self.loss_type in NEEDS_OLD_POLICY and not self.off_policy:
            raise ConfigError(
                f"loss_type is {self.loss_type!r}, but every update is on-policy, so there is no old policy; set "
                "epochs_per_rollout_batch above 1 or train_batch_size below rollout_batch_size, or use "
                "reinforce_with_baseline"
            )

    @property
    def off_policy(self) -> bool:
        """Whether some update uses rollouts of weights older than its own."""
        return self.epochs_per_rollout_batch > 1 or self.train_batch_size < self.rollout_batch_size


def run(
    config: GRPOConfig,
    policy: Policy,
    task: Task,
    engine: Engine,
    run_folder: RunFolder,
    *,
    checkpoint: Checkpoint | None = None,
    listen: Callable[[Row], None] = lambda row: None,
) -> None:
    """Train `policy` on `task`, from `checkpoint` if there is one, and leave everything in `run_folder`."""
    optimizer = make_optimizer(
        policy.model,
        learning_rate=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
    )
    if checkpoint:
        restore_optimizer(checkpoint, policy, optimizer)
    train_examples = task.examples("train")
    validation_examples = task.examples("validation")[: config.validation_examples]
    if not train_examples or not validation_examples:
        raise DataError(f"task {task.name} has no {'training' if not train_examples else 'validation'} examples")
    validation_prompts = encode_prompts(policy, map(task.prompt, validation_examples))
    train(
        config,
        run_folder,
        policy,
        optimizer,
        start=checkpoint.step if checkpoint else 0,
        update=lambda step: grpo_step(config, step, policy, optimizer, task, engine, train_examples, run_folder),
        validate=lambda step: validate(
            config, step, policy, task, engine, validation_examples, validation_prompts, run_folder
        ),
        listen=listen,
    )


def grpo_step(
    config: GRPOConfig,
    step: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    task: Task,
    engine: Engine,
    train_examples: Sequence[Example],
    run_folder: RunFolder,
) -> Row:
    """One rollout batch: sample, pay, compare, update. Returns the step's metrics."""
    clock = Stopwatch()
    prompts = config.rollout_batch_size // config.group_size
    examples = draw_batch(train_examples, prompts, step, config.seed)  # P
    prompts_ids = encode_prompts(policy, map(task.prompt, examples))

    engine.load_weights(policy.model, version=step - 1)
    sampling = sampling_of(config, step, "rollout", stop=task.stop, n=config.group_size)
    completions_P_G = engine.generate(prompts_ids, sampling)
    require_version(completions_P_G, step - 1)
    clock.lap("rollout")

    scores_P_G = [
        [task.reward(completion.text, example.ground_truth) for completion in group]
        for example, group in zip(examples, completions_P_G, strict=True)
    ]
    rewards = torch.tensor([[score.reward for score in group] for group in scores_P_G])  # (P, G)
    baseline: Baseline = "none" if config.loss_type == "no_baseline" else "group_mean"
    normalize_by_std = config.normalize_by_std and baseline != "none"
    advantages = group_advantages(rewards, config.advantage_eps, normalize_by_std, baseline)  # (P, G)
    rollouts = [
        Rollout(example, completion, score, advantage)
        for example, *group in zip(examples, completions_P_G, scores_P_G, advantages.tolist(), strict=True)
        for completion, score, advantage in zip(*group, strict=True)
    ]
    run_folder.write_rows("rollouts", step, map(rollout_row, rollouts))
    clock.lap("grade")

    updates = update_policy(config, step, policy, optimizer, rollouts, run_folder)
    seconds = clock.lap("train")
    completions = [rollout.completion for rollout in rollouts]
    return {
        **summarize([rollout.score for rollout in rollouts], completions),
        "zero_variance": (rewards == rewards[:, :1]).all(dim=1).float().mean().item(),
        **updates,
        "rollout_tokens_per_second": sum(len(completion.ids) for completion in completions) / seconds["rollout"],
        "train_tokens_per_second": updates["train_tokens"] / seconds["train"],
        **{f"seconds_{stage}": value for stage, value in seconds.items()},
    }


def update_policy(
    config: GRPOConfig,
    step: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[Rollout],
    run_folder: RunFolder,
) -> Row:
    """Every optimiser step on one batch of rollouts; returns means over them."""
    learning_rate = scheduled_learning_rate(
        config.learning_rate, step, config.steps, config.warmup_steps, config.schedule
    )
    old_log_probs = score_rollouts(config, policy, rollouts) if config.off_policy else None
    totals: dict[str, list[float]] = {}
    policy.model.train()
    for epoch in range(config.epochs_per_rollout_batch):
        order = list(range(len(rollouts)))
        random.Random(derive_seed(config.seed, step, f"epoch {epoch}")).shuffle(order)
        for start in range(0, len(order), config.train_batch_size):
            batch = order[start : start + config.train_batch_size]
            try:
                metrics = accumulate_gradient(config, policy, rollouts, batch, old_log_probs)
                metrics["grad_norm"] = clip_and_step(
                    policy.model, optimizer, learning_rate=learning_rate, clip_grad_norm=config.clip_grad_norm
                )
            except TrainingError as error:
                raise refused(run_folder, step, str(error), [rollout_row(rollouts[row]) for row in batch]) from error
            for name, value in metrics.items():
                totals.setdefault(name, []).append(value)
    policy.model.eval()
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
    old_log_probs: Sequence[Tensor] | None,
) -> dict[str, float]:
    """Add the gradient of one train batch's loss, whatever its microbatches; the loss has its denominators first."""
    device = next(policy.model.parameters()).device
    response_tokens = sum(len(rollouts[row].completion.ids) for row in batch)
    # A rollout without advantage has no gradient: it stays in every denominator and out of every pass.
    rows = [row for row in batch if rollouts[row].advantage != 0 or not config.skip_zero_advantages]
    loss = clipped = mismatch = 0.0
    passed = 0
    for microbatch in rollout_microbatches(config, rollouts, rows, device):
        mask = microbatch.response_mask
        log_probs = score_responses(policy.model, microbatch, config.temperature)  # (B, T)
        old = pad_responses([old_log_probs[row] for row in microbatch.rows], mask) if old_log_probs else None
        advantages = torch.tensor([[rollouts[row].advantage] for row in microbatch.rows], device=device)  # (B, 1)
        per_token_loss, metadata = compute_policy_gradient_loss(
            log_probs,
            config.loss_type,
            raw_rewards=advantages,
            advantages=advantages,
            old_log_probs=old,
            cliprange=config.cliprange,
            response_mask=mask,
        )
        weights = sequence_loss_weights(
            mask,
            config.length_normalization,
            config.normalize_constant or config.max_tokens,
            batch_size=len(batch),
            total_tokens=response_tokens,
        )
        microbatch_loss = (per_token_loss * weights).sum()
        if not torch.isfinite(microbatch_loss):
            raise TrainingError(f"the loss is {microbatch_loss.item()}")
        microbatch_loss.backward()
        sampled = pad_responses([torch.tensor(rollouts[row].completion.logprobs) for row in microbatch.rows], mask)
        loss += microbatch_loss.item()
        clipped += float(metadata["clipped"][mask].sum()) if "clipped" in metadata else 0.0
        trained = log_probs.detach() if old is None else old
        mismatch += float(approximate_kl_k3(sampled, trained)[mask].sum())
        passed += int(mask.sum())
    if not rows:  # the same update as with the rows: no gradient, but the optimiser's momentum
        for parameter in policy.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    return {
        "loss": loss,
        "clip_fraction": clipped / response_tokens,
        "mismatch_kl": mismatch / max(passed, 1),
        "train_tokens": sum(
            len(rollouts[row].completion.prompt_ids) + len(rollouts[row].completion.ids) for row in rows
        ),
    }


@torch.inference_mode()
def score_rollouts(config: GRPOConfig, policy: Policy, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """The log-probabilities of every response under the weights that all epochs start from: N tensors (length,)."""
    device = next(policy.model.parameters()).device
    scored: dict[int, Tensor] = {}
    for microbatch in rollout_microbatches(config, rollouts, range(len(rollouts)), device):
        log_probs = score_responses(policy.model, microbatch, config.temperature)
        lengths = microbatch.response_mask.sum(dim=1).tolist()
        scored |= dict(zip(microbatch.rows, log_probs[microbatch.response_mask].split(lengths), strict=True))
    return [scored[row].clone() for row in range(len(rollouts))]


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


def validate(
    config: GRPOConfig,
    step: int,
    policy: Policy,
    task: Task,
    engine: Engine,
    examples: Sequence[Example],
    prompts_ids: Sequence[Sequence[int]],
    run_folder: RunFolder,
) -> Row:
    """One sampled response for each held-out problem, at the training temperature; every response is kept."""
    began = time.perf_counter()
    engine.load_weights(policy.model, version=step)
    sampling = sampling_of(config, step, "validation", stop=task.stop, n=1)
    evaluation = evaluate(engine, task.reward, examples, prompts_ids, sampling)
    run_folder.write_rows("validation", step, evaluation.rows())
    seconds = time.perf_counter() - began
    return {
        **{f"validation_{name}": value for name, value in evaluation.summary().items()},
        "seconds_validate": seconds,
    }


def rollout_row(rollout: Rollout) -> Row:
    return {**response_row(rollout.example, rollout.completion, rollout.score), "advantage": rollout.advantage}
