"""Make the embedded policy from nothing: a tokenizer and a small Qwen2 model, trained on synthetic Countdown traces.

The shipped weights are what `veritune pretrain-embedded` made with its defaults.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import torch

from veritune.core.randomness import derive_seed
from veritune.model.policy import Policy, new_embedded_policy, save_policy
from veritune.recipes.config import PretrainConfig
from veritune.tasks.countdown import Problem, generate_problems
from veritune.tasks.countdown_traces import CAREFUL, CARELESS, TraceHabits, write_trace
from veritune.tasks.prompts import fill_prompt, load_prompt
from veritune.trainer.microbatches import Microbatch, cut_microbatches, supervised_backward
from veritune.trainer.optimizer import clip_and_step, make_optimizer

CHUNK = 2048
"""Traces that are sorted by length together, so that little is padded."""


def pretrain(config: PretrainConfig) -> None:
    """Train and write the policy, telling the loss every hundred steps."""
    if config.threads:
        torch.set_num_threads(config.threads)
    problems = generate_problems(config.problems, config.seed, "train")
    generator = random.Random(derive_seed(config.seed, 0, "traces"))
    sample = (pretraining_text(config, problems, CARELESS, generator) for _ in range(2 * CHUNK))
    policy = new_embedded_policy(
        (prompt + response for prompt, response in sample),
        seed=derive_seed(config.seed, 0, "initial weights"),
    )
    optimizer = make_optimizer(policy.model, learning_rate=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    model, seen, began = policy.model.train(), 0, time.perf_counter()
    recent: list[float] = []
    for step, batch in enumerate(batches(config, policy, problems, generator), start=1):
        loss = supervised_backward(model, batch, response_tokens=len(batch.packed.labels))
        clip_and_step(
            model, optimizer, learning_rate=_learning_rate(config, step, seen / config.tokens), clip_grad_norm=1.0
        )
        seen += batch.packed.input_ids.numel()
        recent.append(loss)
        if step % 100 == 0:
            print(
                f"step {step}  {seen / 1e6:.1f}M tokens  loss {sum(recent) / len(recent):.4f}  "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )
            recent = []
    model.eval()
    save_policy(policy, config.output)
    print(f"wrote {config.output}")


def _learning_rate(config: PretrainConfig, step: int, progress: float) -> float:
    return config.learning_rate * min(1.0, step / 50, max(0.02, (1 - progress) / 0.4))


def pretraining_text(
    config: PretrainConfig, problems: list[Problem], habits: TraceHabits, generator: random.Random
) -> tuple[str, str]:
    """A prompt and a response: a problem with its numbers in any order, in one of the two wordings."""
    problem = generator.choice(problems)
    numbers = generator.sample(problem.numbers, len(problem.numbers))
    question = f"Use {', '.join(map(str, numbers))} to make {problem.target}."
    response = write_trace(numbers, problem.target, generator, habits).response
    if generator.random() < config.r1_zero:
        return fill_prompt(load_prompt("r1_zero"), question), "\n" + response
    return fill_prompt(load_prompt("compact"), question), response


def batches(
    config: PretrainConfig, policy: Policy, problems: list[Problem], generator: random.Random
) -> Iterator[Microbatch]:
    """Batches of about `batch_tokens` positions until the tokens are spent."""
    seen = 0
    while seen < config.tokens:
        habits = CAREFUL if seen < config.careful * config.tokens else CARELESS
        pairs = [pretraining_text(config, problems, habits, generator) for _ in range(CHUNK)]
        cut = list(
            cut_microbatches(
                [policy.encode(prompt) for prompt, _ in pairs],
                [[*policy.encode(response), policy.end_of_response] for _, response in pairs],
                range(CHUNK),
                token_budget=config.batch_tokens,
                device=torch.device("cpu"),
            )
        )
        seen += sum(batch.packed.input_ids.numel() for batch in cut)
        yield from generator.sample(cut, len(cut))
