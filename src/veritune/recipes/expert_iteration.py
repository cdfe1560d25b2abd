"""Expert iteration: sample, keep what is right, fine-tune on it, again (Anthony et al., arXiv 1705.08439; STaR)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from veritune.core.randomness import derive_seed
from veritune.core.types import Completion, Example, Group
from veritune.model.policy import load_policy, trained_parameters
from veritune.recipes.config import ExpertIterationConfig
from veritune.trainer.batches import draw_batch, examples_of, sample_and_grade, serve_policy
from veritune.trainer.evaluate import log_generations
from veritune.trainer.loop import supervised_update, train
from veritune.trainer.optimizer import prepare_optimizer, scheduled_learning_rate
from veritune.trainer.session import Row, Session, Stopwatch


def run(session: Session[ExpertIterationConfig]) -> None:
    """Train the session's policy on its own right answers and leave everything in its run folder."""
    optimizer = prepare_optimizer(session)
    examples = examples_of(session.task, "train")
    train(
        session,
        optimizer,
        steps=session.config.steps,
        update=lambda step: expert_iteration_step(session, step, optimizer, examples),
    )


def expert_iteration_step(
    session: Session[ExpertIterationConfig],
    step: int,
    optimizer: torch.optim.Optimizer,
    train_examples: Sequence[Example],
) -> Row:
    """One round: sample, keep what is right, fine-tune on it. Returns the round's metrics."""
    config, clock = session.config, Stopwatch()
    examples = draw_batch(train_examples, config.questions_per_step, step, config.seed)
    serve_policy(session, version=step - 1)
    groups = sample_and_grade(session, step, "rollout", examples, n=config.group_size, version=step - 1)
    summary = log_generations(groups, lambda rows: session.run.write_rows("rollouts", step, rows))
    clock.lap("rollout")

    kept = right_responses(groups, deduplicate=config.deduplicate)
    if config.starting_point == "first" and kept:
        start_over(session, optimizer)
    rates = iter(learning_rates(config, step, config.epochs_per_step * math.ceil(len(kept) / config.batch_size)))
    updates: list[Row] = []
    for epoch in range(config.epochs_per_step):
        random.Random(derive_seed(config.seed, step, f"epoch {epoch}")).shuffle(kept)
        for start in range(0, len(kept), config.batch_size):
            pairs = [(completion.prompt_ids, completion.ids) for completion in kept[start : start + config.batch_size]]
            updates.append(supervised_update(session, step, optimizer, pairs, next(rates)))
    seconds = clock.lap("train")
    sampled = sum(len(completion.ids) for group in groups for completion in group.completions)
    trained = sum(update["train_tokens"] for update in updates)
    return {
        **summary,
        "responses": sum(len(group.completions) for group in groups),
        "responses_kept": len(kept),
        "updates": len(updates),
        **{
            name: sum(update[name] for update in updates) / max(len(updates), 1)
            for name in ("loss", "grad_norm", "learning_rate")
        },
        "train_tokens": trained,
        "rollout_tokens_per_second": sampled / seconds["rollout"],
        "train_tokens_per_second": trained / seconds["train"],
        **{f"seconds_{stage}": value for stage, value in seconds.items()},
    }


def learning_rates(config: ExpertIterationConfig, step: int, updates: int) -> list[float]:
    """Of each update of a round: the round's place in the schedule, or the update's where every round starts over."""
    places, last = [step] * updates, config.steps
    if config.starting_point == "first":
        places, last = list(range(1, updates + 1)), updates
    peak, warmup, schedule = config.learning_rate, config.warmup_steps, config.schedule
    return [scheduled_learning_rate(peak, place, last, warmup, schedule) for place in places]


def start_over(session: Session[ExpertIterationConfig], optimizer: torch.optim.Optimizer) -> None:
    """Give the policy the weights that the run began with, and the optimiser no past.

    So no round drifts further than one fine-tuning from them (ReST-EM, Singh et al. 2023, arXiv 2312.06585).
    """
    first = load_policy(session.config.policy, device=session.device, dtype=session.dtype)
    weights = trained_parameters(first.model)
    with torch.no_grad():
        for name, parameter in trained_parameters(session.policy.model).items():
            parameter.copy_(weights[name])
    optimizer.state.clear()


def right_responses(groups: Sequence[Group], *, deduplicate: bool) -> list[Completion]:
    """The completions that were paid in full; of equal ones to a prompt only the first, if asked."""
    right = [
        completion
        for group in groups
        for completion, score in zip(group.completions, group.scores, strict=True)
        if score.answer_reward >= 1
    ]
    if not deduplicate:
        return right
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], Completion] = {}
    for completion in right:
        first.setdefault((completion.prompt_ids, completion.ids), completion)
    return list(first.values())
